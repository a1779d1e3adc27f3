"""Verdicts remembered by content: the same contract against the same texts has the same answer.

The key is a digest of what was read, so there is nothing to invalidate; an entry that can't be read is made again.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path

from simpletuner_gh200 import upstream
from simpletuner_gh200.upstream.source import JoinedSource, installed_version
from simpletuner_gh200.upstream.spec import SeamSpec
from simpletuner_gh200.upstream.verdict import Verdict

SCHEMA = "1"


def cache_root() -> Path:
    """Our folder in the user's cache, private to the user; made when first asked for."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    root = Path(base) / "simpletuner-gh200"
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    return root


def key(source: JoinedSource, specs: Mapping[str, SeamSpec], version: str | None) -> str:
    digest = hashlib.blake2b(digest_size=20)
    for part in (SCHEMA, _contract_digest(), version or "", installed_version("accelerate") or ""):
        digest.update(part.encode() + b"\0")
    for module in dict.fromkeys(spec.module for spec in specs.values()):
        text = source.read(module)
        digest.update(f"{module} {-1 if text is None else len(text)}\0".encode())
        digest.update(text or b"")
    return digest.hexdigest()


def load(entry: str) -> Verdict | None:
    try:
        return Verdict.from_json(json.loads(_path(entry).read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def store(entry: str, verdict: Verdict) -> None:
    keep_json(lambda: _path(entry), verdict.to_json())


def keep_json(where: Callable[[], Path], content: object) -> None:
    """Written whole or not at all; a cache that can't be written (a read-only home, say) only costs time."""
    try:
        target = where()
        target.parent.mkdir(mode=0o700, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=target.parent)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(content, file)
        os.replace(name, target)
    except OSError:
        return


def _path(entry: str) -> Path:
    return cache_root() / "verdicts" / f"{entry}.json"


@lru_cache(maxsize=1)
def _contract_digest() -> str:
    """Our own side of the comparison: the text of this room's modules."""
    digest = hashlib.blake2b(digest_size=20)
    for folder in sorted(upstream.__path__):
        for path in sorted(Path(folder).glob("*.py")) + sorted(Path(folder, "contract").glob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()
