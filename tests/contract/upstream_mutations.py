"""How each relied-on fact could break: one edit per fact, as a regular expression on upstream's own source.

The source is edited in its canonical form (parsed and written out again), so the same edit fits every release.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Mutation:
    """``pattern`` -> ``replacement`` in the module of ``seam``; ``fact`` is the one that breaks."""

    seam: str
    fact: str
    pattern: str
    replacement: str
    also: tuple[str, ...] = ()
    """Features lost besides the fact's own, because the same line carries another fact."""

    def apply(self, text: str) -> str:
        mutated, count = re.subn(self.pattern, self.replacement, text, flags=re.MULTILINE)
        assert count, f"{self.pattern} is not in the module of {self.seam}"
        return mutated


ACCUMULATE = r"^( *)with self\.accelerator\.accumulate\(\*training_models\):"
STEPS = r"self\.config\.gradient_accumulation_steps"

MUTATIONS = (
    # configuration
    Mutation(
        "field_registry.add_field", "keyed by name", r"self\._fields\[field\.name\]", "self._fields[field.arg_name]"
    ),
    Mutation("field_registry.add_field", "one shared registry", r"^field_registry = ", "the_registry = "),
    Mutation("field_registry.types", "field names", r"^    arg_name: str", "    argument_name: str"),
    Mutation("field_registry.types", "a type for long text", "TEXTAREA = 'textarea'", "LONG = 'textarea'"),
    Mutation(
        "config.legacy_handlers", "a mapping", r"^_LEGACY_ARG_HANDLERS(.*) = \{\}", r"_LEGACY_ARG_HANDLERS\1 = Table()"
    ),
    Mutation("config.legacy_handlers", "asked by key", r"_LEGACY_ARG_HANDLERS\.get\(", "find_handler("),
    Mutation(
        "config.legacy_handlers",
        "called with value, arguments and extras",
        r"handler\(value, cli_args, extras_dict\)",
        "handler(canonical_key, value, cli_args, extras_dict)",
    ),
    Mutation("config.env_map", "a mapping", "'DATALOADER_CONFIG'", "'DATASET_CONFIG'"),
    Mutation("config.env_map", "read entry by entry", r"env_to_args_map\.items\(\)", "read_table()"),
    Mutation("config.loader_helpers", "four readers", "'toml': toml_file", "'tml': toml_file"),
    Mutation("config.loader_helpers", "looked up when loading", r"\bhelpers\[(config_backend|'cmd')\]", r"reader(\1)"),
    Mutation("state_tracker.class", "our names are free", r"^    def get_config_path\(", "    def get_raw_config("),
    Mutation(
        "state_tracker.class",
        "keeps the backends in a table",
        r"^    data_backends = \{\}",
        "    backends = {}",
    ),
    Mutation(
        "state_tracker.class",
        "knows the text cache and the arguments",
        r"def get_vaecache\(cls, id",
        "def get_vaecache(cls, name",
    ),
    # Web UI
    Mutation("web_ui.layouts", "layout names", r"^    match_sections: ", "    sections_matched: "),
    Mutation("web_ui.layouts", "a hardware tab", r"'hardware': \(SectionLayout", "'machine': (SectionLayout"),
    Mutation("web_ui.field_values", "values by field name", r"config_data\[key\]", "config_data.get(key)"),
    Mutation("web_ui.bundle", "parts of a bundle", r"^    save_config: ", "    saved_config: "),
    Mutation("web_ui.validate", "a list of errors", r"^    errors: List", "    faults: List"),
    Mutation("web_ui.validate_field", "asked for the page", r"self\.validate_field\b", "self.judge_field"),
    Mutation(
        "web_ui.save",
        "the form through the bundle",
        r"training_service\.build_config_bundle\(form_data\)",
        "training_service.bundle_of(form_data)",
    ),
    Mutation("web_ui.without_gpu", "counts the GPUs it needs", r"len\(available\) < required_count", "not available"),
    Mutation("web_ui.without_gpu", "the machine's own GPUs", r"= detect_gpu_inventory\(\)", "= self._inventory()"),
    Mutation("web_ui_datasets.cards", "parts of a card", r"^    backendType: ", "    backend: "),
    Mutation("web_ui_datasets.cards", "a card of local files", "'id': 'local-image'", "'id': 'local-media'"),
    Mutation(
        "web_ui_datasets.cards", "read from the list", r"for blueprint in _BLUEPRINTS\]", "for blueprint in cards()]"
    ),
    Mutation("web_ui_datasets.validations", "messages with a level", r"^    level: ", "    severity: "),
    Mutation(
        "web_ui_datasets.validations",
        "a list of messages",
        r"^( *)return validations$",
        r"\1return tuple(validations)",
    ),
    Mutation(
        "web_ui_panel.hardware_tab", "asked through self", r"self\._hardware_tab_context\b", "hardware_tab_context"
    ),
    Mutation(
        "web_ui_panel.hardware_tab", "sections in the context", r"context\['sections'\] = ", "context['parts'] = "
    ),
    Mutation("web_ui_panel.server", "an application is returned", r"^    return app$", "    return Running(app)"),
    # datasets
    Mutation(
        "datasets.caches", "entries by these names", r"init_backend\['vaecache'\] = ", "init_backend['latents'] = "
    ),
    Mutation("media.extensions", "video too", r"^video_file_extensions = ", "moving_extensions = "),
    Mutation(
        "datasets.load_configuration",
        "returns the list",
        r"^        return data_backend_config$",
        "        self.configuration = data_backend_config",
    ),
    Mutation(
        "datasets.load_configuration",
        "an unknown type passes validation",
        r"^( *)warning_log\(f'Configuration validation failed: \{e\}'\)",
        r"\1raise",
    ),
    Mutation("datasets.local_builder", "the id comes with the configuration", r"config\.id\b", "config.identity"),
    Mutation(
        "datasets.local_builder",
        "compression by one helper",
        r"self\._get_compression_setting\(config\)",
        "config.compress_cache",
    ),
    Mutation(
        "datasets.builder_build", "asks the subclass", r"self\._create_backend\(config\)", "make_backend(self, config)"
    ),
    Mutation(
        "backend.builder_map",
        "a literal map with local in it",
        "'local': LocalBackendBuilder",
        "'disk': LocalBackendBuilder",
    ),
    Mutation(
        "backend.builder_map",
        "in_memory is not upstream's",
        "'local': LocalBackendBuilder",
        "'local': LocalBackendBuilder, 'in_memory': MemoryBackendBuilder",
    ),
    Mutation(
        "backend.local",
        "the fifteen methods",
        r"def read\(self, filepath: str, as_byteIO",
        "def read(self, filepath: str, as_stream",
    ),
    Mutation(
        "backend.local",
        "made with accelerator, id and compression",
        r"def __init__\(self, accelerator, id: str,",
        "def __init__(self, accelerator, name: str,",
    ),
    Mutation("backend.local", "its type is local", "self.type = 'local'", "self.type = 'disk'"),
    Mutation("backend.local", "children are told local", "'backend_type': 'local'", "'backend_type': 'disk'"),
    Mutation("backend.base", "the fifteen are abstract", r"^    def torch_load\(", "    def load_tensor("),
    # trainer
    Mutation("trainer.parse_arguments", "called on self", r"self\.parse_arguments\(", "read_arguments(self, "),
    Mutation("trainer.parse_arguments", "sets config", r"self\.config = ", "self.configuration = "),
    Mutation("trainer.parse_arguments", "sets accelerator", r"self\.accelerator = ", "self.engine = "),
    Mutation("trainer.parse_arguments", "accumulation comes from the configuration", STEPS, "self.window"),
    Mutation("trainer.init_data_backend", "called on self", r"self\.init_data_backend\b", "self.init_datasets"),
    Mutation(
        "trainer.init_data_backend",
        "configures all backends in one call",
        r"^( *)configure_multi_databackend\(",
        r"\1start_databackends(",
    ),
    Mutation("trainer.init_hooks", "called on self", r"self\.init_hooks\(\)", "install_hooks(self)"),
    Mutation(
        "trainer.init_hooks",
        "saving goes through accelerate's hooks",
        r"self\.accelerator\.register_save_state_pre_hook",
        "self.on_save",
    ),
    Mutation(
        "trainer.init_hooks",
        "loading goes through accelerate's hooks",
        r"self\.accelerator\.register_load_state_pre_hook",
        "self.on_load",
    ),
    Mutation("trainer.init_ema_model", "called on self", r"self\.init_ema_model\b", "self.init_shadows"),
    Mutation("trainer.init_ema_model", "sets ema_model", r"self\.ema_model = ", "self.shadow_model = "),
    Mutation(
        "trainer.init_resume_checkpoint",
        "called on self",
        r"self\.init_resume_checkpoint\b",
        "self.init_resuming",
    ),
    Mutation(
        "trainer.init_resume_checkpoint",
        "reads what to resume from off the configuration",
        r"self\.config\.resume_from_checkpoint",
        "self.resume_from",
    ),
    Mutation("ema.to", "shadows are a list", r"self\.shadow_params = \[p\.clone", "self.shadows = [p.clone"),
    Mutation("ema.to", "moves only where ema_device is cpu", r"self\.args\.ema_device", "self.device_choice"),
    Mutation(
        "accelerate.load_state",
        "takes a map_location",
        r"load_model_func_kwargs\.pop\('map_location', None\)",
        "load_model_func_kwargs.get('place')",
    ),
    Mutation("trainer.prepare_batch", "the loop calls it on self", r"self\.prepare_batch\(", "self.ready_batch("),
    Mutation("trainer.prepare_batch", "an empty batch comes back as it is", r"return batch$", "raise StopIteration"),
    Mutation("trainer.model_predict", "called on self", r"self\.model_predict\b", "self.predict"),
    Mutation(
        "trainer.model_predict", "the model predicts once", r"self\.model\.model_predict\(", "self.model.predict_again("
    ),
    Mutation(
        "trainer.enable_gradient_checkpointing",
        "called on self",
        r"self\.enable_gradient_checkpointing\b",
        "self.switch_checkpointing_on",
    ),
    Mutation(
        "trainer.enable_gradient_checkpointing",
        "on where the configuration says so",
        r"if self\.config\.gradient_checkpointing:",
        "if self.checkpointing:",
    ),
    Mutation(
        "trainer.recalculate_training_steps",
        "called on self",
        r"self\._recalculate_training_steps\(\)",
        "count_steps(self)",
    ),
    Mutation(
        "trainer.recalculate_training_steps",
        "counts the micro-batches",
        r"self\.config\.total_num_batches = ",
        "self.config.batches = ",
    ),
    Mutation(
        "trainer.recalculate_training_steps",
        "sets the steps",
        r"self\.config\.max_train_steps = ",
        "self.config.steps = ",
    ),
    Mutation("trainer.emit_event", "called on self", r"self\._emit_event\(", "send(self, "),
    Mutation("trainer.emit_event", "sends the very dict it got", r"send_raw\(event,", "send_raw(dict(event),"),
    Mutation(
        "trainer.train",
        "one accumulation block",
        ACCUMULATE,
        r"\1with self.accelerator.accumulate(*training_models):\n\1    pass\n\g<0>",
    ),
    Mutation(
        "trainer.train",
        "accumulation is only divided by and reduced modulo",
        rf"avg_loss\.item\(\) / {STEPS}",
        "avg_loss.item() * self.config.gradient_accumulation_steps",
    ),
    Mutation("trainer.train", "the loss is averaged over the window", STEPS, "self.window"),
    Mutation(
        "trainer.train", "gradients through accelerate", r"self\.accelerator\.backward\(", "torch.Tensor.backward("
    ),
    Mutation(
        "trainer.train", "steps when accelerate says so", r"self\.accelerator\.sync_gradients", "self.should_step"
    ),
    Mutation(
        "trainer.train",
        "manual validation is polled in the loop",
        r"self\._consume_manual_validation_request\(\)",
        "self.validation_wanted",
    ),
    Mutation(
        "trainer.train",
        "looks for a stop signal at the top of every turn",
        r"self\._exit_on_signal\(\)",
        "self.stop_if_asked()",
    ),
    Mutation(
        "trainer.train",
        "asks for a manual checkpoint after an optimizer step",
        r"self\._consume_manual_checkpoint_request\(\)",
        "self.checkpoint_wanted",
    ),
    Mutation(
        "trainer.manual_checkpoint",
        "asks the consumer that was registered",
        r"self\._manual_checkpoint_consumer\(\)",
        "self.checkpoint_wanted()",
    ),
    Mutation(
        "trainer.train",
        "prefetches as the configuration says when it begins",
        r"self\.config\.dataloader_prefetch_qlen",
        "self.queue_length",
    ),
    # caches
    Mutation(
        "caching.vae_read",
        "torch_load is looked up on the instance",
        r"self\.cache_data_backend\.torch_load\(",
        "self._load(",
    ),
    Mutation(
        "caching.vae_read", "existence is asked of the instance", r"self\.cache_data_backend\.exists\(", "self._known("
    ),
    Mutation(
        "caching.vae_read",
        "reading goes through encode_images",
        r"return self\.encode_images\(\[None\], \[filepath\]\)\[0\]",
        "return self._fast(filepath)",
    ),
    Mutation(
        "caching.text_retrieve",
        "torch_load is looked up on the instance",
        r"self\.data_backend\.torch_load\(",
        "self._load(",
    ),
    Mutation(
        "caching.text_retrieve",
        "torch_save is looked up on the instance",
        r"self\.data_backend\.torch_save",
        "self._save",
    ),
    Mutation(
        "caching.image_embed_read",
        "torch_load is looked up on the instance",
        r"self\.cache_data_backend\.torch_load\(",
        "self._load(",
    ),
    Mutation(
        "caching.image_embed_read",
        "existence is asked of the instance",
        r"self\.cache_data_backend\.exists\(",
        "self._known(",
    ),
    # batch path
    Mutation(
        "collate.compute_latents", "collate_fn looks it up by name", r"= compute_latents\(", "= model.compute_latents("
    ),
    Mutation(
        "collate.check_latent_shapes", "collate_fn looks it up by name", r"= check_latent_shapes\(", "= model.check("
    ),
    Mutation(
        "collate.compute_prompt_embeddings",
        "collate_fn looks it up by name",
        r"= compute_prompt_embeddings\(",
        "= text_embed_cache.compute(",
    ),
    Mutation(
        "collate.fetch_latent",
        "compute_latents looks it up by name",
        r"executor\.map\(fetch_latent,",
        "executor.map(model.fetch,",
    ),
    Mutation(
        "collate.fetch_latent", "asks the VAE cache of the dataset", r"StateTracker\.get_vaecache\(", "latent_store("
    ),
    Mutation(
        "caching.vae_read",
        "names a sample's file",
        r"def generate_vae_cache_filename\(self, filepath",
        "def generate_vae_cache_filename(self, sample",
    ),
    Mutation(
        "collate.check_latent_shapes",
        "stacks them on the device",
        r"for _latent in latents\], dim=0\)",
        "for _latent in latents], dim=1)",
    ),
    Mutation(
        "collate.check_latent_shapes",
        "only looks at shapes and values",
        r"^    for idx, latent in enumerate\(latents\):",
        "    for idx, latent in enumerate(latents):\n        latent = latent.float()",
    ),
    Mutation(
        "collate.compute_prompt_embeddings",
        "asks the model to join",
        r"model\.collate_prompt_embeds\(text_encoder_output\)",
        "model.join(text_encoder_output)",
    ),
    Mutation(
        "collate.compute_prompt_embeddings",
        "joins the rest itself",
        r"^( *)if 'time_ids' in text_encoder_output\[0\]:",
        r"\1if 'guidance' in text_encoder_output[0]:\n\1    pass\n\g<0>",
    ),
    # accelerate
    Mutation("accelerate.do_sync", "counts by one", r"self\.step \+= 1", "self.step += self.num_processes"),
    Mutation(
        "accelerate.do_sync",
        "syncs at a multiple",
        r"self\.step % self\.gradient_state\.num_steps == 0",
        "self.step >= self.gradient_state.num_steps",
    ),
    Mutation(
        "accelerate.do_sync",
        "accumulation can be set",
        r"self\.gradient_state\.plugin_kwargs\.update\(\{'num_steps'",
        "self.gradient_state.plugin_kwargs.update({'steps'",
    ),
    Mutation("accelerate.do_sync", "accumulate decides on entry", r"^        self\._do_sync\(\)", "        pass"),
    Mutation(
        "accelerate.backward",
        "divides by the accumulation of the moment",
        r"loss = loss / self\.gradient_accumulation_steps",
        "loss = loss / self.initial_steps",
    ),
)


