"""Words from outside, made fit for a terminal, a log and a page: nothing in a name can steer what shows it.

File names, dataset ids and values of a configuration may hold escape sequences (which can rename a window, hide lines
or paste a command), bytes that are no text, and marks that turn the direction of writing around.
"""

from __future__ import annotations

import logging
import os


def printable(text: str | bytes | os.PathLike[str], *, lines: bool = False) -> str:
    """``text`` with everything that doesn't print escaped; with ``lines``, line ends and tabs stay."""
    words = os.fsdecode(text)
    if words.isprintable():
        return words
    kept = "\n\t" if lines else ""
    return "".join(char if char.isprintable() or char in kept else _escaped(char) for char in words)


def _escaped(char: str) -> str:
    return char.encode("unicode_escape", "surrogatepass").decode()


class _PrintableRecords(logging.Filter):
    """On a logger: what its records say is printable, whoever shows them."""

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        shown = printable(message, lines=True)
        if shown != message:
            record.msg, record.args = shown, None
        return True


_records = _PrintableRecords()


def keep_log_printable() -> None:
    """From here on, for everything that our own logger says; calling it again changes nothing."""
    logging.getLogger("simpletuner_gh200").addFilter(_records)
