"""What secrets look like and what they are called: tables, so that one more is one more line.

A shape is as narrow as its issuer lets it be: a prefix that means nothing else, and at least so many characters behind
it. What could also be an ordinary word, a path or a checksum is not here, or has something beside it that tells.

Text comes from anywhere and in any length. So what a shape may run over before it knows whether it fits is bounded:
without that, every beginning of a shape in a long word costs a walk to the end of that word.
"""

from __future__ import annotations

import re

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

_ISSUED = (
    # hubs and trackers of models
    r"(?:hf|api_org)_[A-Za-z0-9]{20,}",
    r"wandb_v1_[A-Za-z0-9_]{16,}",
    r"KGAT_[A-Za-z0-9]{16,}",
    # models behind an API
    r"sk-(?:[a-z0-9]{1,12}-){0,3}[A-Za-z0-9]{20,}[A-Za-z0-9_-]*",
    r"sk-(?=[\w-]{0,200}\d)(?=[\w-]{0,200}[A-Z])[\w-]{16,}",
    r"nvapi-[A-Za-z0-9_-]{20,}",
    r"r8_[A-Za-z0-9]{20,}",
    r"(?:gsk|tgp_v1|fw|rpa|jina)_[A-Za-z0-9_-]{24,}",
    r"(?:xai|pplx|csk)-[A-Za-z0-9]{24,}",
    # source code and packages
    r"gh[opusr]_[A-Za-z0-9]{16,}",
    r"github_pat_[A-Za-z0-9_]{16,}",
    r"gl(?:pat|dt|rt|cbt|ptt|ft|imt|agent|oas|soat|ffct)-[A-Za-z0-9_.-]{16,}",
    r"ATATT3x[A-Za-z0-9_=-]{20,}|ATBB[A-Za-z0-9]{24,}",
    r"npm_[A-Za-z0-9]{30,}",
    r"pypi-[A-Za-z0-9_-]{30,}",
    r"rubygems_[0-9a-f]{32,}",
    r"dckr_(?:pat|oat)_[A-Za-z0-9_-]{16,}",
    r"CCI[A-Z]{3}_[A-Za-z0-9_]{20,}|bkua_[0-9a-f]{32,}",
    # clouds
    r"(?:AKIA|ASIA|ABIA|ACCA)[0-9A-Z]{12,}",
    r"AIza[0-9A-Za-z_-]{30,}",
    r"ya29\.[0-9A-Za-z_.-]{16,}|1//0[0-9A-Za-z_-]{40,}",
    r"GOCSPX-[0-9A-Za-z_-]{20,}",
    r"LTAI[A-Za-z0-9]{16,}|AKID[A-Za-z0-9]{16,}",
    r"do[opr]_v1_[0-9a-f]{32,}",
    r"hv[sbr]\.[A-Za-z0-9_-]{20,}",
    r"[A-Za-z0-9]{14}\.atlasv1\.[A-Za-z0-9_-]{30,}",
    r"tskey-[a-z]+-[A-Za-z0-9-]{10,}",
    r"dp\.(?:pt|st|ct|sa|scim|audit)\.[A-Za-z0-9.]{20,}",
    r"pscale_(?:tkn|pw|oauth)_[A-Za-z0-9_.-]{16,}|sbp_[0-9a-f]{32,}",
    r"FlyV1 fm\d_[A-Za-z0-9+/=,_-]{16,}",
    # messages, mail, money, watching
    r"xox[a-z](?:\.xox[a-z])?-[A-Za-z0-9-]{10,}",
    r"xapp-[A-Za-z0-9-]{16,}",
    r"SG\.[A-Za-z0-9_-]{16,}\.[A-Za-z0-9_-]{16,}",
    r"key-[0-9a-f]{32}",
    r"(?:[sr]k|pk)_(?:live|test)_[A-Za-z0-9]{16,}|whsec_[A-Za-z0-9+/=]{16,}",
    r"shp(?:at|ca|pa|ss)_[0-9a-fA-F]{32}|sq0(?:atp|csp)-[A-Za-z0-9_-]{20,}",
    r"(?:bot)?[0-9]{8,10}:[A-Za-z0-9_-]{30,}",
    r"[MNO][A-Za-z0-9_-]{23,25}\.[A-Za-z0-9_-]{6}\.[A-Za-z0-9_-]{27,}",
    r"gl(?:c|sa)_[A-Za-z0-9_+/=]{20,}",
    r"NRAK-[A-Z0-9]{20,}|sntry[su]_[A-Za-z0-9_+/=]{20,}",
    r"lin_api_[A-Za-z0-9]{20,}|(?:secret|ntn)_[A-Za-z0-9]{40,}|figd_[A-Za-z0-9_-]{20,}|PMAK-[A-Za-z0-9-]{20,}",
    r"AGE-SECRET-KEY-1[0-9A-Z]{20,}",
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
    (
        re.compile(
            r"https?://[^\s\"']{0,500}(?:hooks\.|webhook|/hooks?/|/with/key/)[^\s\"']*[^\s\"',;)\]}]", re.IGNORECASE
        ),
        0,
    ),
    # name and password in an address; the password may hold @ and /, but a port is none. A longer one, as tokens of
    # package registries are, ends where another address begins.
    (
        re.compile(
            r"(?<=://)[^\s\"'<>/@:]*:(?!\d{1,5}(?:[/?#,;)\s]|$))"
            r"(?:[^\s\"'<>]{1,500}|(?:[^\s\"'<>:]|:(?!//))+)(?=@[\w.\[-])"
        ),
        0,
    ),
    (re.compile(r"\bhttps?://([^\s\"'<>/@:]{12,}|(?=[^@/]*\d)[^\s\"'<>/@:]{6,})(?=@[\w.\[-])", re.IGNORECASE), 1),
    (re.compile(rf"(?<![A-Za-z0-9])(?:{'|'.join(_ISSUED)})"), 0),
    (re.compile(r"\b(?:Bearer|Token|ApiKey) ((?=[^\s]*\d)[A-Za-z0-9._~+/-]{8,}=*)", re.IGNORECASE), 1),
    (re.compile(r"\bBearer ([A-Za-z0-9._~+/-]{8,}=*)"), 1),
    (re.compile(r"\bBasic ([A-Za-z0-9+/]{8,}=*)"), 1),
    (re.compile(r"(?<=[?&])(?:sig|signature|token|key|X-Amz-[A-Za-z-]+)=([^&\s\"']+)", re.IGNORECASE), 1),
    (re.compile(r"\b(?:AccountKey|SharedAccessKey|SharedAccessSignature)=([^;\s\"']+)"), 1),
    (re.compile(r"\bmachine\s+\S+\s+login\s+\S+\s+password\s+(\S+)"), 1),
    (re.compile(r"(?<!\S)(?:-u|--user)[ =][\"']?[^\s\"':]+:([^\s\"']+)"), 1),
)
"""(shape, group): that group of what is found is hidden, all of it for 0."""

HEX_KEY = re.compile(r"(?<![0-9A-Za-z])[0-9a-f]{40}(?![0-9A-Za-z])")
BEFORE_CHECKSUM = re.compile(r"(?:(?P<name>[\w-]+)\\?[\"']?\s*[=: ]\s*\\?[\"']?|[/@#])(?:git-|sha1[:-])?$")
"""What stands right before a commit: a name that says so, or a path, or ``repository@``."""
