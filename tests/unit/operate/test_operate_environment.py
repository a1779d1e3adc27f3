"""What ``gh200 env`` exports, decided without a shell; and in real shells, where a value must stay a value."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from simpletuner_gh200.config.allocator import split_options
from simpletuner_gh200.errors import ConfigError, UsageError
from simpletuner_gh200.operate.environment import Exports, decide, spell

SCRIPT = Path(__file__).parents[3] / "scripts" / "setup_gh200_env.sh"
ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"
HOSTILE = "a'b\"c $(touch x) `touch x` \\ ; touch x & !! * ~ %s \t$HOME"


def test_the_defaults_of_the_guides() -> None:
    exports = decide({})
    (said,) = exports.notes
    assert said == (
        "GH200_UVM_OVERSUBSCRIPTION_RATIO=5 has no effect by itself: to keep optimizer state in CPU memory, "
        "export GH200_USE_UVM=1, or set use_uvm in the configuration"
    )
    assert exports.values == {
        "SIMPLETUNER_GH200": "1",
        "SIMPLETUNER_GH200_ENABLE_UVM_HINTS": "1",
        "GH200_UVM_OVERSUBSCRIPTION_RATIO": "5.0",
        "GH200_UVM_ACCESS_PATTERN": "gpu_first",
        "ACCELERATE_MIXED_PRECISION": "bf16",
    }


def test_ratio_and_pattern_set_before_are_kept() -> None:
    given = {"GH200_UVM_OVERSUBSCRIPTION_RATIO": "2.5", "GH200_UVM_ACCESS_PATTERN": "balanced"}
    assert decide(given).values.items() >= given.items()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("GH200_UVM_ACCESS_PATTERN", "gpu_first; touch x"),
        ("GH200_UVM_ACCESS_PATTERN", "gpu-first"),
        ("GH200_UVM_OVERSUBSCRIPTION_RATIO", "-1"),
        ("GH200_UVM_OVERSUBSCRIPTION_RATIO", "$(touch x)"),
    ],
)
def test_a_bad_value_is_an_error_that_quotes_it(name: str, value: str) -> None:
    with pytest.raises(ConfigError) as refused:
        decide({name: value})
    assert name in str(refused.value)
    assert value in str(refused.value)
    assert "could not convert" not in str(refused.value)


def test_keys_of_the_earlier_guides_are_taken_out_and_carried() -> None:
    given = "use_uvm:True,uvm_oversubscription_ratio:3.0,expandable_segments:True"
    exports = decide({ALLOCATOR: given})
    assert exports.values[ALLOCATOR] == "expandable_segments:True"
    assert exports.values["GH200_UVM_OVERSUBSCRIPTION_RATIO"] == "3.0"
    assert exports.values["GH200_USE_UVM"] == "1"
    assert exports.values["GH200_ACTIVATIONS"] == "auto"
    assert any("optimizer state and EMA live in Grace" in note for note in exports.notes)
    assert any("would crash" in note and "use_uvm=True" in note for note in exports.notes)


def test_the_kill_switch_stays_and_is_told() -> None:
    exports = decide({"SIMPLETUNER_GH200": "0"})
    assert "SIMPLETUNER_GH200" not in exports.values
    assert any("stays off" in note for note in exports.notes)


def test_nothing_left_means_unset() -> None:
    exports = decide({ALLOCATOR: "use_uvm:True"})
    assert exports.unset == [ALLOCATOR]
    assert ALLOCATOR not in exports.values


def test_torchs_own_allocator_setting_is_left_alone() -> None:
    exports = decide({ALLOCATOR: "expandable_segments:True"})
    assert ALLOCATOR not in exports.values
    assert exports.unset == []


def test_options_in_brackets_stay_whole() -> None:
    given = "roundup_power2_divisions:[256:1,512:2,>:4],max_split_size_mb:64"
    assert split_options(given) == [("roundup_power2_divisions", "[256:1,512:2,>:4]"), ("max_split_size_mb", "64")]


def test_a_name_that_is_no_name_is_refused() -> None:
    with pytest.raises(UsageError):
        spell(Exports({"A; touch x": "1"}))


@pytest.mark.parametrize("shell", ["bash", "dash", "ksh", "zsh"])
def test_a_hostile_value_arrives_as_it_is(shell: str, tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} on this machine")
    commands = spell(Exports({"GH200_PROBE": HOSTILE}, unset=["GH200_GONE"]))
    show = f'{sys.executable} -c \'import os; print(os.environ["GH200_PROBE"]); print("GH200_GONE" in os.environ)\''
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "GH200_GONE": "1"}
    done = subprocess.run(
        [shell, "-c", f"{commands}\n{show}"], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.stdout == f"{HOSTILE}\nFalse\n", done.stderr
    assert not (tmp_path / "x").exists()


def sourced(shell: str, script: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """A shell without nvidia-smi, in which ``gh200`` is the one of this environment."""
    (folder / "bin").mkdir(exist_ok=True)
    starter = folder / "bin" / "gh200"
    starter.write_text(f'#!/bin/sh\nexec {sys.executable} -m simpletuner_gh200.cli.main "$@"\n')
    starter.chmod(0o755)
    wanted = {"PATH": f"{folder}/bin:/usr/bin:/bin", "HOME": str(folder), **environment}
    return subprocess.run([shell, "-c", script], cwd=folder, env=wanted, capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.parametrize("shell", ["bash", "zsh", "sh"])
def test_sourcing_the_script_exports_and_leaves_the_shell_alive(shell: str, tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} on this machine")
    script = f"""
        before=$-
        . {SCRIPT}
        echo "status $?"
        [ "$before" = "$-" ] && echo options kept
        false
        echo "alive $GH200_UVM_ACCESS_PATTERN $SIMPLETUNER_GH200_ENABLE_UVM_HINTS $ACCELERATE_MIXED_PRECISION"
        command -v _gh200_setup || echo nothing left behind
        GH200_UVM_ACCESS_PATTERN='gpu_first; touch x'
        export GH200_UVM_ACCESS_PATTERN
        . {SCRIPT} || echo "refused, still alive"
    """
    done = sourced(shell, script, tmp_path, GH200_UVM_ACCESS_PATTERN="balanced")
    assert done.stdout.splitlines() == [
        "status 0",
        "options kept",
        "alive balanced 1 bf16",
        "nothing left behind",
        "refused, still alive",
    ], done.stderr
    assert not (tmp_path / "x").exists()


def test_the_script_works_in_a_strict_shell(tmp_path: Path) -> None:
    done = sourced("bash", f"set -euo pipefail; . {SCRIPT}; echo $GH200_UVM_OVERSUBSCRIPTION_RATIO", tmp_path)
    assert done.stdout == "5.0\n", done.stderr


def test_running_the_script_says_to_source_it(tmp_path: Path) -> None:
    done = subprocess.run(["bash", str(SCRIPT)], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 1
    assert "source this file" in done.stderr


def test_the_script_asks_about_the_installation_only_where_it_is_missing(tmp_path: Path) -> None:
    bad = sourced("bash", f". {SCRIPT}", tmp_path, GH200_UVM_OVERSUBSCRIPTION_RATIO="abc")
    assert "'abc'" in bad.stderr
    assert "nothing was exported" in bad.stderr
    assert "install" not in bad.stderr
    none = sourced("bash", f"rm {tmp_path}/bin/gh200; hash -r; PYTHON=/bin/false; . {SCRIPT}", tmp_path)
    assert "simpletuner-gh200 is not installed here" in none.stderr
