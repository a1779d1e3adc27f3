"""Words from outside, made fit to be shown: no token, key or webhook address in them, and nothing that steers.

File names, dataset ids and values of a configuration may hold escape sequences (which can rename a window, hide lines
or paste a command), bytes that are no text, and marks that turn the direction of writing around.

What secrets look like and what they are called are tables, so that one more is one more line. A shape is as narrow as
its issuer lets it be: a prefix that means nothing else, and at least so many characters behind it. Text comes from
anywhere and in any length, so what a shape may run over before it knows whether it fits is bounded: else every
beginning of a shape in a long word costs a walk to the end of that word.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

HIDDEN = "<hidden>"

# -- names of settings, flags and variables ----------------------------------------------------------------

SECRET_NAME = re.compile(
    r"token|secret|passw(or)?d|passphrase|passcode|credential|cookie|webhook|bearer|netrc|"
    r"(^|_)(pass|pwd|pw|pat|otp|jwt|sas|salt|dsn|creds?|hook|hook_?url)$|connection_?string|conn_?str|"
    r"auth(?!or(s|ed|ing|_|$))|(^|_)signature$|"
    r"(api|access|private|secret|ssh|signing|encryption|deploy|account|storage|license|session|master)_?key|_key$|^key$",
    re.IGNORECASE,
)
NOT_SECRET_NAME = re.compile(
    r"tokeniz|max_token|num_\w*token|tokens?_?(count|length|limit|drop|mask|id|ids|idx|tags?|shapes?|path)$|"
    r"(bos|eos|pad|unk|mask|sep|cls|special|next)_tokens?$|(vision|audio|sound|embed|semantic|trigger)_tokens?$|"
    r"keyword|caption_|(cache|time)_?signature|^to_key$|^mask_key$|public_?key|(cache|sort|primary|group)_key|"
    r"_interval$|unconditional_pass$",
    re.IGNORECASE,
)
WORKING_FOLDERS = ("PWD", "OLDPWD")
"""In capitals that is where a shell is; ``pwd`` in a configuration is a password."""
SECRET_NUMBER = re.compile(r"passw(or)?d|passphrase|passcode|secret|(^|_)(pin|pass|pwd|otp)$", re.IGNORECASE)
HEADER_NAME = re.compile(r"(proxy_)?authorization|(set_)?cookie", re.IGNORECASE)
"""Of a protocol's header: all of its line is the value, blanks included."""
CHECKSUM_NAME = re.compile(
    r"(^at$|revision|commit|(^|_)sha_?\d*|hash|checksum|digest|(^|[^a-z])(ref|rev|git|tree|tag|version|etag))\w*$",
    re.IGNORECASE,
)
"""Forty hexadecimal digits behind such a name are a commit; elsewhere they are a key of Weights & Biases."""

# -- values ------------------------------------------------------------------------------------------------

