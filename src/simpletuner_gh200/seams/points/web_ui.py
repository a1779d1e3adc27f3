"""The Web UI's pages: a field for every key of ours, and blocks again where the page validates, saves and starts."""

from __future__ import annotations

import html
import importlib
import os
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from simpletuner_gh200.config.blocks import parts_of
from simpletuner_gh200.config.form import field_problem, fields_of, form_problems, our_values
from simpletuner_gh200.config.part import DATASET_BLOCK, TRAINING_BLOCKS
from simpletuner_gh200.config.training import training_from
from simpletuner_gh200.seams.patch import Patch, put, wrap_method
from simpletuner_gh200.seams.points.field_registry import HIDDEN_TAB
from simpletuner_gh200.seams.runtime import Runtime
from simpletuner_gh200.seams.seam import Seam
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

_SERVICES = "simpletuner.simpletuner_sdk.server.services"


def _page(module: ModuleType, runtime: Runtime) -> Sequence[Patch]:
    """The server is about to show its pages: typed fields in place of the two blocks.

    Only here, since the terminal's wizard would write such a field into a configuration as it is.
    """
    registry = importlib.import_module(f"{_SERVICES}.field_registry.registry").field_registry
    types = importlib.import_module(f"{_SERVICES}.field_registry.types")
    service = importlib.import_module(f"{_SERVICES}.field_service")
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


def _field_values(module: ModuleType, runtime: Runtime) -> Sequence[Patch]:
    def with_ours(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        def call(tab_name: str, config_data: dict[str, Any], webui_defaults: dict[str, Any]) -> Any:
            if tab_name == TAB:
                config_data = {**config_data, **values_for_page(config_data)}
            return wrapped(tab_name, config_data, webui_defaults)

        return call(*args, **kwargs)

    return [wrap_method(module.FieldService, "prepare_tab_field_values", with_ours)]


def _bundle(module: ModuleType, runtime: Runtime) -> Sequence[Patch]:
    def folded_again(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        form = args[0] if args else kwargs["form_data"]
        typed, rest = split_form(form)
        replace = str(rest.get("__replace_active_config__", "")).lower() == "true"
        bundle = wrapped(rest)
        fold_into(bundle, typed, rest, replace=replace)
        return bundle

    return [wrap_method(module, "build_config_bundle", folded_again)]


def _validate(module: ModuleType, runtime: Runtime) -> Sequence[Patch]:
    def with_our_problems(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        result = wrapped(*args, **kwargs)
        complete = args[1] if len(args) > 1 else kwargs["complete_config"]
        parsed = {key.removeprefix("--"): value for key, value in complete.items()}
        training = training_from(parsed, our_values(complete), os.environ)
        result.errors.extend(_as_html(problem) for problem in training.problems)
        return result

    return [wrap_method(module, "validate_training_config", with_our_problems)]


def _validate_field(module: ModuleType, runtime: Runtime) -> Sequence[Patch]:
    def with_our_fields(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        def call(field_name: str, value: Any, **options: Any) -> Any:
            others, _rest = split_form(options.get("config") or {})
            problem = field_problem(field_name.removeprefix("--"), str(value), others)
            return (False, _as_html(problem)) if problem else wrapped(field_name, value, **options)

        return call(*args, **kwargs)

    return [wrap_method(module.ValidationService, "validate_field", with_our_fields)]


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


SEAMS = (
    Seam("web_ui.page", _page),
    Seam("web_ui.field_values", _field_values),
    Seam("web_ui.bundle", _bundle),
    Seam("web_ui.validate", _validate),
    Seam("web_ui.validate_field", _validate_field),
    Seam("web_ui.save", _save),
    Seam("web_ui.without_gpu", _without_gpu),
)
