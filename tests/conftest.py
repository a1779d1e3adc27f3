from __future__ import annotations

import logging
import os

import pytest
from hypothesis import settings

# No deadline: neighbours are noisy, and a time never decides whether a test passes here.
settings.register_profile("default", deadline=None, max_examples=60)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


@pytest.fixture(autouse=True)
def our_loggers_speak() -> None:
    """Importing SimpleTuner silences every logger made before it, ours too, for all tests that come after."""
    for name, logger in logging.root.manager.loggerDict.items():
        if isinstance(logger, logging.Logger) and name.partition(".")[0] == "simpletuner_gh200":
            logger.disabled, logger.propagate = False, True
