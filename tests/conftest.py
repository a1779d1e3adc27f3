from __future__ import annotations

import os

from hypothesis import settings

# No deadline: neighbours are noisy, and a time never decides whether a test passes here.
settings.register_profile("default", deadline=None, max_examples=60)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))
