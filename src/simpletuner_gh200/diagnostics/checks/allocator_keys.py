"""GH102: does torch accept what PYTORCH_CUDA_ALLOC_CONF tells it?"""

from __future__ import annotations

from simpletuner_gh200.config.allocator import OUR_KEYS, VARIABLES, rejected_keys
from simpletuner_gh200.diagnostics.check import Check, Finding, failed, passed
from simpletuner_gh200.diagnostics.context import Context


def _run(context: Context) -> Finding:
    given = {name: context.environment[name] for name in VARIABLES if context.environment.get(name)}
    if not given:
        return passed("not set")
    rejected = {name: keys for name, text in given.items() if (keys := rejected_keys(text, context.torch))}
    if not rejected:
        return passed("; ".join(f"{name}={text}" for name, text in given.items()))
    shown = "; ".join(f"{name}: {', '.join(keys)}" for name, keys in rejected.items())
    version = context.torch.version if context.torch else "?"
    return failed(f"torch {version} rejects {shown}", _fix({key for keys in rejected.values() for key in keys}))


def _fix(keys: set[str]) -> str:
    ours = sorted(keys & OUR_KEYS.keys())
    if not ours:
        return "remove these keys from the variable"
    carried = ", ".join(f"{key} -> {OUR_KEYS[key]}" for key in ours)
    return f'eval "$(gh200 env)" removes them; their meaning is carried by our own settings: {carried}'


CHECK = Check(
    code="GH102",
    what="CUDA allocator options",
    why="torch parses them at the first use of CUDA: an unknown key raises there, and the next use may crash. The "
    "use_uvm keys of earlier guides exist only in privately patched builds.",
    run=_run,
)
