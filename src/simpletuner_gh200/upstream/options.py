"""Which training options an installed SimpleTuner has, read from its source. Nothing of it is imported."""

from __future__ import annotations

import re
from pathlib import Path

REMOVED = {
    "enable_group_offload": "until 4.x",
    "group_offload_blocks_per_group": "until 4.x",
    "group_offload_text_encoder": "until 4.x",
    "group_offload_to_disk_path": "until 4.x",
    "group_offload_type": "until 4.x",
    "group_offload_use_stream": "until 4.x",
    "group_offload_vae": "until 4.x",
    "validation_torch_compile": "until 4.x",
    "validation_torch_compile_mode": "until 4.x",
}
"""Options of 3.1.6 that 4.10.1 has no longer, found by comparing the two; for a better message only."""

_PLACES = (
    "simpletuner_sdk/server/services/field_registry",
    "helpers/models/field_registry",
    "helpers/configuration",
    "helpers/models/*/model.py",
)
_NAME = re.compile(r"""["'](?:--)?([a-z][a-z0-9_]{2,})["'=]""")


def option_names(package: Path) -> frozenset[str]:
    """Every word that the option registry or the configuration code of the SimpleTuner in ``package`` spells."""
    names: set[str] = set()
    for place in _PLACES:
        for found in package.glob(place):
            files = [found] if found.is_file() else found.rglob("*.py")
            for file in files:
                names.update(_NAME.findall(file.read_text(encoding="utf-8", errors="replace")))
    return frozenset(names)
