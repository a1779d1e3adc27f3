"""The way from a seam to the batch path of the cache feature."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from simpletuner_gh200.seams.batch_path import BatchPath
    from simpletuner_gh200.seams.runtime import Runtime


def batch_path(runtime: Runtime) -> BatchPath | None:
    """None until the caches are attached, and where they are off."""
    for feature in runtime.features:
        found: Any = getattr(feature, "batch_path", None)
        if found is not None:
            return found  # type: ignore[no-any-return]
    return None
