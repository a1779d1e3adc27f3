"""The feature matrix: outcomes, exit codes, and what must be true of a run's notes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from scripts.feature_matrix import observations
from scripts.feature_matrix.matrix import FAILED, PASSED, SKIPPED, Row, Skip, attempt, show
from scripts.feature_matrix.runs import Kept, Run, need_backend, trained_weights

ASKED = {"what": "manual validation taken", "global_step": 2, "window_closed": True, "steps": 2}
MADE = {"what": "validation ran", "global_step": 2, "window_closed": True, "steps": 2, "images": 2}


def phase(name: str, backend: str = "native-math") -> dict[str, object]:
    return {"what": "phase", "phase": name, "backend": backend}


def run(*notes: dict[str, object], exit_code: int = 0) -> Run:
    return Run(exit_code, list(notes), Path("log"))


def outcome(result: str | Exception) -> str:
    def try_it() -> str:
        if isinstance(result, Exception):
            raise result
        return result

    return attempt("X1", "something", "command", try_it).outcome


def test_what_raises_is_never_passed() -> None:
    assert outcome("seen") == PASSED
    assert outcome(Skip("no GPU")) == SKIPPED
    assert outcome(AssertionError("wrong")) == FAILED
    assert outcome(KeyError("missing")) == FAILED


@pytest.mark.parametrize(("outcomes", "code"), [((PASSED, SKIPPED), 0), ((PASSED, FAILED), 1), ((SKIPPED,), 0)])
def test_the_exit_code_follows_the_outcomes(
    outcomes: tuple[str, ...], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [Row(f"X{index}", "scenario", "command", outcome, "detail") for index, outcome in enumerate(outcomes)]
    assert show(rows, ["said"], as_json=False) == code
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("| Test ID | Scenario")
    assert f"{outcomes.count(PASSED)} passed, {outcomes.count(FAILED)} failed" in printed[-1]
    assert show(rows, [], as_json=True) == code
    assert len(json.loads(capsys.readouterr().out)["rows"]) == len(rows)


def test_a_run_is_judged_by_the_step_it_reached() -> None:
    run({"what": "ended", "global_step": 4}).reached(4)
    for wrong in (
        run(),
        run({"what": "ended", "global_step": 3}),
        run({"what": "ended", "global_step": 4}, exit_code=1),
    ):
        with pytest.raises(RuntimeError, match="reached step"):
            wrong.reached(4)


def test_a_validation_at_a_closed_window_passes() -> None:
    assert observations.at_window_boundary(run(ASKED, MADE)) == "at step 2, window of 2 closed"


@pytest.mark.parametrize(
    "notes",
    [
        (),
        (ASKED,),
        (ASKED, ASKED, MADE),
        ({**ASKED, "window_closed": False}, MADE),
        ({**ASKED, "steps": 1}, MADE),
        (ASKED, {**MADE, "images": 0}),
        (ASKED, {**MADE, "global_step": 5}),
        (ASKED, {"what": "validation failed", "error": "x"}, MADE),
    ],
)
def test_anything_less_fails(notes: tuple[dict[str, object], ...]) -> None:
    with pytest.raises(AssertionError):
        observations.at_window_boundary(run(*notes))


def test_phases_must_surround_the_evaluation() -> None:
    good = run(phase("train"), ASKED, phase("eval"), MADE, phase("train"))
    assert observations.phases_around_evaluation(good) == "eval before, train after"
    with pytest.raises(AssertionError, match="phases around"):
        observations.phases_around_evaluation(run(phase("train"), ASKED, MADE, phase("train")))


def test_one_phase_with_another_backend_fails() -> None:
    assert observations.backend_active(run(phase("train"), phase("eval")), "native-math")
    with pytest.raises(AssertionError, match="backends seen"):
        observations.backend_active(run(phase("train"), phase("eval", "diffusers")), "native-math")


def test_the_guides_spelling_is_understood() -> None:
    assert need_backend("native_math") == "native-math"


def test_folders_are_put_back_as_they_were(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a").write_text("before")
    kept = Kept(tmp_path, ("data",))
    (tmp_path / "data" / "a").write_text("after")
    (tmp_path / "data" / "b").write_text("new")
    for _again in range(2):
        kept.restore()
        assert [(path.name, path.read_text()) for path in (tmp_path / "data").iterdir()] == [("a", "before")]


def test_weights_are_compared_by_their_bytes_and_not_by_their_files(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    def left(name: str, last: int, metadata: dict[str, str]) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        weights = {"w": np.array([1, last], np.uint8)}
        save_file(weights, str(folder / "pytorch_lora_weights.safetensors"), metadata)
        return folder

    stock = trained_weights(left("stock", 2, {"made": "by stock"}))
    assert stock == trained_weights(left("same", 2, {"made": "by us"}))
    assert stock != trained_weights(left("other", 3, {}))
    assert trained_weights(tmp_path / "nothing") == {}
