"""``gh200 env``: the environment of a run, for a shell."""

from __future__ import annotations

import os

from simpletuner_gh200.cli.command import AsJson, Command, conclude
from simpletuner_gh200.cli.terminal import say
from simpletuner_gh200.operate.environment import decide, spell


def env(
    as_json: AsJson = False,
) -> None:
    """Print what to export before a run, quoted for bash, zsh and sh.

    A ratio (GH200_UVM_OVERSUBSCRIPTION_RATIO) and an access pattern (GH200_UVM_ACCESS_PATTERN) that are set already
    are kept. Keys of PYTORCH_CUDA_ALLOC_CONF that only the earlier guides' torch knows are taken out.

    Examples:

      eval "$(gh200 env)"

      gh200 env --json | jq .exports

      GH200_UVM_ACCESS_PATTERN=balanced gh200 env --json
    """
    exports = decide(os.environ)
    commands = spell(exports)

    def show() -> None:
        for note in exports.notes:
            say(f"gh200: {note}", error=True)
        print(commands)

    document = {"exports": exports.values, "unset": exports.unset, "notes": exports.notes}
    conclude(document, as_json, show)


COMMAND = Command("env", env, panel="More: before a run", order=60)
