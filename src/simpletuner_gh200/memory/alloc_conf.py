"""PYTORCH_CUDA_ALLOC_CONF with the keys of the earlier, privately patched torch: kept away from stock torch.

Stock torch raises at its first CUDA use when it meets ``use_uvm`` there, and may crash at the next. The keys' meaning
moves into our own settings (``config/allocator.py``); a build of torch that knows them gets them as they are.
"""

from __future__ import annotations

import logging
from collections.abc import MutableMapping

from simpletuner_gh200.config.allocator import carried_over
from simpletuner_gh200.config.environment import ALLOCATOR

logger = logging.getLogger("simpletuner_gh200")


def activate(environment: MutableMapping[str, str]) -> None:
    """Clean the allocator variables. Call it before torch's first CUDA use; ``import torch`` may have happened already.

    What they ask for goes on as our own variables, which child processes inherit.
    """
    settled, told = carried_over(environment)
    for name in ALLOCATOR:
        if name in environment and name not in settled:
            del environment[name]
    environment.update({name: value for name, value in settled.items() if environment.get(name) != value})
    for text in told:
        logger.warning("gh200: %s", text)