_BEFORE_LETTERS = (
    r"hf_ api_org_ KGAT_ r8_ gsk_ fw_ rpa_ jina_ xai- pplx- csk- gh[opusr]_ ATBB npm_ rubygems_ bkua_ LTAI AKID "
    r"do[opr]_v1_ sbp_ [srp]k_(?:live|test)_ shp(?:at|ca|pa|ss)_ NRAK- lin_api_ AGE-SECRET-KEY-1"
)
"""Prefixes of tokens that go on in letters and digits."""
_BEFORE_SIGNS = (
    r"wandb_v1_ nvapi- tgp_v1_ github_pat_ gl(?:pat|dt|rt|cbt|ptt|ft|imt|agent|oas|soat|ffct)- ATATT3x pypi-Ag "
    r"dckr_(?:pat|oat)_ CCI[A-Z]{3}_ AIza ya29\. 1//0 GOCSPX- hv[sbr]\. tskey-[a-z]+- dp\.(?:pt|st|ct|sa|scim|audit)\. "
    r"pscale_(?:tkn|pw|oauth)_ FlyV1\sfm\d_ xox[a-z](?:\.xox[a-z])?- xapp- whsec_ sq0(?:atp|csp)- gl(?:c|sa)_ "
    r"sntry[su]_ figd_ PMAK-"
)
"""Prefixes of tokens in which dots, dashes and the like may stand too."""
_ISSUED = (
    rf"(?:{'|'.join(_BEFORE_LETTERS.split())})[A-Za-z0-9]{{16,}}[\w-]*",
    rf"(?:{'|'.join(_BEFORE_SIGNS.split())})[\w.+/=,-]{{16,}}(?<![.,])",
    r"sk-(?:[a-z0-9]{1,12}-){0,3}[A-Za-z0-9]{20,}[A-Za-z0-9_-]*",
    r"sk-(?=[\w-]{0,200}\d)(?=[\w-]{0,200}[A-Z])[\w-]{16,}",
    r"(?:AKIA|ASIA|ABIA|ACCA)[0-9A-Z]{12,}",
    r"[A-Za-z0-9]{14}\.atlasv1\.[A-Za-z0-9_-]{30,}",
    r"SG\.[A-Za-z0-9_-]{16,}\.[A-Za-z0-9_-]{16,}",
    r"key-[0-9a-f]{32}",
    r"(?:bot)?[0-9]{8,10}:[A-Za-z0-9_-]{30,}",
    r"[MNO][A-Za-z0-9_-]{23,25}\.[A-Za-z0-9_-]{6}\.[A-Za-z0-9_-]{27,}",
    r"(?:secret|ntn)_[A-Za-z0-9]{40,}",
    # tokens that say of themselves what they are
    r"eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}(?:\.[A-Za-z0-9_-]*)*",
    r"eyJ[A-Za-z0-9_+/-]{40,}=*",
)
SHAPES: tuple[tuple[re.Pattern[str], int], ...] = (
    (
        re.compile(
            r"-----BEGIN [A-Z ]*PRIVATE KEY(?: BLOCK)?-----[\s\S]*?(?:-----END [A-Z ]*PRIVATE KEY[A-Z ]*-----|$)"
        ),
        0,
    ),
    (re.compile(r"PuTTY-User-Key-File-\d[\s\S]*"), 0),
    # addresses that are secrets themselves
    (re.compile(r"https?://[^\s\"']{0,500}(?:hooks\.|webhook|/hooks?/|/with/key/)[^\s\"']*[^\s\"',;)\]}]", re.I), 0),
    # name and password in an address; the password may hold @ and /, but a port is none. A longer one, as tokens of
    # package registries are, ends where another address begins.
    (
        re.compile(
            r"(?<=://)[^\s\"'<>/@:]*:(?!\d{1,5}(?:[/?#,;)\s]|$))"
            r"(?:[^\s\"'<>]{1,500}|(?:[^\s\"'<>:]|:(?!//))+)(?=@[\w.\[-])"
        ),
        0,
    ),
    (re.compile(r"\bhttps?://([^\s\"'<>/@:]{12,}|(?=[^@/]*\d)[^\s\"'<>/@:]{6,})(?=@[\w.\[-])", re.I), 1),
    (re.compile(rf"(?<![A-Za-z0-9])(?:{'|'.join(_ISSUED)})"), 0),
    (re.compile(r"\b(?:Bearer|Token|ApiKey) ((?=[^\s]*\d)[A-Za-z0-9._~+/-]{8,}=*)", re.I), 1),
    (re.compile(r"\bBearer ([A-Za-z0-9._~+/-]{8,}=*)"), 1),
    (re.compile(r"\bBasic ([A-Za-z0-9+/]{8,}=*)"), 1),
    (re.compile(r"(?<=[?&])(?:sig|signature|token|key|X-Amz-[A-Za-z-]+)=([^&\s\"']+)", re.I), 1),
    (re.compile(r"\b(?:AccountKey|SharedAccessKey|SharedAccessSignature)=([^;\s\"']+)"), 1),
    (re.compile(r"\bmachine\s+\S+\s+login\s+\S+\s+password\s+(\S+)"), 1),
    (re.compile(r"(?<!\S)(?:-u|--user)[ =][\"']?[^\s\"':]+:([^\s\"']+)"), 1),
)
"""(shape, group): that group of what is found is hidden, all of it for 0."""

HEX_KEY = re.compile(r"(?<![0-9A-Za-z])[0-9a-f]{40}(?![0-9A-Za-z])")
BEFORE_CHECKSUM = re.compile(r"(?:(?P<name>[\w-]+)\\?[\"']?\s*[=: ]\s*\\?[\"']?|[/@#])(?:git-|sha1[:-])?$")
"""What stands right before a commit: a name that says so, or a path, or ``repository@``."""

# name=value, name: value, "name": "value", 'name': 'value' and, for flags, --name value; quotes may be escaped.
# A name is looked for where a word begins and taken whole (++): a long word without any is passed over once.
_NAME = re.compile(r"(?<![\w-])(?:(?P<flag>--[\w-]++)\s+|(?P<name>[\w-]++)\\?[\"']?\s*[=:]\s*)")
_QUOTED = r"\\?\"(?:[^\"\\]|\\.)*\"|\\?'(?:[^'\\]|\\.)*'|"
_VALUE = re.compile(_QUOTED + r"[^\s,;}\])]+")
_VARIABLE_VALUE = re.compile(_QUOTED + r"\S+")
_HEADER_VALUE = re.compile(r"[^\n\"']+")


