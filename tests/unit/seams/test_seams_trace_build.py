"""Which blocks of a model a trace leaves out, and what is left then."""

from __future__ import annotations

import torch

from simpletuner_gh200.seams.trace import build


def model(**lists: list[int]):
    """Blocks as linear layers of these widths: equal widths are alike."""
    made = torch.nn.Module()
    for name, widths in lists.items():
        made.add_module(name, torch.nn.ModuleList(torch.nn.Linear(width, 2) for width in widths))
    return made


def widths(made) -> dict[str, list[int]]:
    return {name: [block.in_features for block in child] for name, child in made.named_children()}


def test_every_run_of_alike_blocks_is_found_and_short_ones_are_not():
    found = build.stacks(model(blocks=[1] * 13 + [2] * 10 + [3], single=[4] * 5, few=[5] * 3))
    assert found == {
        "blocks": build.Run("blocks", 0, 13),
        "blocks[13]": build.Run("blocks", 13, 10),
        "single": build.Run("single", 0, 5),
    }


def test_what_is_alike_is_shortened_and_the_rest_stays():
    def made():
        return model(blocks=[9, *[1] * 6, 8, *[2] * 5, 3], single=[4] * 4)

    runs = build.stacks(made())
    two = dict.fromkeys(runs, 2)
    assert widths(build.shortened(made(), runs, two)) == {"blocks": [9, 1, 1, 8, 2, 2, 3], "single": [4, 4]}
    for name in runs:
        longer = widths(build.shortened(made(), runs, {**two, name: 3}))
        run = runs[name]
        assert len(longer[run.list]) == len(widths(build.shortened(made(), runs, two))[run.list]) + 1
    assert widths(build.shortened(made(), runs, {**two, "blocks[8]": 3}))["blocks"] == [9, 1, 1, 8, 2, 2, 2, 3]
