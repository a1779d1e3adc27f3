#!/usr/bin/env python3
"""Write the generated pages of docs/reference from the code. `make docs`; a test fails when a page is stale."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

import typer

from simpletuner_gh200.cli.main import build_app
from simpletuner_gh200.config.blocks import parts_of
from simpletuner_gh200.config.part import DATASET_BLOCK, TRAINING_BLOCKS
from simpletuner_gh200.model.optimizer_table import (
    OptimizerFacts,
    optimizers,
    seconds_in_place,
    seconds_streamed,
    streaming_wins,
)

ROOT = Path(__file__).resolve().parents[2]
NOTE = "<!-- Generated from the code by `make docs`; do not edit. -->\n"


def pages() -> dict[Path, str]:
    """Path -> text of every generated page and picture."""
    from scripts.dev import fits_picture, releases  # main() makes this work where the file is started by its path

    support = ROOT / "docs" / "support.md"
    reference = ROOT / "docs" / "reference"
    return {
        reference / "configuration.md": configuration_page(),
        reference / "cli.md": cli_page(),
        reference / "optimizers.md": optimizers_page(),
        reference / "models.md": fits_picture.page(NOTE),
        ROOT / "docs" / "pictures" / "fits.svg": fits_picture.picture(),
        support: releases.page(support.read_text(encoding="utf-8")),
    }


def configuration_page() -> str:
    lines = [NOTE, "# Configuration keys", ""]
    lines.append("`gh200 config check FILE` prints what is in force for a file, and where each value comes from.")
    for block in (*TRAINING_BLOCKS, DATASET_BLOCK):
        place = "in a dataset entry of type `in_memory`" if block == DATASET_BLOCK else "in the training configuration"
        lines += ["", f"## `{block}` ({place})"]
        for part in parts_of(block):
            lines += ["", *part_table(part)]
    return "\n".join(lines) + "\n"


def part_table(part: Any) -> Iterator[str]:
    yield f"Feature *{part.feature}*:"
    yield ""
    yield "| key | type | default | environment | meaning |"
    yield "|---|---|---|---|---|"
    for name, field in part.model.model_fields.items():
        default = "unset" if field.default is None else f"`{json.dumps(field.default)}`"
        variable = part.environment.get(name)
        shown = f"`{variable}`" if variable else ""
        yield f"| `{name}` | {type_text(field.annotation)} | {default} | {shown} | {as_text(part.help(name))} |"


def type_text(annotation: Any) -> str:
    """`int | None` -> int; Literal choices are spelt out."""
    if annotation is type(None):
        return ""
    if annotation is None or not get_args(annotation):
        return getattr(annotation, "__name__", str(annotation))
    if str(get_origin(annotation)).endswith("Literal"):
        return " or ".join(f'`"{choice}"`' for choice in get_args(annotation))
    if get_origin(annotation) is tuple:
        return f"list of {type_text(get_args(annotation)[0])}"
    return " or ".join(text for text in map(type_text, get_args(annotation)) if text)


READ, WRITTEN = 330e9, 300e9
"""Bytes per second, as others measured them on a GH200 (docs/concepts/how-it-works.md)."""


OPTIMIZERS_PREFACE = """
Every optimizer of SimpleTuner {releases}, run on the CPU by `scripts/dev/generate_optimizer_table.py`: plain, with
its state caught into a pool, resumed, and streamed. Weights and states were the same to the bit in every step, and
all state tensors were accounted for. The integration tests run it again for what is installed. *Passes* are bytes
of state that a step reads and writes, as multiples of it; compiled or fused kernels make fewer. *Seconds* are
arithmetic for 10⁹ trained bf16 parameters at 330 GB/s read and 300 GB/s written, which others measured: nobody has
run it on a GH200 here. A run's log has the rates of your machine, and `gh200 selftest --bench` measures more.
"""


PUBLISHED_FLOPS, PUBLISHED_TOKENS = 600e12, 4 * 4096
PUBLISHED_CASES = (
    ("Qwen3-14B", 14e9, True, "about 600 TFLOPS [1]"),
    ("GPT-OSS-20B, a mixture of experts", 20e9, False, "about 600 TFLOPS [1]"),
    ("25 billion parameters", 25e9, True, "the largest that one superchip trains [2]"),
)
CASES_PREFACE = """
## SuperOffload's published cases, by our arithmetic

[SuperOffload](../does-it-help.md) steps on the CPU; ours leaves the step to the GPU, and bytes to the link. One GH200,
one micro-batch of 4 x 4096 tokens, `adamw_bf16` streamed, weights and gradients in Grace, parameters as the names say.
*Computing* is 6 operations per parameter and token at the published rate, without checkpointing; the blocks' weights
(twice) and gradients cross the link beside it, and only the step comes on top. Arithmetic at the rates above: nothing
of it was measured here, SimpleTuner trains no language models, and activations are not counted.

