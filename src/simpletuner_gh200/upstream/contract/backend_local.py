"""The local backend, which ours extends."""

from __future__ import annotations

import ast

from simpletuner_gh200.upstream import facts, syntax
from simpletuner_gh200.upstream.spec import Fact, SeamSpec

METHODS: dict[str, tuple[str, ...]] = {
    "read": ("self", "filepath", "as_byteIO"),
    "write": ("self", "filepath", "data"),
    "delete": ("self", "filepath"),
    "exists": ("self", "filepath"),
    "open_file": ("self", "filepath", "mode"),
    "list_files": ("self", "file_extensions", "instance_data_dir"),
    "get_abs_path": ("self", "sample_path"),
    "read_image": ("self", "filepath", "delete_problematic_images"),
    "read_image_batch": ("self", "filepaths", "delete_problematic_images"),
    "create_directory": ("self", "directory_path"),
    "torch_load": ("self", "filename"),
    "torch_save": ("self", "data", "original_location"),
    "write_batch": ("self", "filepaths", "data_list"),
    "get_instance_representation": ("self",),
    "from_instance_representation": ("representation",),
}
"""The fifteen methods of a backend, as the local one spells their parameters."""


def _says_local(scope: ast.AST) -> str | None:
    types = [syntax.string_keys(node).get("backend_type") for node in ast.walk(scope)]
    if any(isinstance(node, ast.Constant) and node.value == "local" for node in types):
        return None
    return "an instance representation whose backend_type is not local"


SPEC = SeamSpec(
    name="backend.local",
    module="simpletuner.helpers.data_backend.local",
    qualname="LocalDataBackend",
    parameters=None,
    features=("store", "caches"),
    reason="our backend is a subclass of it, and the caches wrap its methods on the instance",
    facts=(
        Fact("the fifteen methods", "each is served or passed on", facts.methods("LocalDataBackend", METHODS)),
        Fact(
            "made with accelerator, id and compression",
            "our subclass is made the same way",
            facts.signature("LocalDataBackend.__init__", ("self", "accelerator", "id", "compress_cache")),
            features=("store",),
        ),
        Fact(
            "its type is local",
            "upstream compares this string in dozens of places",
            facts.assigns_constant("LocalDataBackend.__init__", "self.type", "local"),
            features=("store",),
        ),
        Fact(
            "children are told local",
            "a child process falls back to the files on disk",
            facts.inside("LocalDataBackend.get_instance_representation", _says_local),
            features=("store",),
        ),
    ),
)
