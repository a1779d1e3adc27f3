"""On a machine with an NVIDIA GPU: the selftest, all of it. Skipped everywhere else."""

import pytest

from simpletuner_gh200.diagnostics.selftest.run import selftest
from simpletuner_gh200.memory.driver.detect import open_driver

driver = open_driver()


@pytest.mark.skipif(driver.name != "cuda", reason="no CUDA device")
def test_selftest_on_the_real_device() -> None:
    result = selftest(driver)
    assert result.having("fail") == []
    assert result.measured["to_device_bytes_per_s"] > 0
