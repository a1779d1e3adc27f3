"""Available memory is the least of what the machine and every cgroup above us can give."""

from __future__ import annotations

from pathlib import Path

import pytest

from simpletuner_gh200.memory.host import cgroup_rooms, host_memory

MEMINFO = "MemTotal:       1000 kB\nMemFree:         300 kB\nMemAvailable:    700 kB\nHugePages_Total:       3\n"


def machine(root: Path, cgroup: str, files: dict[str, str]) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(MEMINFO)
    (root / "proc/self/cgroup").write_text(cgroup)
    for name, content in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return root


def test_without_a_limit_the_machine_rules(tmp_path: Path) -> None:
    found = host_memory(machine(tmp_path, "0::/user\n", {"user/memory.max": "max"}))
    assert (found.total, found.free, found.available) == (1000 * 1024, 300 * 1024, 700 * 1024)
    assert found.limit == "MemAvailable"


def test_an_ancestors_limit_counts_and_its_clean_page_cache_does_not(tmp_path: Path) -> None:
    files = {
        "job/memory.max": "500000",
        "job/memory.current": "450000",
        "job/memory.stat": "anon 100000\ninactive_file 300000\n",
        "job/step/memory.max": "max",
    }
    found = host_memory(machine(tmp_path, "0::/job/step\n", files))
    assert found.available == 350000
    assert found.limit == "cgroup job"
    assert found.total == 500000


def test_version_1_and_a_full_group(tmp_path: Path) -> None:
    files = {
        "memory/a/memory.limit_in_bytes": "400000",
        "memory/a/memory.usage_in_bytes": "500000",
        "memory/memory.limit_in_bytes": "9223372036854771712",
    }
    root = machine(tmp_path, "4:cpu,memory:/a\n0::/\n", files)
    assert host_memory(root).available == 0, "never negative"
    assert [name for name, _room, _limit in cgroup_rooms(root)] == ["a"], "2^63 means no limit"


def test_inside_a_container_the_own_group_is_the_root_of_the_tree(tmp_path: Path) -> None:
    root = machine(tmp_path, "0::/docker/abc\n", {"memory.max": "600000", "memory.current": "100000"})
    assert host_memory(root).available == 500000


def test_this_machine_can_be_read() -> None:
    found = host_memory()
    assert 0 < found.available <= found.total
    assert found.free >= 0


def test_a_missing_meminfo_is_not_hidden(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        host_memory(tmp_path)


@pytest.mark.parametrize(("hbm_has_cpus", "expected"), [(False, 250 * 1024), (True, 700 * 1024)])
def test_a_gpus_memory_that_is_a_node_of_its_own_is_not_ours(tmp_path: Path, hbm_has_cpus: bool, expected: int) -> None:
    root = machine(tmp_path, "0::/user\n", {"user/memory.max": "max"})
    for index, (cpus, free) in enumerate((("0-71", 250), ("72" if hbm_has_cpus else "", 450))):
        node = root / f"sys/devices/system/node/node{index}"
        node.mkdir(parents=True)
        (node / "cpulist").write_text(cpus + "\n")
        (node / "meminfo").write_text(f"Node {index} MemFree: {free} kB\n")
    found = host_memory(root)
    assert found.available == expected
    assert found.limit == ("MemAvailable" if hbm_has_cpus else "the memory nodes with CPUs")
