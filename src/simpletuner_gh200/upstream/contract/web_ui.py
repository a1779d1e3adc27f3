"""The Web UI's pages: where fields are laid out and filled, and where a page is validated, saved and started."""

from __future__ import annotations

import ast
from collections.abc import Iterable

from simpletuner_gh200.upstream import facts, syntax
from simpletuner_gh200.upstream.spec import Fact, SeamSpec

SERVER = "simpletuner.simpletuner_sdk.server"
FEATURE = ("web_ui",)


def declares(qualname: str, names: Iterable[str]) -> facts.Predicate:
    """The class declares each of these, with a type."""

    def check(scope: ast.AST) -> str | None:
        found = {syntax.dotted(node.target) for node in ast.walk(scope) if isinstance(node, ast.AnnAssign)}
        missing = [name for name in names if name not in found]
        return f"{qualname} without {', '.join(missing)}" if missing else None

    return facts.inside(qualname, check)


PAGE = SeamSpec(
    name="web_ui.page",
    module=f"{SERVER}.routes.web",
    qualname="templates",
    parameters=None,
    features=FEATURE,
    reason="once the pages are about to be shown, our fields are registered; our templates are found beside its own",
)


LAYOUTS = SeamSpec(
    name="web_ui.layouts",
    module=f"{SERVER}.services.field_service",
    qualname="SectionLayout",
    parameters=None,
    features=FEATURE,
    reason="our sections get their titles as upstream's do",
    facts=(
        Fact(
            "layout names",
            "we give these by keyword",
            declares("SectionLayout", ("id", "title", "icon", "match_sections", "subsection_override", "order")),
        ),
        Fact(
            "a hardware tab",
            "our sections stand behind its own",
            facts.dict_display("_TAB_SECTION_LAYOUTS", ("hardware",), within="FieldService"),
        ),
    ),
)


FIELD_VALUES = SeamSpec(
    name="web_ui.field_values",
    module=f"{SERVER}.services.field_service",
    qualname="FieldService.prepare_tab_field_values",
    parameters=("self", "tab_name", "config_data", "webui_defaults"),
    features=FEATURE,
    reason="blocks of an opened configuration are shown in the fields",
    facts=(
        Fact(
            "values by field name",
            "what we put beside the configuration is what a field shows",
            facts.contains("FieldService.prepare_tab_field_values", "config_data[key]"),
        ),
    ),
)


BUNDLE = SeamSpec(
    name="web_ui.bundle",
    module=f"{SERVER}.services.training_service",
    qualname="build_config_bundle",
    parameters=("form_data",),
    features=FEATURE,
    reason="what was typed into our fields becomes blocks, in what is saved and in what is started",
    facts=(
        Fact(
            "parts of a bundle",
            "we put the blocks there",
            declares(
                "TrainingConfigBundle", ("store", "active_config", "complete_config", "config_dict", "save_config")
            ),
        ),
    ),
)


VALIDATE = SeamSpec(
    name="web_ui.validate",
    module=f"{SERVER}.services.training_service",
    qualname="validate_training_config",
    parameters=("store", "complete_config", "config_dict", "strict_epoch_exclusivity"),
    features=FEATURE,
    reason="Validate and Start refuse what a run would refuse",
    facts=(Fact("a list of errors", "ours are added to it", declares("TrainingValidationResult", ("errors",))),),
)


VALIDATE_FIELD = SeamSpec(
    name="web_ui.validate_field",
    module=f"{SERVER}.services.validation_service",
    qualname="ValidationService.validate_field",
    parameters=("self", "field_name", "value", "config", "validate_paths"),
    features=FEATURE,
    reason="a field that holds what it may not says so as it is left",
    facts=(
        Fact(
            "asked for the page",
            "what we answer is what the page shows",
            facts.looked_up_on_self("ValidationService.validate_field"),
        ),
    ),
)


SAVE = SeamSpec(
    name="web_ui.save",
    module=f"{SERVER}.routes.training",
    qualname="save_config",
    parameters=None,
    features=FEATURE,
    reason="a refused save has to look refused: the page believes the status, and upstream's is always 200",
    facts=(
        Fact(
            "the form through the bundle",
            "what we check is what would be written",
            facts.calls("save_config", "training_service.build_config_bundle", times=1, arguments=1),
        ),
    ),
)


WITHOUT_GPU = SeamSpec(
    name="web_ui.without_gpu",
    module=f"{SERVER}.services.local_gpu_allocator",
    qualname="LocalGPUAllocator.can_allocate",
    parameters=("self", "required_count", "preferred_gpus", "any_gpu", "org_id", "for_approval"),
    features=FEATURE,
    reason="on a machine without a GPU a job waits in the queue for one that never comes; it can be tried there too",
    facts=(
        Fact(
            "counts the GPUs it needs",
            "a job that needs none is let through, whatever else there is to say against it",
            facts.contains("LocalGPUAllocator.can_allocate", "len(available) < required_count"),
        ),
        Fact(
            "the machine's own GPUs",
            "whether there is any is asked where upstream asks",
            facts.calls("LocalGPUAllocator.can_allocate", "detect_gpu_inventory", times=1, arguments=0),
        ),
    ),
    optional=True,
)


SPECS = (
    PAGE,
    LAYOUTS,
    FIELD_VALUES,
    BUNDLE,
    VALIDATE,
    VALIDATE_FIELD,
    SAVE,
    WITHOUT_GPU,
)
