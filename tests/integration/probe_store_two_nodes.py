"""Makes two ranks believe that they are alone on a node each."""

from __future__ import annotations

import os


def install(record: dict) -> None:
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", GROUP_RANK=os.environ["RANK"])
