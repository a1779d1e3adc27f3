"""The Web UI: a field for every key of ours, and blocks again where the page validates, saves and starts; in-memory
datasets among its cards; our routes and our panel, and a word at the server's start that we are on.
"""

from __future__ import annotations

import html
import importlib
import logging
import os
from collections.abc import Sequence
from importlib.metadata import version
from types import ModuleType
from typing import Any

from simpletuner_gh200.config.blocks import parts_of
from simpletuner_gh200.config.datasets import IN_MEMORY, Dataset
from simpletuner_gh200.config.form import field_problem, fields_of, form_problems, our_values
from simpletuner_gh200.config.part import DATASET_BLOCK, TRAINING_BLOCKS
from simpletuner_gh200.config.training import training_from
from simpletuner_gh200.seams.patch import Patch, put, wrap_method
from simpletuner_gh200.seams.points.configuration import HIDDEN_TAB
from simpletuner_gh200.seams.runtime import Runtime
from simpletuner_gh200.seams.seam import Seam, wrapping
from simpletuner_gh200.seams.web_ui.fields import (
    EDITED,
    TAB,
    fold_into,
    needs_by_name,
    registry_fields,
    section_layouts,
    split_form,
    values_for_page,
)
from simpletuner_gh200.seams.web_ui.panel import router
from simpletuner_gh200.upstream.check import check_installed
from simpletuner_gh200.upstream.features import FEATURES

logger = logging.getLogger("simpletuner_gh200")

_SERVER = "simpletuner.simpletuner_sdk.server"
LOCAL_CARD = "local-image"

PANEL = {
    "id": "gh200_panel",
    "title": "Grace Hopper",
    "icon": "fas fa-microchip",
    "description": "This machine, the plan of the open configuration, and the running job, by simpletuner-gh200.",
    "advanced": False,
    "template": "gh200/panel.html",
    "empty_message": None,
}


def _page(module: ModuleType, runtime: Runtime) -> Sequence[Patch]:
    """The server is about to show its pages: typed fields in place of the two blocks.

    Only here, since the terminal's wizard would write such a field into a configuration as it is.
    """
    registry = importlib.import_module(f"{_SERVER}.services.field_registry.registry").field_registry
    types = importlib.import_module(f"{_SERVER}.services.field_registry.types")
    service = importlib.import_module(f"{_SERVER}.services.field_service")
    layouts = service.FieldService._TAB_SECTION_LAYOUTS
    fields = registry_fields(types)
    followers: dict[str, list[str]] = {}
    for field in fields:
        for dependency in field.dependencies:
            followers.setdefault(dependency.field, []).append(field.name)
    return [
        *(put(registry._fields[block], "tab", HIDDEN_TAB) for block in TRAINING_BLOCKS),
        *(put(registry._fields, field.name, field) for field in fields),
        *(put(registry._dependencies_map, name, names) for name, names in followers.items()),
        put(layouts, TAB, (*layouts[TAB], *section_layouts(service.SectionLayout))),
        *_templates(module.templates.env),
    ]


def _templates(environment: Any) -> list[Patch]:
    # Only servers have pages: no other process shall pay for importing what makes them.
    from simpletuner_gh200.seams.web_ui.templates_of_ours import PageLoader

    (held,) = parts_of(DATASET_BLOCK)
    return [
        put(environment, "loader", PageLoader(environment.loader)),
        put(environment.globals, "gh200_dataset_fields", fields_of(held)),
        put(environment.globals, "gh200_needs", needs_by_name()),
        put(environment.globals, "gh200_edited", EDITED),
    ]


