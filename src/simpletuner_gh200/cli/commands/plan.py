"""``gh200 plan``: will it fit, where does each byte live, what bounds a step, what is the cheapest change."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from simpletuner_gh200.cli.command import AsJson, Command, conclude
from simpletuner_gh200.cli.tables import paragraph, show_table
from simpletuner_gh200.cli.terminal import say, say_on_a_terminal, screen
from simpletuner_gh200.draw import save
from simpletuner_gh200.errors import UsageError
from simpletuner_gh200.units import counted, format_bytes

if TYPE_CHECKING:
    from rich.console import Console

    from simpletuner_gh200.plan.machines import Machine
    from simpletuner_gh200.plan.planning import Plan

SHOWN_CHANGES = 6


def plan(
    config: Annotated[
        Path | None, typer.Argument(help="Training configuration: JSON, TOML or ENV. None: --pictures, --pixels.")
    ] = None,
    machine: Annotated[
        str | None, typer.Option(help="gh200-96, gh200-144, gb200, gb10, h100 or this (default, where it has a GPU).")
    ] = None,
    ranks: Annotated[int | None, typer.Option(min=1, help="Ranks of all nodes. Default: num_processes, or 1.")] = None,
    nodes: Annotated[int | None, typer.Option(min=1, help="Nodes of all ranks. Default: num_machines.")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Also draw it: .html or .svg.")] = None,
    trace: Annotated[bool, typer.Option("--trace/--no-trace", help="Trace a step of a model that is new here.")] = True,
    pictures: Annotated[int | None, typer.Option(min=1, help="Without CONFIG: how many there are.")] = None,
    pixels: Annotated[int, typer.Option(min=64, help="Their edge, and that of what is trained on.")] = 1024,
    model: Annotated[str, typer.Option(help="FAMILY, FAMILY:FLAVOUR or FAMILY=REPOSITORY.")] = "flux",
    full: Annotated[bool, typer.Option("--full", help="All weights instead of a LoRA.")] = False,
    batch: Annotated[int, typer.Option(min=1, help="Samples of a micro-batch.")] = 1,
    as_json: AsJson = False,
) -> None:
    """Say before a run whether it fits, per pool and phase, what bounds a step, and what to change.

    The step is traced with SimpleTuner's own classes and no weights: up to a minute for a model that is new here,
    nothing afterwards. Exit code 1: it does not fit.

    Examples:

      gh200 plan config/config.json

      gh200 plan config/config.json --machine gh200-144 -o plan.html

      gh200 plan config/config.json --machine gh200-96 --ranks 8 --nodes 2

      gh200 plan --pictures 1000 --pixels 1024 --model flux --machine gh200-96
    """
    from simpletuner_gh200.config.files import locate_training_config
    from simpletuner_gh200.config.training import read_training
    from simpletuner_gh200.operate.models import choose_model
    from simpletuner_gh200.operate.preflight import check_installation
    from simpletuner_gh200.plan import question
    from simpletuner_gh200.plan.pictures import as_html, as_svg
    from simpletuner_gh200.plan.planning import make_plan
    from simpletuner_gh200.plan.text import unknown_model

    if output is not None and output.suffix.lower() not in {".svg", ".html"}:
        raise UsageError(f"-o {output}: unknown kind of picture", remedy="end the name in .html or .svg")
    options = check_installation(say_on_a_terminal).table
    if config is None:
        if pictures is None:
            raise UsageError("no CONFIG", remedy="name one, or ask by --pictures, --pixels, --model and --machine")
        chosen = choose_model(model, options.families if options is not None else {})
        named = {"model_family": chosen.family, "pretrained_model_name_or_path": chosen.weights}
        on = _machine(machine, ".")
        sized = {"pictures": pictures, "pixels": pixels, "full": full, "batch": batch}
        found = question.asked(
            *(named, on), pictures=pictures, pixels=pixels, full=full, batch=batch, trace=trace, options=options
        )
        _answer(found, as_json, sized)
        return
    if pictures is not None:
        remedy = "leave one of the two out: the data sets of a configuration say how many there are"
        raise UsageError(f"--pictures {pictures} together with {config}", remedy=remedy)
    located = locate_training_config({}, explicit=str(config), env_name=None)
    training = read_training(located, os.environ, options=options)
    where = str(training.values.get("output_dir") or ".")
    here = _machine(machine, where)
    if sys.stderr.isatty():
        say("gh200: planning; a model that is new here is traced first, up to a minute", error=True)
    made = make_plan(training, here, ranks=ranks, nodes=nodes, trace=trace)
    if (unknown := unknown_model(made)) is not None:
        raise unknown
    if output is not None:
        save(as_svg(made) if output.suffix.lower() == ".svg" else as_html(made), output)

    def show() -> None:
        _print(made, screen())
        if output:
            say(f"drawn into {output}")

    conclude(made.to_json(), as_json, show, ok=made.fits)


def _machine(name: str | None, output: str) -> Machine:
    """This one, where it has a GPU."""
    from simpletuner_gh200.plan.machines import machine as machine_named

    here = machine_named(name or "this", output=output)
    return machine_named("gh200-96") if name is None and not here.has_device else here


def _answer(found: dict[str, Plan], as_json: bool, sized: dict[str, Any]) -> None:
    """How long N pictures of M pixels take."""
    from simpletuner_gh200.plan import question
    from simpletuner_gh200.plan.text import unknown_model

    made = found["with"]
    if (unknown := unknown_model(made)) is not None:
        raise unknown

    def show() -> None:
        facts, console = made.evaluated.facts, screen()
        way = f"{facts.family} {'full' if facts.full else 'LoRA'}"
        way += f", {counted(sized['pictures'], 'picture')} of {sized['pixels']} pixels"
        headings = ("seconds, by arithmetic", "stock SimpleTuner", "with caches and memory auto")
        show_table(console, headings, list(question.rows(found)), title=f"{way}, {made.machine.title}", right=(1, 2))
        paragraph(console, "nothing of this was measured on that machine: rates are " + question.sources(made))
        for note in made.notes:
            paragraph(console, f"note: {note}")

    conclude({**sized, "machine": made.machine.name, **question.to_json(found)}, as_json, show, ok=made.fits)


def _print(made: Plan, console: Console) -> None:
    from simpletuner_gh200.plan import text
    from simpletuner_gh200.plan.pictures import SHOWN_BUCKETS, bars, in_characters

    console.print(text.headline(made), style="bold green" if made.fits else "bold red", markup=False, highlight=False)
    for bar in bars(made):
        drawn = Text(f"{bar.name:>20} ")
        for part, shade in in_characters(bar, width=max(20, min(60, console.width - 50))):
            drawn.append(part, style=shade)
        drawn.append(f" {bar.note}", style="bold red" if bar.over else "")
        console.print(drawn, highlight=False)
    rows = [
        (row.what, text.POOL_NAMES[row.pool], row.phase or "all", format_bytes(row.bytes), row.source)
        for row in sorted(made.evaluated.rows, key=lambda row: (row.pool != "hbm", row.pool != "grace", -row.bytes))
    ]
    show_table(console, ("what", "pool", "phase", "bytes", "source"), rows, title="bytes", right=(3,))
    if len(made.buckets) > 1:
        cells = [text.bucket_cells(bucket) for bucket in made.buckets[:SHOWN_BUCKETS]]
        show_table(console, text.BUCKET_HEADINGS, cells, title="activations by bucket", right=(1, 2, 3, 4))
    times = (*text.decision_line(made), text.step_line(made), *text.start_line(made), *text.whole_line(made))
    for line in (*text.summary(made), *times, *text.nodes_lines(made)):
        paragraph(console, line)
    useful = [change for change in made.changes if not made.fits or (change.fits and change.faster)]
    if useful:
        paragraph(console, text.order_of_changes(made))
    for change in useful[:SHOWN_CHANGES]:
        paragraph(console, change.text(), first=f"  {'fits' if change.fits else 'not enough'}: ", indent="    ")
    for note in made.notes:
        paragraph(console, f"note: {note}")


COMMAND = Command("plan", plan, panel="Start here", order=40)
