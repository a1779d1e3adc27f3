"""A release's training options as data, and what that release would make of keys, flags and variables.

The table is made from SimpleTuner's own parser (``seams/options.py``, in a process of its own); here nothing is
imported. A *problem* is what would stop SimpleTuner, half a minute into its start; a *note* is what it would drop
without a word.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import TypeAdapter

from simpletuner_gh200.config.blocks import PARTS
from simpletuner_gh200.config.files import flag_words
from simpletuner_gh200.config.part import TRAINING_BLOCKS
from simpletuner_gh200.errors import Problem

Kind = Literal["text", "int", "float", "switch", "any"]
"""What a value has to be; ``any``: SimpleTuner has a function of its own that decides."""

REMOVED = {
    "allow_tf32": "TF32 is on by itself; disable_tf32 turns it off",
    "crop": "it belongs into the dataset's entry",
    # Never one: the earlier guides print it.
    "enable_manual_validation": "not needed: the Web UI's button, or Trainer.register_manual_validation_trigger()",
    "enable_xformers_memory_efficient_attention": "attention_mechanism chooses now",
    **dict.fromkeys(("enable_group_offload", "group_offload_", "validation_torch_compile"), "until 4.x"),
}
"""How options begin that a release had, or people think so, and a later one has no longer, and what became of them; for
a better message only."""

_NEAR = 0.7
_VARIABLE_NEAR = 0.85
"""Variables are many and mostly not SimpleTuner's: only one that is hardly anything else is spoken of."""

_SHOWN_CHOICES = 12
_SHOWN_VALUE = 60
_PLACEHOLDER = re.compile(r"\{env:|\$")
"""Only the run will know what stands there."""


@dataclass(frozen=True)
class Option:
    """One option of SimpleTuner's parser."""

    name: str
    kind: Kind = "text"
    choices: tuple[str, ...] = ()
    folded: bool = False
    """Letter case does not matter: SimpleTuner lowers it before it compares."""
    required: bool = False
    bare: bool = False
    """May stand without a value."""
    later: bool = False
    """The parser takes any text; what looks at it next takes only these."""
    default: Any = None
    """Where nobody sets it; None: nothing."""


Media = Literal["image", "video", "audio"]


@dataclass(frozen=True)
class ModelFamily:
    """What SimpleTuner says of one of its model families."""

    flavours: Mapping[str, str]
    """Flavour -> weights on the hub."""
    default: str | None = None
    """The flavour it takes where none is named."""
    pipelines: tuple[str, ...] = ()
    blocks: tuple[str, ...] = ()
    """Classes that are not to be split, as its model tells."""
    media: Media = "image"

    def repository(self, flavour: str | None) -> str | None:
        """The weights that a configuration means which names this flavour, or none."""
        return self.flavours.get(flavour or self.default or "")


@dataclass(frozen=True)
class OptionTable:
    """Every option of one installed SimpleTuner."""

    version: str
    options: Mapping[str, Option]
    """By every spelling, aliases included; without dashes."""
    older_flags: frozenset[str] = frozenset()
    """Flags, and keys, that it turns into one of the options before it parses them."""
    other_keys: frozenset[str] = frozenset()
    """Keys of a file that it translates, or passes over: older spellings, and notes of its Web UI."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Variable of a ``config.env`` -> the option it sets, in one case with the value: ``option=value``."""
    switch_words: frozenset[str] = frozenset({"true", "false"})
    families: Mapping[str, ModelFamily] = field(default_factory=dict)
    dataset_words: frozenset[str] = frozenset()
    """Words that its code for datasets spells, every key of an entry among them."""

    def known(self, besides: Iterable[str] = ()) -> frozenset[str]:
        """Every key that it takes in one way or another."""
        return frozenset({*self.options, *self.older_flags, *self.other_keys, *besides})

    @property
    def defaults(self) -> dict[str, Any]:
        """Option -> its value where nobody sets it; options without one are left out."""
        return {option.name: option.default for option in self.options.values() if option.default is not None}


TABLES = TypeAdapter(OptionTable)
"""To JSON and back."""


