"""What the extension looks like from inside a training process."""


def install(record):
    import simpletuner_gh200.seams.runtime as runtime_module

    original = runtime_module.Runtime.configure

    def configure(self, settings, verdict=dict):
        original(self, settings, verdict)
        from simpletuner.helpers.training.state_tracker import StateTracker

        record["settings"] = {key: [value, origin] for key, value, origin in settings.rows()}
        record["notes"] = list(settings.notes)
        record["raw"] = sorted(
            key for key in (StateTracker.get_raw_config() or {}) if "gh200" in key or "cache_config" in key
        )
        record["left_on_config"] = [key for key in vars(self.trainer.config) if "gh200" in key or key == "cache_config"]
        record["runtime_config"] = StateTracker.get_gh200_runtime_config()

    runtime_module.Runtime.configure = configure
