"""Build hook: what the package index shows. The repository's address is one setting, `repository` in pyproject.toml.

The README links to files beside it, which works in a checkout only. On the package index the same links lead to the
repository at the released version, or are plain text as long as no address is set.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = re.compile(r"(?P<image>!?)\[(?P<text>[^\]]*)\]\((?P<target>[^)\s]+)\)")
ELSEWHERE = re.compile(r"[a-z][a-z0-9+.-]*:|#")


class IndexPage(MetadataHookInterface):
    PLUGIN_NAME = "custom"

    def update(self, metadata: dict[str, Any]) -> None:
        repository = self.config.get("repository", "").rstrip("/")
        root = Path(self.root)
        readme = (root / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {
            "content-type": "text/markdown",
            "text": with_absolute_links(readme, repository, metadata["version"]),
        }
        metadata["urls"] = project_urls(repository)


def with_absolute_links(markdown: str, repository: str, version: str) -> str:
    def absolute(match: re.Match[str]) -> str:
        image, text, target = match["image"], match["text"], match["target"]
        if ELSEWHERE.match(target):
            return match[0]
        if not repository:
            return text
        place = "raw" if image else "blob"
        return f"{image}[{text}]({repository}/{place}/v{version}/{target})"

    return LINK.sub(absolute, markdown)


def project_urls(repository: str) -> dict[str, str]:
    if not repository:
        return {}
    return {
        "Homepage": repository,
        "Changelog": f"{repository}/blob/main/CHANGELOG.md",
        "Issues": f"{repository}/issues",
    }