def names_secret(name: str) -> bool:
    """Does a setting, flag or variable of this name hold a secret?"""
    plain = name.strip("-").replace("-", "_")
    return plain not in WORKING_FOLDERS and bool(SECRET_NAME.search(plain)) and not NOT_SECRET_NAME.search(plain)


def redact_text(text: str, *, name: str = "") -> str:
    """Hide secrets in free text: known shapes, and values assigned to names that sound secret.

    ``name`` is that of the setting whose value this is.
    """
    for shape, group in SHAPES:
        text = shape.sub(_hiding(group), text)
    if not CHECKSUM_NAME.search(name):
        text = HEX_KEY.sub(_hide_unless_checksum, text)
    return _hide_assigned(text)


def _hiding(group: int) -> Callable[[re.Match[str]], str]:
    def hide(found: re.Match[str]) -> str:
        start, end = found.start(group) - found.start(), found.end(group) - found.start()
        return found[0][:start] + HIDDEN + found[0][end:]

    return hide


def _hide_unless_checksum(found: re.Match[str]) -> str:
    before = BEFORE_CHECKSUM.search(found.string[max(0, found.start() - 64) : found.start()])
    is_checksum = before is not None and (before["name"] is None or CHECKSUM_NAME.search(before["name"]))
    return found[0] if is_checksum else HIDDEN


def _hide_assigned(text: str) -> str:
    """Hide what follows a secret name. What follows another name is looked at again: it may be a name itself."""
    shown, position = [], 0
    while (name := _NAME.search(text, position)) is not None:
        value = _value_of(name["flag"] or name["name"], name[0], text, name.end())
        shown.append(text[position : name.end()])
        position = name.end()
        if value is not None:
            shown.append(HIDDEN)
            position = value.end()
    return "".join([*shown, text[position:]])


def _value_of(name: str, written: str, text: str, position: int) -> re.Match[str] | None:
    """The secret value at ``position``; None where the name isn't a secret's."""
    if not names_secret(name):
        return None
    if HEADER_NAME.fullmatch(name.replace("-", "_")) and ":" in written:
        return _HEADER_VALUE.match(text, position) or _VALUE.match(text, position)
    # In FOO=bar,baz the value of a variable goes on to the next blank; in prose a comma ends it.
    return (_VARIABLE_VALUE if name.isupper() and written.endswith("=") else _VALUE).match(text, position)


def redact(value: Any, *, name: str = "") -> Any:
    """A JSON-like value with its secrets hidden; containers are rebuilt, the original is left alone."""
    if name and names_secret(name) and _worth_hiding(name, value):
        return HIDDEN
    if isinstance(value, Mapping):
        if _is_tally(value):
            return dict(value)
        return {
            redact_text(key) if isinstance(key, str) else key: redact(item, name=str(key))
            for key, item in value.items()
        }
    if isinstance(value, str):
        return redact_text(value, name=name)
    if isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray)):
        return [redact(item) for item in value]
    return value


def _is_tally(value: Mapping[Any, Any]) -> bool:
    """How checks ended: ``{"pass": 17, "fail": 0}``. With no ``fail`` beside it a number may be a password."""
    return {"pass", "fail"} <= value.keys() and all(isinstance(count, int) for count in value.values())


def _worth_hiding(name: str, value: Any) -> bool:
    """Switches and counts are no secrets, whatever they are called; a number can be a password."""
    if value is None or value == "" or isinstance(value, bool):
        return False
    return not isinstance(value, int | float) or bool(SECRET_NUMBER.search(name))


def redact_command(words: Sequence[str]) -> list[str]:
    """A command line with the values of secret flags hidden, however they are written."""
    shown: list[str] = []
    hide_next = False
    for word in words:
        if hide_next and not word.startswith("--"):
            shown.append(HIDDEN)
            hide_next = False
            continue
        name, separator, value = word.partition("=")
        secret = bool(separator or word.startswith("--")) and names_secret(name)
        hide_next = secret and not separator
        if separator:
            shown.append(f"{name}={HIDDEN if secret else _redact_value(value, name)}")
        else:
            shown.append(word if secret else redact_text(word))
    return shown


def _redact_value(text: str, name: str) -> str:
    """A flag's value may itself be a block of JSON with a secret inside."""
    if text[:1] in "{[":
        try:
            return json.dumps(redact(json.loads(text)))
        except ValueError:
            pass
    return redact_text(text, name=name)


# -- for a terminal, a log and a page -----------------------------------------------------------------------


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
