"""Placement decisions: every refusal has its reason; auto always finds something."""

from dataclasses import replace
from pathlib import Path

import pytest

from simpletuner_gh200.errors import FeatureUnavailable
from simpletuner_gh200.memory.allocate import choose_kind
from simpletuner_gh200.memory.driver.cuda import memory_mode
from simpletuner_gh200.memory.driver.interface import Capabilities, NullDriver
from simpletuner_gh200.memory.numa import Node, bind, choose_nodes, nodes_of_pages, read_nodes
from simpletuner_gh200.memory.slab import Slab
from simpletuner_gh200.units import GIB

GRACE = Capabilities(
    ordinal=0,
    name="a device",
    managed=True,
    concurrent_managed=True,
    pageable_access=True,
    host_page_tables=True,
    direct_managed_from_host=True,
    host_register=True,
    integrated=False,
    device_total=96 * GIB,
    page_size=65536,
    host_node=0,
    device_node=1,
    mode="numa",
)
NOTHING = NullDriver().capabilities(0)


def test_without_a_device_only_host_memory() -> None:
    assert choose_kind("auto", NOTHING).kind == "host"
    assert choose_kind("host", NOTHING).kind == "host"
    with pytest.raises(FeatureUnavailable, match="no CUDA device"):
        choose_kind("registered", NOTHING)


def test_managed_slabs_are_refused() -> None:
    with pytest.raises(FeatureUnavailable, match="move back and forth"):
        choose_kind("managed", GRACE)


def test_auto_takes_what_the_device_copies_from_directly() -> None:
    assert choose_kind("auto", GRACE).kind == "registered"
    without = choose_kind("auto", replace(GRACE, host_register=False))
    assert (without.kind, without.reason) == ("host", "the device can't register host memory")


@pytest.mark.parametrize(
    ("facts", "mode"),
    [
        ({"integrated": True, "shares_page_tables": True, "is_node": False}, "single pool"),
        ({"integrated": False, "shares_page_tables": True, "is_node": True}, "numa"),
        ({"integrated": False, "shares_page_tables": True, "is_node": False}, "cdmm"),
        ({"integrated": False, "shares_page_tables": False, "is_node": False}, "discrete"),
    ],
)
def test_memory_mode(facts: dict[str, bool], mode: str) -> None:
    assert memory_mode(**facts) == mode


NODES = (Node(0, True, 100), Node(1, False, 1000), Node(2, True, 500))


def test_nodes_near_the_gpu_first_and_never_hbm() -> None:
    assert choose_nodes(NODES, near=0, device_node=1, size=80) == (0,)
    assert choose_nodes(NODES, near=0, device_node=1, size=200) == (0, 2), "too big for the near node"
    assert choose_nodes(NODES, near=1, device_node=1, size=10) == (0, 2)
    assert choose_nodes(NODES, near=None, device_node=2, size=10) == (0,)


def test_binding_on_this_machine_binds_or_says_why() -> None:
    slab = Slab.anonymous(1 << 20)
    binding = bind(slab.address, slab.size, near=0)
    assert "bound to CPU node" in binding or "one memory node" in binding
    slab.array[:] = 1
    assert int(slab.array[-1]) == 1


def test_kernel_tells_where_touched_pages_are() -> None:
    slab = Slab.anonymous(16 * 4096)
    assert sum(nodes_of_pages(slab.address, slab.size, 4096).values()) == 0, "nothing is there yet"
    slab.array[: 4 * 4096] = 1
    found = nodes_of_pages(slab.address, slab.size, 4096)
    assert 1 <= sum(found.values()) <= 16
    assert set(found) <= {node.index for node in read_nodes()}


def test_nodes_are_read_from_sysfs(tmp_path: Path) -> None:
    for name, cpus, free in (("node0", "0-71", 1000), ("node1", "", 96)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "cpulist").write_text(f"{cpus}\n")
        index = name[-1]
        meminfo = f"Node {index} MemTotal: 5000 kB\nNode {index} MemFree: {free} kB\nNode {index} FilePages: 30 kB\n"
        meminfo += f"Node {index} Shmem: 6 kB\n"
        (tmp_path / name / "meminfo").write_text(meminfo)
    assert read_nodes(tmp_path) == (Node(0, True, 1024 * 1024), Node(1, False, 120 * 1024))
