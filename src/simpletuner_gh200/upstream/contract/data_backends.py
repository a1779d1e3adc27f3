"""Datasets: the list, the builders, the backends that read files, how samples are dealt to ranks, and other media."""

from __future__ import annotations

import ast

from simpletuner_gh200.upstream import syntax
from simpletuner_gh200.upstream.facts import (
    assigns_constant,
    calls,
    contains,
    dict_display,
    dict_entry,
    exists,
    mentions,
    methods,
    missing_from,
    tolerated,
)
from simpletuner_gh200.upstream.spec import fact, parse_signature, seam

BACKENDS = "simpletuner.helpers.data_backend"
METADATA = "simpletuner.helpers.metadata.backends.base"

METHODS = (
    "read(self, filepath, as_byteIO)",
    "write(self, filepath, data)",
    "delete(self, filepath)",
    "exists(self, filepath)",
    "open_file(self, filepath, mode)",
    "list_files(self, file_extensions, instance_data_dir)",
    "get_abs_path(self, sample_path)",
    "read_image(self, filepath, delete_problematic_images)",
    "read_image_batch(self, filepaths, delete_problematic_images)",
    "create_directory(self, directory_path)",
    "torch_load(self, filename)",
    "torch_save(self, data, original_location)",
    "write_batch(self, filepaths, data_list)",
    "get_instance_representation(self)",
    "from_instance_representation(representation)",
)
"""The fifteen methods of a backend, as the local one spells their parameters."""

ENTRIES = ("vaecache", "text_embed_cache", "conditioning_image_embed_cache", "distillation_cache")


def _set_by_name(scope: ast.AST) -> str | None:
    targets = (target for node in syntax.nodes(scope) if isinstance(node, ast.Assign) for target in node.targets)
    slices = [target.slice for target in targets if isinstance(target, ast.Subscript)]
    return missing_from(ENTRIES, {key.value for key in slices if isinstance(key, ast.Constant)})


def _abstract_methods(scope: ast.AST) -> str | None:
    functions = [node for node in syntax.nodes(scope) if isinstance(node, syntax.Function)]
    abstract = {node.name for node in functions if "abstractmethod" in map(syntax.dotted, node.decorator_list)}
    return missing_from([parse_signature(text)[0] for text in METHODS], abstract)


def _ours_is_free(scope: ast.AST) -> str | None:
    taken = any("in_memory" in syntax.string_keys(node) for node in syntax.nodes(scope))
    return "a builder of its own for in_memory" if taken else None


SPECS = (
    seam(
        "datasets.load_configuration",
        f"{BACKENDS}.factory:FactoryRegistry.load_configuration(self)",
        'store: entries of type "in_memory" are noted and rewritten to "local" right after the list was read',
        # What we return is what the factory goes on with.
        fact("returns the list", contains("return data_backend_config")),
        fact("called on self", mentions("self.load_configuration"), "FactoryRegistry"),
        # "in_memory" is still in the list while upstream validates it.
        fact("an unknown type passes validation", tolerated("self._validate_with_config_registry")),
    ),
    seam(
        "datasets.builder_build",
        f"{BACKENDS}.builders.base:BaseBackendBuilder.build(self, config)",
        "store: every local dataset passes through _create_backend",
        fact("asks the subclass", calls("self._create_backend", times=1, arguments=1)),
    ),
    seam(
        "datasets.local_builder",
        f"{BACKENDS}.builders.local:LocalBackendBuilder._create_backend(self, config)",
        "store: for an id of ours our subclass of LocalDataBackend is returned instead",
        # Ours are known by id, because the configuration class drops unknown keys.
        fact("the id comes with the configuration", mentions("config.id")),
        fact("compression by one helper", calls("self._get_compression_setting", arguments=1)),
    ),
    seam(
        "datasets.caches",
        f"{BACKENDS}.factory:FactoryRegistry",
        "caches: the caches to be served are found in the datasets' entries",
        # A cache under another name would not be served.
        fact("entries by these names", _set_by_name),
    ),
    seam(
        "datasets.memory_usage",
        f"{BACKENDS}.factory:FactoryRegistry._get_memory_usage(self)",
        "store, caches: it traces every allocation of Python from here to the run's end, for two numbers in a log",
        optional=True,
    ),
    seam(
        "backend.local",
        f"{BACKENDS}.local:LocalDataBackend",
        "store, caches: our backend is a subclass of it, and the caches wrap its methods on the instance",
        fact("the fifteen methods", methods(*METHODS)),
        # Our subclass is made the same way.
        fact("store: made of these", methods("__init__(self, accelerator, id, compress_cache)")),
        # Upstream compares this string in dozens of places.
        fact("store: its type is local", assigns_constant("self.type", "local"), "LocalDataBackend.__init__"),
        # A child process falls back to the files on disk.
        fact(
            "store: children are told local",
            dict_entry("backend_type", "local"),
            "LocalDataBackend.get_instance_representation",
        ),
    ),
    seam(
        "backend.base",
        f"{BACKENDS}.base:BaseDataBackend",
        "caches: the caches are attached to whatever backend stands behind them",
        fact("the fifteen are abstract", _abstract_methods),
    ),
    seam(
        "backend.builder_map",
        f"{BACKENDS}.builders:create_backend_builder(backend_type, accelerator, args)",
        "store: the Web UI's dataset scan asks for builders by type, and gets the local one for ours",
        fact("a literal map with local in it", dict_display("local", name="builder_mapping")),
        fact("in_memory is not upstream's", _ours_is_free),
    ),
    seam(
        "metadata.scan",
        f"{METADATA}:MetadataBackend.compute_aspect_ratio_bucket_indices",
        "store, caches: its threads answer through queues of processes, and what those still hold at the end is lost",
        optional=True,
    ),
    seam(
        "metadata.split_buckets",
        f"{METADATA}:MetadataBackend.split_buckets_between_processes(self, gradient_accumulation_steps, apply_padding)",
        'store: each rank\'s own files are known then, which per_node "shard" stages; wrapped only where asked for',
        optional=True,
    ),
    seam(
        "images.load_image",
        "simpletuner.helpers.image_manipulation.load:load_image(img_data)",
        "store: staged bytes are decoded by upstream's own loader, so that pixels are the same",
    ),
    seam(
        "media.extensions",
        "simpletuner.helpers.training:audio_file_extensions",
        "store: sound and video keep upstream's way of reading, which wants a file",
        fact("video too", exists, "video_file_extensions"),
    ),
)
