"""What the ``.pth`` file runs at every interpreter start: nothing, unless SIMPLETUNER_GH200=1 asks for us.

The .pth line itself tests the variable, so that a start without it does not even import this module. Here only
post-import hooks are registered; torch and SimpleTuner are imported by whoever wants them, or not at all.
"""

from __future__ import annotations


def on_interpreter_start() -> None:
    """Arrange for the extension to be active if and when this interpreter imports SimpleTuner."""
    import wrapt

    def activate_before_first_use(_module: object) -> None:
        import logging

        from simpletuner_gh200.errors import GH200Error
        from simpletuner_gh200.seams.bootstrap import activate

        try:
            activate()
        except GH200Error as refused:
            logging.getLogger("simpletuner_gh200").error("gh200: %s", refused)
            raise SystemExit(refused.exit_code) from None

    wrapt.register_post_import_hook(activate_before_first_use, "simpletuner")