@dataclass(frozen=True)
class Checker:
    """Judges what was written against a table. ``ours`` are names that we take off before SimpleTuner looks."""

    table: OptionTable
    ours: frozenset[str] = frozenset()
    own_flags: tuple[str, ...] = ()
    """Flags of the command itself, as they are typed: suggested like the others."""

    def keys(self, values: Mapping[str, Any]) -> tuple[list[Problem], list[str]]:
        """(problems, notes) about the keys of a JSON or TOML file."""
        problems: list[Problem] = []
        notes: list[str] = []
        for written, value in values.items():
            key = written.strip().lstrip("-")
            if key in self.ours or key in self.table.older_flags or key in self.table.other_keys:
                continue
            option = self.table.options.get(key)
            texts = _as_passed_on(value)
            if option is not None:
                problems += [] if texts is None else self._values(key, option, texts)
            elif texts:
                problems.append(self._unknown(key, f"{key} = {_quoted(value)}"))
            elif value is not None and value != "":
                notes.append(str(self._unknown(key, key, what=f"SimpleTuner {self.table.version} ignores it")))
        return problems, notes

    def flags(self, words: Sequence[str]) -> list[Problem]:
        """Problems of a command line's flags."""
        problems = []
        for flag, value in flag_words(words):
            name = flag.removeprefix("--")
            plain = name.replace("-", "_")
            if plain in self.ours or name in self.table.older_flags:
                continue
            option = self.table.options.get(name)
            if option is None:
                shown = flag if value is None else f"{flag} {_quoted(value)}"
                problems.append(self._unknown(name, shown, flag=True))
            else:
                problems += self._values(flag, option, [value])
        return problems

    def variables(self, variables: Mapping[str, str]) -> list[Problem]:
        """Problems of the variables of a ``config.env``; one that is hardly anything but a slip is one."""
        problems: list[Problem] = []
        for variable, text in variables.items():
            name, _, fixed = self.table.variables.get(variable, "").partition("=")
            texts = _as_passed_on(text) or []
            if name in self.table.options:
                problems += [] if fixed else self._values(variable, self.table.options[name], texts)
            elif name and texts:
                what = f"stands for --{name}, which is unknown to SimpleTuner {self.table.version}"
                problems.append(Problem(variable, what, "leave it out"))
            elif not name:
                near = difflib.get_close_matches(variable, self.table.variables, n=1, cutoff=_VARIABLE_NEAR)
                message = f"SimpleTuner {self.table.version} reads no such variable"
                problems += [Problem(variable, message, f"did you mean {near[0]!r}?")] if near else []
        return problems

    def dataset(self, where: str, entry: Iterable[str], ours: Iterable[str] = ()) -> list[str]:
        """Notes about keys of a dataset's entry that SimpleTuner passes over, and that are hardly anything else."""
        known = self.table.dataset_words
        unread = (key for key in entry if key not in known and key not in ours) if known else ()
        near = ((key, difflib.get_close_matches(key, known, n=1, cutoff=_VARIABLE_NEAR)) for key in unread)
        message = "SimpleTuner reads no such key"
        return [f"{where}.{key}: {message} (did you mean {close[0]!r}?)" for key, close in near if close]

    def missing(self, given: Iterable[str]) -> list[Problem]:
        """Options that SimpleTuner can't do without and that are not among those ``given``."""
        there = {self.table.options[name].name for name in given if name in self.table.options}
        wanted = {option.name for option in self.table.options.values() if option.required} - there
        what = f"not set; SimpleTuner {self.table.version} needs it"
        return [Problem(name, what, self._accepted(self.table.options[name])) for name in sorted(wanted)]

    # -- one option ------------------------------------------------------------------------------------

    def _values(self, where: str, option: Option, texts: Sequence[str | None]) -> list[Problem]:
        found = (self._refusal(option, text) for text in texts if text is None or not _PLACEHOLDER.search(text))
        return [Problem(where, *refusal) for refusal in found if refusal is not None]

    def _refusal(self, option: Option, text: str | None) -> tuple[str, str | None] | None:
        """(what is wrong, remedy), by the rules of ``argparse``: the text is converted, then compared."""
        if text is None:
            return None if option.bare else ("needs a value", self._accepted(option))
        value: object = text
        if option.kind in ("int", "float"):
            try:
                value = int(text) if option.kind == "int" else float(text)
            except ValueError:
                return f"{_quoted(text)} is not a {'whole ' if option.kind == 'int' else ''}number", None
        if option.kind == "switch" and text.strip().lower() not in self.table.switch_words:
            return f"{_quoted(text)} is neither true nor false", None
        shown = str(value).strip().lower() if option.folded else str(value)
        if option.choices and shown not in option.choices:
            return f"{_quoted(text)} is not among its values", self._accepted(option, near=shown)
        return None

    def _accepted(self, option: Option, near: str = "") -> str | None:
        if not option.choices:
            return None
        close = difflib.get_close_matches(near, option.choices, n=1, cutoff=_NEAR)
        if close and len(option.choices) > _SHOWN_CHOICES:
            return f"did you mean {close[0]!r}? it is one of {len(option.choices)}"
        return f"accepted: {', '.join(map(repr, option.choices))}"

    def _unknown(self, name: str, where: str, *, flag: bool = False, what: str | None = None) -> Problem:
        what = what or self._why_unknown(name)
        removed = next((became for start, became in REMOVED.items() if name.startswith(start)), None)
        if removed is not None:
            return Problem(where, f"{what} ({removed})", "leave it out")
        spelt = name.replace("-", "_")
        for part in PARTS:
            if part.block in TRAINING_BLOCKS and spelt in part.names():
                return Problem(where, what, f"it is a key of ours: write it inside {part.block}")
        own = {text.removeprefix("--"): text for text in self.own_flags} if flag else {}
        known = [*own, *self.table.options, *self.ours, *self.table.older_flags]
        close = [spelt] if spelt in known else difflib.get_close_matches(name, known, n=1, cutoff=_NEAR)
        if not close:
            return Problem(where, what, "leave it out")
        return Problem(where, what, f"did you mean '{own.get(close[0]) or ('--' if flag else '') + close[0]}'?")

    def _why_unknown(self, name: str) -> str:
        """SimpleTuner's parser guesses a name that is cut short; nobody else who reads the configuration does."""
        meant = {option.name for spelling, option in self.table.options.items() if spelling.startswith(name)}
        if len(meant) == 1:
            return "not written out, so that only SimpleTuner's parser would guess what is meant"
        return f"unknown to SimpleTuner {self.table.version}"


def _as_passed_on(value: object) -> list[str | None] | None:
    """The texts that a value of a file becomes on its way to SimpleTuner's parser.

    None among them is a flag without a value. No text: it is passed over. None instead of a list: a block, which
    is passed on as a whole or not at all.
    """
    if isinstance(value, Mapping):
        return None
    if isinstance(value, bool):
        return [None] if value else ["false"]
    if isinstance(value, str):
        text = value.strip()
        if text.lower() == "true":
            return [None]
        return [] if text.lower() in {"", "false"} else [text]
    if isinstance(value, Iterable):
        return [str(item).strip() for item in value if str(item).strip()]
    return [] if value is None else [str(value)]


def _quoted(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_VALUE else text[: _SHOWN_VALUE - 4] + "...'"
