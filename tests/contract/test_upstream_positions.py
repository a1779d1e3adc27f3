"""Where ranks after the first were in the dataset: saved and looked for under one name, or under two."""

from __future__ import annotations

from importlib.metadata import version

import pytest
from packaging.version import Version

from simpletuner_gh200.config.packages import find_package
from simpletuner_gh200.operate.checkpoints import PLACES_KEPT

pytestmark = pytest.mark.releases


def test_the_installed_release_is_one_that_we_warn_of_or_one_that_finds_them_again() -> None:
    package = find_package("simpletuner")
    assert package is not None
    training = package / "helpers" / "training"
    assert 'f"training_state-rank{rank}.json"' in (training / "save_hooks.py").read_text(), "how it is saved"
    elsewhere = 'f"training_state-{get_rank()}.json"' in (training / "trainer.py").read_text()
    assert elsewhere == (Version(version("simpletuner")) < PLACES_KEPT)
