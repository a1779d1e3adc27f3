"""The Web UI's server: where it is made, and where the hardware page gets its sections."""

from __future__ import annotations

from simpletuner_gh200.upstream import facts
from simpletuner_gh200.upstream.contract.web_ui import FEATURE, SERVER
from simpletuner_gh200.upstream.spec import Fact, SeamSpec

HARDWARE_TAB = SeamSpec(
    name="web_ui_panel.hardware_tab",
    module=f"{SERVER}.services.tab_service",
    qualname="TabService._hardware_tab_context",
    parameters=("self", "context", "fields", "config_values"),
    features=FEATURE,
    reason="our panel is one more section of the hardware page",
    facts=(
        Fact(
            "asked through self",
            "a method replaced on the class is the one that runs",
            facts.looked_up_on_self("TabService._hardware_tab_context"),
        ),
        Fact(
            "sections in the context",
            "ours is put among them",
            facts.contains("TabService._hardware_tab_context", "context['sections'] = filtered_sections"),
        ),
    ),
)


SERVER_APP = SeamSpec(
    name="web_ui_panel.server",
    module=f"{SERVER}.app",
    qualname="create_app",
    parameters=None,
    features=FEATURE,
    reason="our routes are added to the server, and it says at its start that we are on",
    facts=(
        Fact(
            "an application is returned",
            "routes are added to it",
            facts.contains("create_app", "return app"),
        ),
    ),
)


SPECS = (
    HARDWARE_TAB,
    SERVER_APP,
)
