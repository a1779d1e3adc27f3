from __future__ import annotations

import logging
import os

import pytest
from hypothesis import settings

pytest_plugins = ("tests.releases", "tests.ci_skips", "tests.cpu_times")

# No deadline: neighbours are noisy, and a time never decides whether a test passes here.
# Other examples at every run, in CI too, where hypothesis would by itself repeat the same ones.
settings.register_profile("default", deadline=None, max_examples=60, derandomize=False)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

# Made before SimpleTuner is imported, as in a run: later it would be of a class of SimpleTuner 4, with its own level.
OURS = logging.getLogger("simpletuner_gh200")


@pytest.fixture(autouse=True)
def our_logger_speaks() -> None:
    """SimpleTuner 3 silences every logger made before it: for a test that imports it, and all that come after."""
    OURS.disabled = False