def _field_values(runtime: Runtime, wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    def call(tab_name: str, config_data: dict[str, Any], webui_defaults: dict[str, Any]) -> Any:
        if tab_name == TAB:
            config_data = {**config_data, **values_for_page(config_data)}
        return wrapped(tab_name, config_data, webui_defaults)

    return call(*args, **kwargs)


def _bundle(runtime: Runtime, wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    form = args[0] if args else kwargs["form_data"]
    typed, rest = split_form(form)
    replace = str(rest.get("__replace_active_config__", "")).lower() == "true"
    bundle = wrapped(rest)
    fold_into(bundle, typed, rest, replace=replace)
    return bundle


def _validate(runtime: Runtime, wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    result = wrapped(*args, **kwargs)
    complete = args[1] if len(args) > 1 else kwargs["complete_config"]
    parsed = {key.removeprefix("--"): value for key, value in complete.items()}
    training = training_from(parsed, our_values(complete), os.environ)
    result.errors.extend(_as_html(problem) for problem in training.problems)
    return result


def _validate_field(runtime: Runtime, wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    def call(field_name: str, value: Any, **options: Any) -> Any:
        others, _rest = split_form(options.get("config") or {})
        problem = field_problem(field_name.removeprefix("--"), str(value), others)
        return (False, _as_html(problem)) if problem else wrapped(field_name, value, **options)

    return call(*args, **kwargs)


def _save(module: ModuleType, runtime: Runtime) -> Sequence[Patch]:
    """The route answers 200 whatever happens, and the page then says "saved": so what no field may hold is refused
    before it, with an answer that the page takes for a failure."""
    from fastapi.responses import PlainTextResponse

    async def unless_refused(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        request = args[0] if args else kwargs["request"]
        bundle = module.training_service.build_config_bundle(await request.form())
        problems = form_problems(our_values(bundle.save_config))
        if problems:
            return PlainTextResponse("\n".join(map(_as_html, problems)), status_code=422)
        return await wrapped(*args, **kwargs)

    (route,) = [route for route in module.router.routes if getattr(route, "endpoint", None) is module.save_config]
    return [
        wrap_method(module, "save_config", unless_refused),
        Patch(route, "endpoint", lambda _original: module.save_config),
    ]


def _without_gpu(module: ModuleType, runtime: Runtime) -> Sequence[Patch]:
    """SimpleTuner's queue hands out GPUs, and a machine that has none would keep a job waiting for ever: there, a job
    needs none of them. Its other limits, on jobs at once and of an organisation, hold as they are."""

    async def or_the_cpu(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        def call(required_count: int, *rest: Any, **options: Any) -> Any:
            has_any = module.detect_gpu_inventory()["devices"]
            return wrapped(required_count if has_any else 0, *rest, **options)

        return await call(*args, **kwargs)

    return [wrap_method(module.LocalGPUAllocator, "can_allocate", or_the_cpu)]


def _as_html(problem: object) -> str:
    """The page puts it in as markup, and it quotes what somebody typed."""
    return html.escape(str(problem), quote=False)


# -- datasets


def _card(module: ModuleType, runtime: Runtime) -> Sequence[Patch]:
    cards = list(module._BLUEPRINTS)
    (place,) = [number for number, card in enumerate(cards) if card.id == LOCAL_CARD]
    return [put(module, "_BLUEPRINTS", [*cards[: place + 1], _in_memory(module, cards[place]), *cards[place + 1 :]])]


def _in_memory(module: ModuleType, local: Any) -> Any:
    """The local card with another type: what makes a local dataset makes one that is held in memory."""
    card = local.model_copy(deep=True)
    card.id, card.backendType = "in-memory-image", IN_MEMORY
    card.label = "in memory"
    card.description = "a folder that a run reads into memory once per node, shared by its ranks (simpletuner-gh200)"
    card.defaults = {**card.defaults, "type": IN_MEMORY}
    for field in card.fields:
        if field.id == "type":
            field.defaultValue = IN_MEMORY
            field.options = [*(field.options or ()), module.DatasetFieldOption(value=IN_MEMORY, label="in memory")]
    return card


def _validations(module: ModuleType, runtime: Runtime) -> Sequence[Patch]:
    def with_our_problems(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        entries = args[0] if args else kwargs["datasets"]
        found = wrapped(*args, **kwargs)
        datasets = [Dataset(entry) for entry in entries if isinstance(entry, dict)]
        found += [
            module.ValidationMessage(field=f"{dataset.id}.{IN_MEMORY}", message=str(problem), level="error")
            for dataset in datasets
            if dataset.enabled
            for problem in dataset.problems()
        ]
        return found

    return [wrap_method(module, "compute_validations", with_our_problems)]


# -- the server


def _hardware_tab(runtime: Runtime, wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    context = wrapped(*args, **kwargs)
    sections = context.get("sections") or []
    place = next((n for n, section in enumerate(sections) if section["id"].startswith("gh200_")), len(sections))
    context["sections"] = [*sections[:place], PANEL, *sections[place:]]
    return context


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
    environment = importlib.import_module(f"{_SERVER}.routes.web").templates.env
    changed = getattr(environment.loader, "changed", None)
    for template in changed(environment) if changed else ():
        logger.warning("gh200: %s is not the page we know: in-memory datasets have no fields there", template)


SEAMS = (
    Seam("web_ui.page", _page),
    wrapping("web_ui.field_values", _field_values),
    wrapping("web_ui.bundle", _bundle),
    wrapping("web_ui.validate", _validate),
    wrapping("web_ui.validate_field", _validate_field),
    Seam("web_ui.save", _save),
    Seam("web_ui.without_gpu", _without_gpu),
    Seam("web_ui_datasets.cards", _card),
    Seam("web_ui_datasets.validations", _validations),
    wrapping("web_ui_panel.hardware_tab", _hardware_tab),
    Seam("web_ui_panel.server", _server),
)
