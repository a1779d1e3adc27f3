"""Shell completion, asked of the shells themselves: they source what ``gh200 --show-completion`` prints for them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

BIN = Path(sys.executable).parent

BASH = """
eval "$(gh200 --show-completion)"
COMP_WORDS=(gh200 {words}) COMP_CWORD={last}
_gh200_completion gh200
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
FISH = """
gh200 --show-completion | source
complete -C 'gh200 {words}'
"""
ZSH = """
autoload -U compinit && compinit -u -d {folder}/dump
eval "$(gh200 --show-completion)"
words=(gh200 {words}) CURRENT={zsh_last}
_arguments() {{ print -l -- "$@" }}
_describe() {{ print -l -- "$@" }}
eval "$(env _TYPER_COMPLETE_ARGS="${{words[1,$CURRENT]}}" _GH200_COMPLETE=complete_zsh gh200)"
[[ $_comps[gh200] == _gh200_completion ]] && print registered
"""
SCRIPTS = {"bash": BASH, "zsh": ZSH, "fish": FISH}


def completed(shell: str, words: str, folder: Path) -> str:
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} here: scripts/dev/install_test_programs.sh")
    parts = words.split(" ")
    script = SCRIPTS[shell].format(words=words, last=len(parts), zsh_last=len(parts) + 1, folder=folder)
    environment = {"PATH": f"{BIN}:{os.environ['PATH']}", "HOME": str(folder), "TERM": "dumb"}
    # From a file, as a start-up script would be read: the shell that asks is told by the process that started gh200.
    file = folder / f"try.{shell}"
    file.write_text(script)
    done = subprocess.run(
        [shell, str(file)], cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout


@pytest.mark.parametrize("shell", SCRIPTS)
def test_commands_and_options_are_completed(shell: str, tmp_path: Path) -> None:
    commands = completed(shell, "mon", tmp_path)
    assert "monitor" in commands and "report" not in commands
    options = completed(shell, "train --dry", tmp_path)
    assert "--dry-run" in options and "--config" not in options
    if shell == "zsh":
        assert "registered" in options
