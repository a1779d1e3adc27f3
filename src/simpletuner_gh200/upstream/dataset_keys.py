"""Words that SimpleTuner's code for datasets spells, from its source alone: a key that is none of them is not read."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

FOLDERS = (
    *("data_backend", "metadata", "multiaspect", "caching"),
    *("image_manipulation", "distillation", "data_transforms", "data_generation"),
)
"""Below SimpleTuner's ``helpers``: whoever looks into a dataset's entry; a release may lack some."""

_KEY = re.compile(r"[a-z][a-z0-9_]*")


def dataset_words(package: Path) -> frozenset[str]:
    """Every word there that could be a key: texts, and fields of data classes. Some are none."""
    sources = (path for folder in FOLDERS for path in sorted((package / "helpers" / folder).rglob("*.py")))
    return frozenset(word for path in sources for word in _words(path.read_text(encoding="utf-8")))


def _words(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and _KEY.fullmatch(node.value):
            yield node.value
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id
