"""Our templates beside SimpleTuner's, and the few lines of its own that have to know an in-memory dataset.

Its dataset pages name ``local`` in their markup and scripts. They are edited as they are loaded, nothing on disk is;
a page whose text has changed so that an edit finds no place is left as upstream wrote it, and said at the start.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import BaseLoader, Environment, FileSystemLoader

FOLDER = Path(__file__).parent / "templates"
OURS = "gh200/"

Source = tuple[str, str | None, Callable[[], bool] | None]


@dataclass(frozen=True)
class Edit:
    """``pattern`` -> ``replacement`` in a template."""

    pattern: str
    replacement: str
    most: int = 0
    """How often at most; 0: wherever it stands."""
    optional: bool = False
    """Older pages do not have it, and do without."""

    def apply(self, text: str) -> str | None:
        edited, count = re.subn(self.pattern, self.replacement, text, count=self.most)
        return edited if count or self.optional else None


HELD = "['local', 'in_memory']"
LIKE_LOCAL = (
    Edit(r"\b(\w+)\.type === 'local'", rf"{HELD}.includes(\1.type)"),
    Edit(r"<option value=\"local\">Local filesystem</option>", r'\g<0><option value="in_memory">In memory</option>'),
    Edit(
        r'@change="(onStorageBackendChange\((\w+)\))"',
        r"""@change="if (\2.type !== 'in_memory') delete \2.in_memory; \1" """,
    ),
)


def _fields_before(place: str, entry: str) -> Edit:
    include = "{% with entry = '" + entry + "' %}{% include 'gh200/dataset_fields.html' %}{% endwith %}"
    return Edit(place, include + r"\n\g<0>", most=1)


JSON_VIEW = (
    Edit(r"\{% block extra_js %\}", r"\g<0>{% include 'gh200/page.html' %}", most=1, optional=True),
    Edit(
        r"(const normalized = this\.normalizeConfigInput\(parsed\);)(\s+this\.activeEnvironmentConfig = normalized;)",
        r"\1 this.configJsonError = await window.gh200BlocksEdited?.(normalized) || '';"
        r" if (this.configJsonError) return;\2",
        optional=True,
    ),
    Edit(
        r"this\.seedFormValueStoreFromConfig\(normalized\);",
        r"window.gh200BlocksRemembered?.(this.formValueStore); \g<0>",
        optional=True,
    ),
)
"""Where the page lets the whole configuration be edited as text."""


EDITS: Mapping[str, tuple[Edit, ...]] = {
    "trainer_htmx.html": (
        Edit(r"cleaned\.type !== 'local'", f"!{HELD}.includes(cleaned.type)"),
        Edit(r"\(type === 'local' &&", f"({HELD}.includes(type) &&", optional=True),
        *JSON_VIEW,
        # Values that the page puts back into fields by itself cause no event: which of ours are shown depends on them.
        Edit(
            r"\bapplyStoredValues\(\) \{",
            r"\g<0> setTimeout(() => window.dispatchEvent(new CustomEvent('gh200-values-applied')));",
            optional=True,
        ),
    ),
    "components/dataloader/sections/storage_body.html": (
        *LIKE_LOCAL,
        Edit(r"\b(\w+)\.type !== 'local'", rf"!{HELD}.includes(\1.type)"),
        _fields_before("<!-- AWS", "editingDataset"),
    ),
    "components/dataloader/sections/storage.html": (
        *LIKE_LOCAL,
        _fields_before(r"<div class=\"dataset-subgroup mt-3\"", "dataset"),
    ),
    "partials/dataset_wizard_modal.html": (
        Edit(
            r"'fa-folder': blueprint\.backendType === 'local',",
            r"\g<0> 'fa-memory': blueprint.backendType === 'in_memory',",
        ),
        Edit(r"selectedBackend === 'local'", f"{HELD}.includes(selectedBackend)"),
        _fields_before("<!-- VAE Cache Directory", "currentDataset"),
    ),
}
"""By template; all of one template's edits are made, or none."""


def edited(name: str, text: str) -> str | None:
    """The template with our edits; None where it is not the one we know."""
    current: str | None = text
    for edit in EDITS[name]:
        current = edit.apply(current) if current is not None else None
    return current


class PageLoader(BaseLoader):
    """Upstream's loader, with our templates and edits."""

    def __init__(self, upstream: Any) -> None:
        self.upstream = upstream
        self._own = FileSystemLoader(FOLDER)

    def get_source(self, environment: Environment, template: str) -> Source:
        if template.startswith(OURS):
            return self._own.get_source(environment, template)
        text, place, fresh = self.upstream.get_source(environment, template)
        return (edited(template, text) or text if template in EDITS else text), place, fresh

    def list_templates(self) -> list[str]:
        return sorted({*self.upstream.list_templates(), *self._own.list_templates()})

    def changed(self, environment: Environment) -> list[str]:
        """The templates that are not those we know how to edit. No release has all of them."""
        known = [name for name in self.upstream.list_templates() if name in EDITS]
        return [name for name in known if edited(name, self.upstream.get_source(environment, name)[0]) is None]
