from __future__ import annotations

import logging
import os
import signal

import pytest
from hypothesis import settings

pytest_plugins = ("tests.releases", "tests.skips", "tests.cpu_times", "tests.integration.session_forge")

# No deadline: neighbours are noisy, and a time never decides whether a test passes here.
# CI tries the same examples every time (hypothesis sees CI and does so by itself): a rare new one should fail whoever
# can look into it, not somebody else's change. `make check` tries others at every run, `HYPOTHESIS_PROFILE=long` many.
settings.register_profile("default", deadline=None, max_examples=60)
settings.register_profile("long", deadline=None, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

# `nohup make test`, or `make test &` in a script: whoever starts us so has these ignored, and so would have every
# process that a test starts and then interrupts. A test that wants one ignored says so itself.
for number, usual in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGQUIT, signal.SIG_DFL),
    (signal.SIGHUP, signal.SIG_DFL),
):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, usual)

# Made before SimpleTuner is imported, as in a run: later it would be of a class of SimpleTuner 4, with its own level.
OURS = logging.getLogger("simpletuner_gh200")


@pytest.fixture(autouse=True)
def our_logger_speaks() -> None:
    """SimpleTuner 3 silences every logger made before it: for a test that imports it, and all that come after."""
    OURS.disabled = False
