"""Datasets: the list, the builders, the backends that read files, and how samples are dealt to ranks."""

from __future__ import annotations

import ast

from simpletuner_gh200.upstream import facts, syntax
from simpletuner_gh200.upstream.spec import Fact, SeamSpec

DATASETS_LOAD_CONFIGURATION = SeamSpec(
    name="datasets.load_configuration",
    module="simpletuner.helpers.data_backend.factory",
    qualname="FactoryRegistry.load_configuration",
    parameters=("self",),
    features=("store",),
    reason='entries of type "in_memory" are noted and rewritten to "local" right after the list was read',
    facts=(
        Fact(
            "returns the list",
            "what we return is what the factory goes on with",
            facts.all_of(
                facts.contains("FactoryRegistry.load_configuration", "return data_backend_config"),
                facts.mentions("FactoryRegistry", "self.load_configuration"),
            ),
        ),
        Fact(
            "an unknown type passes validation",
            '"in_memory" is still in the list while upstream validates it',
            facts.tolerated("FactoryRegistry.load_configuration", "self._validate_with_config_registry"),
        ),
    ),
)


DATASETS_BUILDER_BUILD = SeamSpec(
    name="datasets.builder_build",
    module="simpletuner.helpers.data_backend.builders.base",
    qualname="BaseBackendBuilder.build",
    parameters=("self", "config"),
    features=("store",),
    reason="every local dataset passes through _create_backend",
    facts=(
        Fact(
            "asks the subclass",
            "the method we wrap is the one that is called",
            facts.calls("BaseBackendBuilder.build", "self._create_backend", times=1, arguments=1),
        ),
    ),
)


DATASETS_LOCAL_BUILDER = SeamSpec(
    name="datasets.local_builder",
    module="simpletuner.helpers.data_backend.builders.local",
    qualname="LocalBackendBuilder._create_backend",
    parameters=("self", "config"),
    features=("store",),
    reason="for an id of ours our subclass of LocalDataBackend is returned instead",
    facts=(
        Fact(
            "the id comes with the configuration",
            "ours are known by id, because the configuration class drops unknown keys",
            facts.mentions("LocalBackendBuilder._create_backend", "config.id"),
        ),
        Fact(
            "compression by one helper",
            "our backend is made with the same compression setting",
            facts.calls("LocalBackendBuilder._create_backend", "self._get_compression_setting", arguments=1),
        ),
    ),
)


ENTRIES = ("vaecache", "text_embed_cache", "conditioning_image_embed_cache", "distillation_cache")


def _set_by_name(scope: ast.AST) -> str | None:
    targets = (target for node in syntax.nodes(scope) if isinstance(node, ast.Assign) for target in node.targets)
    keys = {target.slice.value for target in targets if _is_text_key(target)}  # type: ignore[attr-defined]
    missing = [name for name in ENTRIES if name not in keys]
    return f"no dataset gets {', '.join(missing)}" if missing else None


def _is_text_key(target: ast.AST) -> bool:
    return isinstance(target, ast.Subscript) and isinstance(target.slice, ast.Constant)


DATASETS_CACHES = SeamSpec(
    name="datasets.caches",
    module="simpletuner.helpers.data_backend.factory",
    qualname="FactoryRegistry",
    parameters=None,
    features=("caches",),
    reason="the caches to be served are found in the datasets' entries",
    facts=(
        Fact(
            "entries by these names",
            "a cache under another name would not be served",
            facts.inside("FactoryRegistry", _set_by_name),
        ),
    ),
)


DATASETS_MEMORY_USAGE = SeamSpec(
    name="datasets.memory_usage",
    module="simpletuner.helpers.data_backend.factory",
    qualname="FactoryRegistry._get_memory_usage",
    parameters=("self",),
    features=("store", "caches"),
    reason="the factory traces every allocation of Python from here to the end of the run, for two numbers in a log",
    optional=True,
)


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


BACKEND_LOCAL = SeamSpec(
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


def _abstract_methods(scope: ast.AST) -> str | None:
    found = {
        node.name
        for node in ast.walk(scope)
        if isinstance(node, syntax.Function) and any(syntax.dotted(d) == "abstractmethod" for d in node.decorator_list)
    }
    missing = sorted(set(METHODS) - found)
    return f"BaseDataBackend without abstract {', '.join(missing)}" if missing else None


BACKEND_BASE = SeamSpec(
    name="backend.base",
    module="simpletuner.helpers.data_backend.base",
    qualname="BaseDataBackend",
    parameters=None,
    features=("caches",),
    reason="the caches are attached to whatever backend stands behind them",
    facts=(
        Fact(
            "the fifteen are abstract",
            "so that every backend has them",
            facts.inside("BaseDataBackend", _abstract_methods),
        ),
    ),
)


def _ours_is_free(scope: ast.AST) -> str | None:
    taken = [node for node in ast.walk(scope) if "in_memory" in syntax.string_keys(node)]
    return "a builder of its own for in_memory" if taken else None


BACKEND_BUILDER_MAP = SeamSpec(
    name="backend.builder_map",
    module="simpletuner.helpers.data_backend.builders",
    qualname="create_backend_builder",
    parameters=("backend_type", "accelerator", "args"),
    features=("store",),
    reason="the Web UI's dataset scan asks for builders by type, and gets the local one for ours",
    facts=(
        Fact(
            "a literal map with local in it",
            "our type is served by the local builder",
            facts.dict_display("builder_mapping", ("local",), within="create_backend_builder"),
        ),
        Fact(
            "in_memory is not upstream's",
            "the name means our store",
            facts.inside("create_backend_builder", _ours_is_free),
        ),
    ),
)


METADATA_SCAN = SeamSpec(
    name="metadata.scan",
    module="simpletuner.helpers.metadata.backends.base",
    qualname="MetadataBackend.compute_aspect_ratio_bucket_indices",
    parameters=None,
    features=("store", "caches"),
    reason="its threads answer through queues of processes, and what those have not handed over at the end is lost",
    optional=True,
)


METADATA_SPLIT_BUCKETS = SeamSpec(
    name="metadata.split_buckets",
    module="simpletuner.helpers.metadata.backends.base",
    qualname="MetadataBackend.split_buckets_between_processes",
    parameters=("self", "gradient_accumulation_steps", "apply_padding"),
    features=("store",),
    reason='each rank\'s own files are known then, which "per_node": "shard" stages; wrapped only where asked for',
    optional=True,
)


SPECS = (
    DATASETS_LOAD_CONFIGURATION,
    DATASETS_BUILDER_BUILD,
    DATASETS_LOCAL_BUILDER,
    DATASETS_CACHES,
    DATASETS_MEMORY_USAGE,
    BACKEND_LOCAL,
    BACKEND_BASE,
    BACKEND_BUILDER_MAP,
    METADATA_SCAN,
    METADATA_SPLIT_BUCKETS,
)