1. DeepSpeed (GitHub, `deepspeedai/DeepSpeed`): `blogs/deepspeed-superoffload/README.md`
2. [arXiv 2509.21271](https://arxiv.org/abs/2509.21271), abstract
"""


def optimizers_page() -> str:
    releases = sorted({release for facts in optimizers().values() for release in facts.releases})
    columns = ("optimizer", "bytes per parameter, bf16 / fp32 weights", "born", "passes, read / written")
    columns += ("seconds in place / streamed", "streamed?")
    lines = [
        NOTE,
        "# What optimizers keep",
        "",
        *OPTIMIZERS_PREFACE.format(releases=" and ".join(releases)).strip().splitlines(),
        "",
        f"| {' | '.join(columns)} |",
        "|---|---|---|---|---|---|",
        *(optimizer_row(facts) for facts in optimizers().values()),
        "",
        *CASES_PREFACE.strip().splitlines(),
        "",
        "| full fine-tune | they publish | ours: GB in Grace | computing, s | weights, s | gradients, s | step, s |",
        "|---|---|---|---|---|---|---|",
        *(case_row(*case) for case in PUBLISHED_CASES),
    ]
    return "\n".join(lines) + "\n"


def case_row(name: str, parameters: float, dense: bool, published: str) -> str:
    """With two bytes each for weights and gradients; seconds at the rates of a GH200, each thing by itself."""
    state = optimizers()["adamw_bf16"].bytes_bf16 or 0
    held = (2 + 2 + state) * parameters
    computing = f"{6 * parameters * PUBLISHED_TOKENS / PUBLISHED_FLOPS:.2f}" if dense else "–"
    brought, moved = 2 * 2 * parameters / READ, 2 * parameters / WRITTEN
    step = seconds_streamed(round(held), READ, WRITTEN)
    return f"| {name} | {published} | {held / 1e9:.0f} | {computing} | {brought:.2f} | {moved:.2f} | {step:.2f} |"


def optimizer_row(facts: OptimizerFacts) -> str:
    if facts.fails is not None:
        return f"| `{facts.name}` | | | | | does not run by itself: {facts.fails} |"
    kept = " / ".join("–" if each is None else f"{each:g}" for each in (facts.bytes_bf16, facts.bytes_fp32))
    size = round((facts.bytes_per_parameter("bf16") or 0) * 10**9)
    in_place, streamed = seconds_in_place(facts, size, READ, WRITTEN), seconds_streamed(size, READ, WRITTEN)
    seconds = f"{in_place:.3f} / {streamed:.3f}" if facts.streamable else f"{in_place:.3f}"
    wins = "yes" if streaming_wins(facts, size, READ, WRITTEN) else "no gain"
    return (
        f"| `{facts.name}` | {kept} | {facts.born} | {facts.reads:g} / {facts.writes:g} | {seconds} "
        f"| {wins if facts.streamable else f'no: {facts.why_not}'} |"
    )


def cli_page() -> str:
    lines = [NOTE, "# The `gh200` command", ""]
    lines.append("Exit codes: 0 done, 1 a check or run failed, 2 usage or configuration. With `--json`, one object is")
    lines.append("the last line of standard output, and nothing else is there. `gh200 --debug ...` shows tracebacks.")
    for words, command in commands(typer.main.get_command(build_app()), ("gh200",)):
        lines += ["", f"## `{' '.join(words)}`", "", *command_text(command)]
    return "\n".join(lines) + "\n"


def commands(group: Any, words: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, command in sorted(group.commands.items()):
        if hasattr(command, "commands"):
            yield from commands(command, (*words, name))
        else:
            yield (*words, name), command


def command_text(command: Any) -> Iterator[str]:
    for part in (command.help, command.epilog):
        if part:
            yield from prose(inspect.cleandoc(part))
    rows = [row for parameter in command.params if (row := parameter_row(parameter))]
    if rows:
        yield from ("", "| argument or option | meaning |", "|---|---|", *rows)


def prose(text: str) -> Iterator[str]:
    """Examples, which the terminal needs as separate paragraphs, become one block."""
    in_examples = False
    for line in text.replace("\f", "").splitlines():
        if line.strip().rstrip(":").lower() in {"example", "examples"}:
            in_examples = True
            yield from ("", "```bash")
        elif in_examples:
            if line.strip():
                yield line.strip()
        else:
            yield line
    if in_examples:
        yield "```"


def parameter_row(parameter: Any) -> str | None:
    if "--help" in parameter.opts or getattr(parameter, "hidden", False):
        return None
    is_option = parameter.opts[0].startswith("-")
    names = ", ".join(f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts))
    names = names if is_option else f"`{parameter.name.upper()}`"
    help_text = as_text(getattr(parameter, "help", None) or "")
    return f"| {names} | {help_text} |"


def as_text(words: str) -> str:
    """For a cell of a table: nothing of it is a tag, a column or a new line."""
    return words.replace("<", "&lt;").replace("|", "\\|").replace("\n", " ")


def main() -> int:
    sys.path.insert(0, str(ROOT))
    for path, text in pages().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        print(path.relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
