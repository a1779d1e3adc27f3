"""SimpleTuner's package itself: ``simpletuner.gh200`` of the earlier guides as its attribute, for ``import`` alone."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import ModuleType

from simpletuner_gh200.seams.patch import Patch, put
from simpletuner_gh200.seams.runtime import Runtime
from simpletuner_gh200.seams.seam import Seam
from simpletuner_gh200.upstream.spec import SeamSpec


def _alias(module: ModuleType, runtime: Runtime) -> Sequence[Patch]:
    """The ``.pth`` line has put it into ``sys.modules``; a tree with a package of its own there has let go of it."""
    there = sys.modules.get("simpletuner.gh200")
    return [put(module, "gh200", there)] if there is not None and not hasattr(module, "gh200") else []


PACKAGE = SeamSpec(
    name="simpletuner.gh200",
    module="simpletuner",
    qualname="__name__",
    parameters=None,
    features=(),
    reason="the earlier guides import from simpletuner.gh200",
)

SEAMS = (Seam(PACKAGE.name, _alias, own_spec=PACKAGE),)
