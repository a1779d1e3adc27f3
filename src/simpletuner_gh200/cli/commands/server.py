"""``gh200 server``: SimpleTuner's Web UI with the extension on."""

from __future__ import annotations

import typer

from simpletuner_gh200.cli.command import PASSED_ON, Command
from simpletuner_gh200.cli.terminal import say_on_a_terminal
from simpletuner_gh200.operate.launching import serve
from simpletuner_gh200.operate.preflight import check_installation


def server(context: typer.Context) -> None:
    """Start SimpleTuner's Web UI with the extension on; every option is passed on to `simpletuner server`.

    The same as `SIMPLETUNER_GH200=1 simpletuner server ...`, and jobs that the page starts find `accelerate` beside
    this Python also where its environment is not activated.

    Examples:

      gh200 server

      gh200 server --port 8080 --host 127.0.0.1
    """
    check_installation(say_on_a_terminal, trusting=True)
    serve(context.args)


COMMAND = Command(
    name="server",
    run=server,
    panel="Operate",
    context_settings=PASSED_ON,
)
