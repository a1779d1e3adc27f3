"""What a checkpoint of the installed release is: whether guarded, how it is found, where each rank's place is kept."""

from __future__ import annotations

from importlib.metadata import version

import pytest
from packaging.version import Version

from simpletuner_gh200.config.files import find_package
from simpletuner_gh200.operate.preflight import PLACES_KEPT
from simpletuner_gh200.seams.checkpoints import ASIDE
from simpletuner_gh200.upstream.checkpoints import guarded

pytestmark = pytest.mark.releases


def test_the_installed_release_is_one_that_we_warn_of_or_one_that_finds_them_again() -> None:
    package = find_package("simpletuner")
    assert package is not None
    training = package / "helpers" / "training"
    assert 'f"training_state-rank{rank}.json"' in (training / "save_hooks.py").read_text(), "how it is saved"
    elsewhere = 'f"training_state-{get_rank()}.json"' in (training / "trainer.py").read_text()
    assert elsewhere == (Version(version("simpletuner")) < PLACES_KEPT)


def test_the_installed_release_guards_its_checkpoints_if_its_version_says_so() -> None:
    package = find_package("simpletuner")
    assert package is not None
    manager = (package / "helpers" / "utils" / "checkpoint_manager.py").read_text()
    assert ("def write_guard" in manager) == guarded(version("simpletuner"))
    lister = 'd.startswith("checkpoint") and not d.endswith("tmp")'
    assert lister in manager and not ASIDE.startswith("checkpoint"), "what is kept aside is not among its own"
