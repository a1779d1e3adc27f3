"""Pictures and pages: line plots and bars as SVG, HTML without a script. Knows nothing of what it draws."""

from pathlib import Path

from simpletuner_gh200.errors import UsageError


def save(content: str | bytes, path: Path) -> None:
    """Into the file that was named with ``-o``."""
    try:
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    except OSError as refused:
        raise UsageError(f"cannot write {path}: {refused.strerror}", remedy="name another file with -o") from None