@dataclass(frozen=True)
class Harmless:
    """An edit that changes nothing we rely on."""

    what: str
    module: str
    pattern: str
    replacement: str

    def apply(self, text: str) -> str:
        mutated, count = re.subn(self.pattern, self.replacement, text, flags=re.MULTILINE)
        assert count, f"{self.pattern} is not in {self.module}"
        return mutated


TRAINER = "simpletuner.helpers.training.trainer"
HARMLESS = (
    Harmless(
        "a new method",
        TRAINER,
        r"^    def init_hooks\(self\):",
        "    def brand_new(self):\n        return 1\n\n    def init_hooks(self):",
    ),
    Harmless("a new line in the loop", TRAINER, ACCUMULATE, r"\1self.seen = step\n\g<0>"),
    Harmless(
        "an annotation",
        TRAINER,
        r"def prepare_batch\(self, batch: dict\)",
        "def prepare_batch(self, batch: 'Mapping') -> 'dict'",
    ),
    Harmless(
        "another use by division", TRAINER, ACCUMULATE, r"\1share = 1 / self.config.gradient_accumulation_steps\n\g<0>"
    ),
    Harmless("a second caller", TRAINER, r"^( *)self\.init_hooks\(\)", r"\1self.init_hooks()\n\1self.init_hooks()"),
    Harmless(
        "a new builder",
        "simpletuner.helpers.data_backend.builders",
        "'local': LocalBackendBuilder",
        "'local': LocalBackendBuilder, 'tape': TapeBuilder",
    ),
    Harmless(
        "a new variable",
        "simpletuner.helpers.configuration.env_file",
        "'DATALOADER_CONFIG'",
        "'TAPE': '--tape', 'DATALOADER_CONFIG'",
    ),
    Harmless(
        "a new backend method",
        "simpletuner.helpers.data_backend.local",
        r"^    def exists\(",
        "    def size(self, filepath):\n        return 0\n\n    def exists(",
    ),
    Harmless("a log line", "accelerate.accelerator", r"^( *)self\.step \+= 1", r"\1logger.debug('counting')\n\g<0>"),
    Harmless("a renamed local", "simpletuner.helpers.training.collate", r"\blatent_batch\b", "stacked"),
    Harmless(
        "a new field type",
        "simpletuner.simpletuner_sdk.server.services.field_registry.types",
        "TEXTAREA = 'textarea'",
        "TEXTAREA = 'textarea'; TAPE = 'tape'",
    ),
    Harmless(
        "a new global query",
        "simpletuner.helpers.training.state_tracker",
        r"^    def get_config_path\(",
        "    def get_tape(cls):\n        return None\n\n    @classmethod\n    def get_config_path(",
    ),
)
