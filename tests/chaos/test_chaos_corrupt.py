"""Packs, cache files and images that change behind our back: training is the same, or stops and says so."""

from __future__ import annotations

import json
import time

import pytest

from tests.chaos import damage
from tests.chaos.laboratory import PHASES, STEPS
from tests.chaos.representatives import only
from tests.chaos.small_packs import write_packs


def answer(ended):
    assert "Traceback" not in ended.err, ended.explain()
    return json.loads(ended.out.splitlines()[-1])


@pytest.mark.parametrize("harm", only([damage.flipped], [*damage.TO_CONTENT, *damage.TO_KIND]), ids=damage.name_of)
def test_damage_is_found(tmp_path, start, harm):
    root, pack = write_packs(tmp_path)
    damage.force(harm, pack)
    verified = start("cache", "verify", root, "--json").end()
    assert verified.code == 1, verified.explain()
    assert answer(verified)["problems"]
    listed = start("cache", "ls", root, "--json").end()
    assert listed.code in {0, 1} and answer(listed)["caches"]


@pytest.mark.chaos
def test_damaged_packs_train_the_same(packed, train):
    """Every kind of damage at once, each to a pack of its own of every cache."""
    harms = (*damage.TO_CONTENT, *damage.TO_KIND)
    harmed = [(harms[number], pack) for number, pack in packed.spread_packs(len(harms))]
    for harm, pack in harmed:
        damage.force(harm, pack)
    command = train(packed)
    ended = command.end_of_all()
    packed.assert_trained_the_same(ended)
    lost = [
        pack for harm, pack in harmed if harm not in (damage.overwritten, damage.flipped, damage.flipped_everywhere)
    ]
    said = ended.out + ended.err  # releases log to different streams
    assert [pack for pack in lost if str(pack) not in said] == [], "packs that can't be opened are named"


@pytest.mark.chaos
@pytest.mark.parametrize("phase", [pytest.param("loading the model", marks=pytest.mark.only_release("4.")), "training"])
def test_packs_damaged_while_they_are_served(packed, train, phase):
    """In place, in files that may be mapped: no SIGBUS, no other tensors."""
    harms = (damage.truncated, damage.overwritten, damage.flipped)
    served = list(packed.spread_packs(2 * len(harms)))
    command = train(packed)
    command.wait_for_words(PHASES[phase])
    for number, pack in served:
        damage.force(harms[number % len(harms)], pack)
    ended = command.end()
    packed.assert_trained_the_same(ended)


OF_ONE_FILE = [
    (damage.truncated, "vae"),
    (damage.replaced_by_fifo, "vae"),
    (damage.flipped, "text"),
    (damage.emptied, "text"),
]
"""The others of each harm and each kind are asked of one release."""


@pytest.mark.chaos
@pytest.mark.parametrize(
    ("harm", "kind"),
    [
        *OF_ONE_FILE,
        *(
            pytest.param(harm, {"vae": "text", "text": "vae"}[kind], marks=pytest.mark.only_release("4."))
            for harm, kind in OF_ONE_FILE
        ),
    ],
    ids=lambda given: given if isinstance(given, str) else damage.name_of(given),
)
def test_a_damaged_cache_file_of_simpletuner(laboratory, train, harm, kind):
    """What SimpleTuner makes of it is its own: it trains, or it fails. It never hangs, and the end is truthful."""
    path = sorted((laboratory.project.folder / "cache" / kind).rglob("*.pt"))[0]
    damage.force(harm, path)
    command = train(laboratory)
    ended = command.end_of_all()
    if ended.code == 0:
        assert f"trained: {STEPS} of {STEPS} optimizer steps" in ended.err
    else:
        assert ended.code == 1 and ended.last_line.startswith("gh200: training failed: "), ended.explain()


@pytest.mark.chaos
def test_images_rewritten_while_they_are_staged(packed, train):
    """In place and at the same size, all the time: none is deleted, and training, which reads caches, is the same."""
    images = sorted(packed.project.images.glob("*.png"))
    contents = {path: path.read_bytes() for path in images}
    command = train(packed)
    while command.process.poll() is None:
        for path, content in contents.items():
            with path.open("r+b") as file:
                file.write(content)
        time.sleep(0.02)
    ended = command.end()
    assert ended.code == 0, ended.explain()
    assert {path: path.read_bytes() for path in images} == contents
    assert packed.bits() == packed.reference_bits()
