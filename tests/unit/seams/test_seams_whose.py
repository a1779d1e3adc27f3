"""The one line on SimpleTuner's tracebacks: which seams are in place, and how to run without them."""

from __future__ import annotations

import traceback

from simpletuner_gh200.errors import UsageError
from simpletuner_gh200.seams import rank
from simpletuner_gh200.seams.outcome import MARK, how_to_run_without, mark
from simpletuner_gh200.seams.runtime import Launch, Runtime
from simpletuner_gh200.upstream.features import ON


def test_the_line_names_every_seam_and_both_ways_out():
    line = how_to_run_without(["trainer.train", "collate.compute_latents", "trainer.init_hooks"])
    assert "trainer (train, init_hooks), collate (compute_latents)" in line
    assert "SIMPLETUNER_GH200=0" in line
    assert "`simpletuner train`" in line
    assert "\n" not in line


def test_an_exception_is_marked_once_and_keeps_its_words():
    failure = ValueError("upstream's own")
    mark(failure, ["trainer.train"])
    mark(failure, ["trainer.train"])
    text = "".join(traceback.format_exception(failure))
    assert text.count(MARK) == 1
    assert str(failure) == "upstream's own"


def test_our_own_errors_are_not_marked():
    failure = UsageError("ours", remedy="do it")
    mark(failure, ["trainer.train"])
    assert not hasattr(failure, "__notes__")


def failing(tmp_path, monkeypatch, script: str) -> list[str]:
    file = tmp_path / "train.py"
    file.write_text(script)
    monkeypatch.setattr("sys.argv", ["test"])
    runtime, said = Runtime(Launch()), []
    runtime.seams["trainer.train"].status = ON
    rank._train(file, runtime, [], said.append)
    rank._conclude(runtime, said.append)
    return said


def test_what_escapes_a_rank_carries_it(tmp_path, monkeypatch):
    said = failing(tmp_path, monkeypatch, "raise KeyError('latents')\n")
    (told,) = [text for text in said if "Traceback" in text]
    assert told.splitlines()[-1].startswith(MARK)
    assert "trainer (train)" in told


def test_what_an_older_release_swallowed_is_followed_by_it(tmp_path, monkeypatch):
    said = failing(tmp_path, monkeypatch, "try:\n    1 / 0\nexcept Exception as e:\n    print(e)\n")
    assert [text for text in said if text.startswith(MARK)] == [how_to_run_without(["trainer.train"])]
