"""The ``gh200`` command: subcommands assembled from ``cli/commands``, errors shown on one screen."""

from __future__ import annotations

import errno
import inspect
import json
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from simpletuner_gh200 import __version__
from simpletuner_gh200.cli.command import Command, flowing
from simpletuner_gh200.cli.terminal import prepare_process, say
from simpletuner_gh200.config.environment import DEBUG, text
from simpletuner_gh200.errors import ConfigError, GH200Error, RunFailed
from simpletuner_gh200.registry import contributions
from simpletuner_gh200.telemetry.redact import keep_log_printable, printable, redact, redact_text

_WANTS_JSON = "simpletuner_gh200.json"


class _Commands(TyperGroup):
    """Complaints about words on the command line quote them; a file name among those must not steer the terminal."""

    def make_context(self, info_name: str | None, args: list[str], *others: Any, **options: Any) -> Any:
        wants_json = "--json" in args
        with _printable_complaints():
            context = super().make_context(info_name, args, *others, **options)
        context.meta[_WANTS_JSON] = wants_json
        return context

    def invoke(self, ctx: Any) -> Any:
        with _printable_complaints():
            try:
                return super().invoke(ctx)
            except GH200Error as failure:
                if ctx.meta[_WANTS_JSON]:
                    print(json.dumps(refusal(failure)))
                raise

    def list_commands(self, ctx: Any) -> list[str]:
        """In the order of use; typer would put commands before groups of them."""
        return [command.name for command in _in_order()]


def refusal(failure: GH200Error) -> dict[str, Any]:
    """What a command that was to print one JSON object prints where it can't do its work."""
    problems = failure.problems if isinstance(failure, ConfigError) else ()
    return {
        "ok": False,
        "exit_code": failure.exit_code,
        "reason": redact_text(failure.message),
        "problems": [redact(vars(problem)) for problem in problems],
        **failure.document,
    }


@cache
def _in_order() -> tuple[Command, ...]:
    found = contributions("simpletuner_gh200.cli.commands", "COMMAND", Command)
    return tuple(sorted(found, key=lambda command: command.place))


@contextmanager
def _printable_complaints() -> Iterator[None]:
    try:
        yield
    except Exception as complaint:
        # Which click it is of, typer's own or the installed one, depends on typer's release.
        if hasattr(complaint, "format_message"):
            vars(complaint)["message"] = printable(str(vars(complaint).get("message", "")), lines=True)
        raise


def build_app() -> typer.Typer:
    """The application with every subcommand that has a file in ``cli/commands``."""
    app = typer.Typer(
        name="gh200",
        cls=_Commands,
        help="SimpleTuner on Grace-Hopper: datasets, caches, model state and activations in CPU memory; a batch ramp.",
        epilog="gh200 COMMAND --help has examples of each. Without a GPU: gh200 setup --cpu, then gh200 demo.",
        no_args_is_help=True,
        context_settings={"help_option_names": ["-h", "--help"]},
        rich_markup_mode="rich",
        pretty_exceptions_enable=False,
    )
    app.callback()(_options)
    for command in _in_order():
        if isinstance(command.run, typer.Typer):
            for each in command.run.registered_commands:
                each.help = flowing(each.help or inspect.getdoc(each.callback))
            app.add_typer(command.run, name=command.name, rich_help_panel=command.panel)
        else:
            app.command(
                command.name,
                help=flowing(inspect.getdoc(command.run)),
                context_settings=command.context_settings,
                add_help_option=command.add_help_option,
                rich_help_panel=command.panel,
            )(command.run)
    return app


def _show_version(asked: bool) -> None:
    if asked:
        print(f"gh200 {__version__}")
        raise typer.Exit


def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_show_version, is_eager=True)
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
) -> None:
    if debug:
        os.environ[DEBUG] = "1"


def main() -> None:
    """Entry point of the console script."""
    keep_log_printable()
    try:
        prepare_process()
        try:
            build_app()(standalone_mode=True)
        finally:
            sys.stdout.flush()  # here, where a full disk can still be said, and not while the interpreter ends
    except GH200Error as failure:
        _give_up(failure)
    except BrokenPipeError:
        # The reader of our output left (`gh200 ... | head`); that is not an error of ours.
        _forget_output()
        sys.exit(0)
    except OSError as failure:
        if failure.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
            raise
        _forget_output()
        where = f"{failure.filename} could" if failure.filename else "the output could"
        _give_up(RunFailed(f"{where} not be written: {failure.strerror}", remedy="make room, or send it elsewhere"))
    except RuntimeError as failure:
        if "can't start new thread" not in str(failure):
            raise
        _give_up(RunFailed("no thread can be started: this user has as many as allowed", remedy="raise `ulimit -u`"))


def _give_up(failure: GH200Error) -> NoReturn:
    if text(DEBUG):
        traceback.print_exc()
    say(f"gh200: {redact_text(str(failure))}", error=True)
    sys.exit(failure.exit_code)


def _forget_output() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    main()
