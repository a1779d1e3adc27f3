"""Verdicts remembered by content: the same contract against the same texts has the same answer.

The key is a digest of what was read, so there is nothing to invalidate; an entry that can't be read is made again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from simpletuner_gh200 import upstream
from simpletuner_gh200.upstream import user_cache
from simpletuner_gh200.upstream.source import JoinedSource, installed_version
from simpletuner_gh200.upstream.spec import SeamSpec
from simpletuner_gh200.upstream.verdict import Verdict

SCHEMA = "1"
KIND = "verdicts"


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
    found = user_cache.load(KIND, entry)
    try:
        return Verdict.from_json(found) if found is not None else None
    except (ValueError, KeyError, TypeError):
        return None


def store(entry: str, verdict: Verdict) -> None:
    user_cache.store(KIND, entry, verdict.to_json())


@lru_cache(maxsize=1)
def _contract_digest() -> str:
    """Our own side of the comparison: the text of this room's modules."""
    digest = hashlib.blake2b(digest_size=20)
    for folder in sorted(upstream.__path__):
        for path in sorted(Path(folder).glob("*.py")) + sorted(Path(folder, "contract").glob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()
