"""Which driver a process gets: CUDA stays off, with the reason, on builds of torch that can't use it."""

import os
from types import ModuleType

import pytest

from simpletuner_gh200.errors import DriverError
from simpletuner_gh200.memory.driver import detect
from simpletuner_gh200.memory.driver.interface import HOST, NullDriver


def version(**values: str | None) -> ModuleType:
    module = ModuleType("torch.version")
    vars(module).update(values)
    return module


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (version(hip="6.4", cuda=None), "AMD"),
        (version(hip=None, cuda=None), "CPU build"),
        (version(hip=None, cuda=None, xpu="2025"), "Intel"),
        (version(hip=None, cuda="13.0"), None),
        (None, None),
    ],
)
def test_builds_of_torch(found: ModuleType | None, reason: str | None) -> None:
    refusal = detect.torch_refusal(found)
    assert (refusal is None) if reason is None else (refusal is not None and reason in refusal)


def test_mps_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    assert "MPS" in str(detect.torch_refusal(version(cuda=None)))


def test_forked_child_gets_a_null_driver_of_its_own() -> None:
    class Pretender(NullDriver):
        name = "cuda"

    with detect.using(Pretender()):
        pid = os.fork()
        if pid == 0:
            child = detect.current()
            os._exit(0 if child.name == "null" and "forked" in str(child.capabilities(0).absence) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert detect.current().name == "cuda"


def test_null_driver_refuses_with_its_reason() -> None:
    driver = NullDriver("a test")
    for call in (lambda: driver.alloc_device(64, 0), lambda: driver.prefer((0, 64), HOST), lambda: driver.free(1, 0)):
        with pytest.raises(DriverError, match="a test"):
            call()
    assert driver.device_count() == 0
