"""Upstream's tests with and without the extension."""

from __future__ import annotations

from pathlib import Path

import pytest

from simpletuner_gh200.errors import RunFailed, UsageError
from simpletuner_gh200.operate import parity
from simpletuner_gh200.operate.parity import Difference
from tests.unit.compat.rebase_samples import write

TESTS = """
import os, unittest

class T(unittest.TestCase):
    def test_same(self):
        import simpletuner

    def test_wrong_both_times(self):
        self.fail("as ever")

    @unittest.skip("not here")
    def test_skipped(self):
        pass

    def test_off_only(self):
        self.assertEqual(os.environ["SIMPLETUNER_GH200"], "0")

    def test_unstable(self):
        path = os.path.join(os.path.dirname(__file__), "count")
        count = os.path.getsize(path) if os.path.exists(path) else 0
        open(path, "a").write("x")
        self.assertEqual(count, 0)
"""


def test_differences_are_told_from_instability(tmp_path: Path) -> None:
    broken = {"tests/test_broken.py": "import not_here\n"}
    write(tmp_path, {"simpletuner/__init__.py": "", "tests/test_some.py": TESTS, **broken})
    found = parity.run_parity(tmp_path, [])
    assert found.counts == {"passed": 3, "failed": 1, "skipped": 1, "error": 1}
    assert not found.ok
    assert [(d.test.rpartition("::")[2], d.without, d.with_extension, d.unstable) for d in found.differences] == [
        ("test_off_only", "passed", "failed", False),
        ("test_unstable", "passed", "failed", True),
    ]


def test_nothing_to_compare_is_no_parity(tmp_path: Path) -> None:
    write(tmp_path, {"simpletuner/__init__.py": "", "tests/test_broken.py": "import not_here\n"})
    with pytest.raises(RunFailed, match="1 error"):
        parity.run_parity(tmp_path, [])


def test_a_test_that_is_gone_differs() -> None:
    assert parity.compare({"a": "passed"}, {}) == [Difference("a", "passed", "missing")]
    assert parity.compare({"a": "failed"}, {"a": "failed"}) == []


def test_a_tree_without_tests_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no SimpleTuner"):
        parity.run_parity(tmp_path, [])
    write(tmp_path, {"simpletuner/__init__.py": ""})
    with pytest.raises(UsageError, match="no tests"):
        parity.run_parity(tmp_path, [])
