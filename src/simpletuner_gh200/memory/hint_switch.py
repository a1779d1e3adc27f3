"""Are placement hints on? An override decides, then the environment, then the default, which is off."""

from __future__ import annotations

import os
from dataclasses import dataclass

from simpletuner_gh200.config.blocks import HINTS_VARIABLE as VARIABLE
from simpletuner_gh200.config.blocks import hints_switch_in as switch_in

_override: bool | None = None


@dataclass(frozen=True)
class Decision:
    enabled: bool
    reason: str


def set_uvm_hint_override(value: bool | None) -> None:
    """Switch hints on or off whatever the environment says; None takes the override away."""
    global _override
    if value is not None and not isinstance(value, bool):
        raise TypeError(f"the override is True, False or None, found {value!r}")
    _override = value


def decision() -> Decision:
    """Whether hints are on, and who decided it."""
    if _override is not None:
        return Decision(_override, f"switched {'on' if _override else 'off'} by the configuration")
    asked = switch_in(os.environ)
    if asked is not None:
        return Decision(asked, f"{VARIABLE}={os.environ[VARIABLE]}")
    return Decision(False, f"{VARIABLE} is not set and no configuration asks for hints")


def gh200_uvm_enabled() -> bool:
    """Are placement hints on? What each hint then achieves on this machine its own result says."""
    return decision().enabled
