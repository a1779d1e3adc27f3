"""The Web UI's dataset pages: the cards of its wizard, and how it judges a list of datasets."""

from __future__ import annotations

import ast

from simpletuner_gh200.upstream import facts, syntax
from simpletuner_gh200.upstream.contract.web_ui import FEATURE, SERVER, declares
from simpletuner_gh200.upstream.spec import Fact, SeamSpec

CARD = ("id", "backendType", "label", "description", "defaults", "fields")


def _local_card(module: ast.Module) -> str | None:
    ids = [syntax.string_keys(node).get("id") for node in ast.walk(module)]
    named = [node.value for node in ids if isinstance(node, ast.Constant)]
    return None if named.count("local-image") == 1 else f"{named.count('local-image')} cards with the id local-image"


CARDS = SeamSpec(
    name="web_ui_datasets.cards",
    module=f"{SERVER}.data.dataset_blueprints",
    qualname="_BLUEPRINTS",
    parameters=None,
    features=FEATURE,
    reason="a card for in-memory datasets, made from that of local ones, stands beside it",
    facts=(
        Fact("parts of a card", "ours differs in these", declares("BackendBlueprint", CARD)),
        Fact("a card of local files", "ours is made from it", _local_card),
        Fact(
            "read from the list",
            "a list with one more is the one that is shown",
            facts.mentions("get_dataset_blueprints", "_BLUEPRINTS"),
        ),
    ),
)


VALIDATIONS = SeamSpec(
    name="web_ui_datasets.validations",
    module=f"{SERVER}.services.dataset_plan",
    qualname="compute_validations",
    parameters=None,
    features=FEATURE,
    reason="an entry that a run would refuse is refused when the list is saved",
    facts=(
        Fact(
            "messages with a level",
            "ours are errors",
            declares("ValidationMessage", ("field", "message", "level")),
        ),
        Fact(
            "a list of messages",
            "ours are added to it",
            facts.contains("compute_validations", "return validations"),
        ),
    ),
)


SPECS = (
    CARDS,
    VALIDATIONS,
)
