"""From source texts to a verdict."""

from __future__ import annotations

from pathlib import Path

import pytest

from simpletuner_gh200.upstream import check as checking
from simpletuner_gh200.upstream import user_cache
from simpletuner_gh200.upstream.check import Verdict
from simpletuner_gh200.upstream.features import FEATURES, ON, Status, consequences
from simpletuner_gh200.upstream.source import JoinedSource
from simpletuner_gh200.upstream.spec import all_specs, seam

LOOP = {"module": "simpletuner.trainer", "place": "Trainer.train(self)", "need": "telemetry: the loop"}
TRAINER = seam("trainer.train", **LOOP, **{"ramp: steps": "self.step()"})
SYNC = seam("accelerate.sync", module="accelerate.core", place="sync(self)", need="ramp: windows")
EXTRA = seam("extra", module="simpletuner.extra", place="new", need="store: newer releases", optional=True)
SPECS = {spec.name: spec for spec in (TRAINER, SYNC, EXTRA)}
GOOD = "class Trainer:\n    def train(self):\n        self.step()\n"


def source(trainer: str | None = GOOD, **more: str) -> JoinedSource:
    texts = {} if trainer is None else {"simpletuner.trainer": trainer.encode()}
    texts |= {f"simpletuner.{name}": text.encode() for name, text in more.items()}
    texts["simpletuner"] = b"__version__ = '9.9'\n"
    return JoinedSource({"simpletuner": texts.get})


def rows(verdict: Verdict) -> dict[str, tuple[str, str]]:
    return {row.name: (row.status, row.feature) for row in verdict.seams}


def test_a_good_source_passes_and_says_what_it_could_not_read() -> None:
    verdict = checking.check(source(), SPECS)
    assert verdict.ok
    assert verdict.version == "9.9"
    assert rows(verdict) == {
        "trainer.train": ("ok", "telemetry"),
        "accelerate.sync": ("skipped", "ramp"),
        "extra": ("absent", "store"),
    }
    assert set(verdict.features.values()) == {ON}


def test_a_broken_fact_costs_only_its_own_feature() -> None:
    verdict = checking.check(source(GOOD.replace("self.step()", "step(self)")), SPECS)
    assert not verdict.ok
    assert [row.feature for row in verdict.broken] == ["ramp"]
    assert verdict.features["ramp"].text().startswith("off: seam trainer.train: no `self.step()` in Trainer.train")
    assert verdict.features["telemetry"].on


def test_a_changed_signature_and_a_broken_fact_are_both_reported() -> None:
    text = GOOD.replace("train(self)", "train(self, n)").replace("self.step()", "pass")
    verdict = checking.check(source(text), SPECS)
    assert verdict.broken[0].feature == "telemetry, ramp"
    assert "Trainer.train(self, n)" in verdict.broken[0].found


@pytest.mark.parametrize(
    ("text", "found"), [(None, "no module simpletuner.trainer"), ("def train(:\n", "not readable by this Python")]
)
def test_a_module_that_cannot_be_read_is_named(text: str | None, found: str) -> None:
    assert found in checking.check(source(text), SPECS).broken[0].found


def test_what_builds_on_a_lost_feature_is_lost_too() -> None:
    verdicts = consequences({"config": "seam x: gone"})
    assert (verdicts["config"], verdicts["ramp"]) == (Status("seam x: gone"), Status("needs config, which is off"))
    assert verdicts["telemetry"] == ON
    assert not any(status.on for status in consequences({"core": "gone"}).values())


def test_an_optional_seam_that_is_there_must_be_right() -> None:
    broken_extra = seam("extra", module="simpletuner.extra", place="new(a)", need="store: newer", optional=True)
    verdict = checking.check(source(extra="def new(b): ...\n"), {"extra": broken_extra})
    assert rows(verdict) == {"extra": ("broken", "store")}


def test_the_contract_names_only_known_features() -> None:
    for spec in all_specs().values():
        named = {*spec.features, *(name for fact in spec.facts for name in fact.features or ())}
        assert named <= set(FEATURES), spec.name
        assert spec.reason


def test_every_feature_hangs_on_some_seam() -> None:
    named = {name for spec in all_specs().values() for name in spec.features}
    assert named == set(FEATURES)


def joined(text: bytes) -> JoinedSource:
    return JoinedSource({"simpletuner": lambda _module: text})


def test_the_same_texts_are_checked_once(private_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = checking.check_remembered(joined(b"x = 1\n"))

    def never(*_args: object, **_kwargs: object) -> Verdict:
        raise AssertionError("checked again")

    monkeypatch.setattr(checking, "check", never)
    assert checking.check_remembered(joined(b"x = 1\n")) == first
    with pytest.raises(AssertionError, match="checked again"):
        checking.check_remembered(joined(b"x = 2\n"))


def test_a_torn_entry_is_made_again(private_cache: Path) -> None:
    first = checking.check_remembered(joined(b"x = 1\n"))
    (path,) = (user_cache.cache_root() / "verdicts").iterdir()
    whole = path.read_text(encoding="utf-8")
    for torn in ('{"version": "1"', "{}", "[]"):
        path.write_text(torn, encoding="utf-8")
        assert checking.check_remembered(joined(b"x = 1\n")) == first
        assert path.read_text(encoding="utf-8") == whole
    assert user_cache.cache_root().stat().st_mode & 0o077 == 0, "private to the user"
