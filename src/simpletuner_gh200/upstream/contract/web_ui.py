"""The Web UI: where fields are laid out and filled, where a page is validated and saved; its datasets; its server."""

from __future__ import annotations

from simpletuner_gh200.upstream.facts import calls, contains, declares, dict_display, dict_entry, mentions
from simpletuner_gh200.upstream.spec import MODULE, fact, seam

SERVER = "simpletuner.simpletuner_sdk.server"
SERVICES = f"{SERVER}.services"


SPECS = (
    seam(
        "web_ui.page",
        f"{SERVER}.routes.web:templates",
        "web_ui: when pages are about to be shown our fields are registered, and our templates found beside its own",
    ),
    seam(
        "web_ui.layouts",
        f"{SERVICES}.field_service:SectionLayout",
        "web_ui: our sections get their titles as upstream's do",
        # We give these by keyword.
        fact("layout names", declares("id", "title", "icon", "match_sections", "subsection_override", "order")),
        # Our sections stand behind its own.
        fact("a hardware tab", dict_display("hardware"), "FieldService._TAB_SECTION_LAYOUTS"),
    ),
    seam(
        "web_ui.field_values",
        f"{SERVICES}.field_service:FieldService.prepare_tab_field_values(self, tab_name, config_data, webui_defaults)",
        "web_ui: blocks of an opened configuration are shown in the fields",
        # What we put beside the configuration is what a field shows.
        fact("values by field name", contains("config_data[key]")),
    ),
    seam(
        "web_ui.bundle",
        f"{SERVICES}.training_service:build_config_bundle(form_data)",
        "web_ui: what was typed into our fields becomes blocks, in what is saved and in what is started",
        # We put the blocks there.
        fact(
            "parts of a bundle",
            declares("store", "active_config", "complete_config", "config_dict", "save_config"),
            "TrainingConfigBundle",
        ),
    ),
    seam(
        "web_ui.validate",
        f"{SERVICES}.training_service:"
        "validate_training_config(store, complete_config, config_dict, strict_epoch_exclusivity)",
        "web_ui: Validate and Start refuse what a run would refuse",
        fact("a list of errors", declares("errors"), "TrainingValidationResult"),
    ),
    seam(
        "web_ui.validate_field",
        f"{SERVICES}.validation_service:"
        "ValidationService.validate_field(self, field_name, value, config, validate_paths)",
        "web_ui: a field that holds what it may not says so as it is left",
        fact("asked for the page", mentions("self.validate_field"), "ValidationService"),
    ),
    seam(
        "web_ui.save",
        f"{SERVER}.routes.training:save_config",
        "web_ui: a refused save has to look refused, as the page believes the status, and upstream's is always 200",
        # What we check is what would be written.
        fact("the form through the bundle", calls("training_service.build_config_bundle", times=1, arguments=1)),
    ),
    seam(
        "web_ui.without_gpu",
        f"{SERVICES}.local_gpu_allocator:"
        "LocalGPUAllocator.can_allocate(self, required_count, preferred_gpus, any_gpu, org_id, for_approval)",
        "web_ui: on a machine without a GPU a job waits for one that never comes; it can be tried there too",
        # A job that needs none is let through, whatever else there is to say against it.
        fact("counts the GPUs it needs", contains("len(available) < required_count")),
        # Whether there is any is asked where upstream asks.
        fact("the machine's own GPUs", calls("detect_gpu_inventory", times=1, arguments=0)),
        optional=True,
    ),
    seam(
        "web_ui_datasets.cards",
        f"{SERVER}.data.dataset_blueprints:_BLUEPRINTS",
        "web_ui: a card for in-memory datasets, made from that of local ones, stands beside it",
        fact(
            "parts of a card",
            declares("id", "backendType", "label", "description", "defaults", "fields"),
            "BackendBlueprint",
        ),
        fact("a card of local files", dict_entry("id", "local-image"), MODULE),
        # A list with one more is the one that is shown.
        fact("read from the list", mentions("_BLUEPRINTS"), "get_dataset_blueprints"),
    ),
    seam(
        "web_ui_datasets.validations",
        f"{SERVICES}.dataset_plan:compute_validations",
        "web_ui: an entry that a run would refuse is refused when the list is saved",
        # Ours are errors, added to it.
        fact("messages with a level", declares("field", "message", "level"), "ValidationMessage"),
        fact("a list of messages", contains("return validations")),
    ),
    seam(
        "web_ui_panel.hardware_tab",
        f"{SERVICES}.tab_service:TabService._hardware_tab_context(self, context, fields, config_values)",
        "web_ui: our panel is one more section of the hardware page",
        fact("asked through self", mentions("self._hardware_tab_context"), "TabService"),
        fact("sections in the context", contains("context['sections'] = filtered_sections")),
    ),
    seam(
        "web_ui_panel.server",
        f"{SERVER}.app:create_app",
        "web_ui: our routes are added to the server, and it says at its start that we are on",
        fact("an application is returned", contains("return app")),
    ),
)
