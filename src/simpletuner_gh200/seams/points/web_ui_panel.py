"""The server itself: it says at its start that we are on, has our routes, and shows our panel on the hardware page."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Sequence
from importlib.metadata import version
from types import ModuleType
from typing import Any

from simpletuner_gh200.seams.patch import Patch, wrap_method
from simpletuner_gh200.seams.runtime import Runtime
from simpletuner_gh200.seams.seam import Seam
from simpletuner_gh200.seams.web_ui.routes import router
from simpletuner_gh200.upstream.check import check_installed
from simpletuner_gh200.upstream.features import FEATURES

logger = logging.getLogger("simpletuner_gh200")

WEB = "simpletuner.simpletuner_sdk.server.routes.web"

PANEL = {
    "id": "gh200_panel",
    "title": "Grace Hopper",
    "icon": "fas fa-microchip",
    "description": "This machine, the plan of the open configuration, and the running job, by simpletuner-gh200.",
    "advanced": False,
    "template": "gh200/panel.html",
    "empty_message": None,
}


def _hardware_tab(module: ModuleType, runtime: Runtime) -> Sequence[Patch]:
    def with_panel(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        context = wrapped(*args, **kwargs)
        sections = context.get("sections") or []
        place = next((n for n, section in enumerate(sections) if section["id"].startswith("gh200_")), len(sections))
        context["sections"] = [*sections[:place], PANEL, *sections[place:]]
        return context

    return [wrap_method(module.TabService, "_hardware_tab_context", with_panel)]


def _server(module: ModuleType, runtime: Runtime) -> Sequence[Patch]:
    def with_ours(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        app = wrapped(*args, **kwargs)
        mode = args[0] if args else kwargs.get("mode")
        if getattr(mode, "value", None) != "callback":  # which has no pages
            app.include_router(router())
            _say_so(runtime)
        return app

    # Releases up to 3.x have made this module before we are asked, and the command takes the name from the package.
    package = importlib.import_module(str(module.__package__))
    named_there = getattr(package, "create_app", None) is module.create_app
    return [wrap_method(owner, "create_app", with_ours) for owner in ((package, module) if named_there else (module,))]


def _say_so(runtime: Runtime) -> None:
    """One line that names what is on, and one for each thing that is not."""
    features = check_installed().features
    on = [FEATURES[name].title for name, status in features.items() if status.on and name not in ("core", "config")]
    logger.info("gh200: simpletuner-gh200 %s is on in this server: %s", version("simpletuner-gh200"), ", ".join(on))
    for name, status in features.items():
        if not status.on:
            logger.warning("gh200: %s: %s", FEATURES[name].title, status)
    for name, seam in runtime.seams.items():
        if name.startswith("web_ui") and not seam.ok and not seam.spec.optional:
            logger.warning("gh200: %s is %s", name, seam.status)
    environment = importlib.import_module(WEB).templates.env
    changed = getattr(environment.loader, "changed", None)
    for template in changed(environment) if changed else ():
        logger.warning("gh200: %s is not the page we know: in-memory datasets have no fields there", template)


SEAMS = (
    Seam("web_ui_panel.hardware_tab", _hardware_tab),
    Seam("web_ui_panel.server", _server),
)
