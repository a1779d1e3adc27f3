"""The trainer: from its configuration to the end of its loop, when it validates, and its EMA."""

from __future__ import annotations

import ast

from simpletuner_gh200.upstream import syntax
from simpletuner_gh200.upstream.facts import assigns, calls, contains, mentions, operand_only, with_block
from simpletuner_gh200.upstream.spec import fact, seam

TRAINER = "simpletuner.helpers.training.trainer"
VALIDATION = "simpletuner.helpers.training.validation"
STEPS = "self.config.gradient_accumulation_steps"
ON_SELF = "called on self"
"""So that a method replaced on the class is the one that runs."""


def _sends_the_event(scope: ast.AST) -> str | None:
    found = syntax.calls(scope, "self.webhook_handler.send_raw")
    passes = any(call.args and syntax.dotted(call.args[0]) == "event" for call in found)
    return None if passes else f"{[ast.unparse(call) for call in found]}, none of which passes event,"


SPECS = (
    seam(
        "trainer.parse_arguments",
        f"{TRAINER}:Trainer.parse_arguments(self, args, disable_accelerator, exit_on_error)",
        "core: everything starts here, the settings are parsed and the features decided right after it",
        fact(ON_SELF, mentions("self.parse_arguments"), "Trainer"),
        # Features read the one, and hook methods of the other on the instance.
        fact("sets config", assigns("self.config")),
        fact("sets accelerator", assigns("self.accelerator")),
        # The ramp starts from that number.
        fact("ramp: accumulation comes from the configuration", mentions(STEPS)),
    ),
    seam(
        "trainer.init_data_backend",
        f"{TRAINER}:Trainer.init_data_backend(self)",
        "caches, store: after it the backend instances behind the caches exist, and ours are attached to them",
        fact(ON_SELF, mentions("self.init_data_backend"), "Trainer"),
        # Datasets and caches are complete when it returns.
        fact("configures all backends in one call", calls("configure_multi_databackend")),
    ),
    seam(
        "trainer.init_hooks",
        f"{TRAINER}:Trainer.init_hooks(self)",
        "checkpoints, state, loading, weights, gradients: hooks beside upstream's save and load our state",
        fact(ON_SELF, mentions("self.init_hooks"), "Trainer"),
        # Ours run with upstream's, before the checkpoint is complete.
        fact("saving goes through accelerate's hooks", calls("self.accelerator.register_save_state_pre_hook")),
        fact("loading goes through accelerate's hooks", calls("self.accelerator.register_load_state_pre_hook")),
    ),
    seam(
        "trainer.init_ema_model",
        f"{TRAINER}:Trainer.init_ema_model(self)",
        "state: the shadows of EMA are made here, and live in Grace from the start",
        fact(ON_SELF, mentions("self.init_ema_model"), "Trainer"),
        fact("sets ema_model", assigns("self.ema_model")),
    ),
    seam(
        "trainer.init_resume_checkpoint",
        f"{TRAINER}:Trainer.init_resume_checkpoint(self, lr_scheduler)",
        "resuming: before it looks for a checkpoint, what is not whole is moved out of its sight",
        fact(ON_SELF, mentions("self.init_resume_checkpoint"), "Trainer"),
        # Ranks are told there which checkpoint is the last whole one.
        fact("reads what to resume from off the configuration", mentions("self.config.resume_from_checkpoint")),
    ),
    seam(
        "trainer.train",
        f"{TRAINER}:Trainer.train(self)",
        "ramp, batch_path, telemetry, state, weights, gradients, prefetch, preemption: the whole loop",
        # The accumulation is changed between two of its entries, never inside one.
        fact("ramp: one accumulation block", with_block("self.accelerator.accumulate")),
        # A value changed at a closed window is right everywhere in the loop.
        fact("ramp: accumulation is only divided by and reduced modulo", operand_only(STEPS, (ast.Div, ast.Mod))),
        # The reported loss follows the accumulation of its window.
        fact("ramp: the loss is averaged over the window", mentions(STEPS)),
        # accelerate weighs each micro-batch by the accumulation of the moment, and decides where a window ends.
        # After it weights are at home, where alone they change, and gradients in their places.
        fact("ramp, weights, gradients: gradients through accelerate", mentions("self.accelerator.backward")),
        fact("ramp: steps when accelerate says so", mentions("self.accelerator.sync_gradients")),
        # It fires with the ramp on, at any accumulation.
        fact("ramp: manual validation is polled in the loop", calls("self._consume_manual_validation_request")),
        # The wait for a batch begins there, and the loop is left there after a checkpoint that a signal asked for.
        fact(
            "telemetry, preemption: looks for a stop signal at the top of a turn",
            calls("self._exit_on_signal", times=1),
        ),
        # A signal's checkpoint is written there, by all ranks.
        fact("preemption: polls manual checkpoints after a step", calls("self._consume_manual_checkpoint_request")),
        # prefetch_depth is set there, as SimpleTuner's own option.
        fact(
            "prefetch: as the configuration says when it begins",
            mentions("self.config.dataloader_prefetch", "self.config.dataloader_prefetch_qlen"),
        ),
    ),
    seam(
        "trainer.checkpoint_state_save",
        f"{TRAINER}:Trainer.checkpoint_state_save(self, output_dir, suffix)",
        "behind: SimpleTuner's own saving writes into memory, and training goes on while that is copied to the disk",
        fact(ON_SELF, mentions("self.checkpoint_state_save"), "Trainer"),
        fact("everything is written below the folder that it is given", calls("self.accelerator.save_state", times=1)),
        # What looks at the checkpoint afterwards waits for it, through methods replaced on the trainer.
        fact("runs the user's script when it is saved", calls("self._run_post_checkpoint_script", times=1)),
        fact("rotates old ones", mentions("self.checkpoint_state_cleanup"), "Trainer"),
        fact("uploads one by one method", mentions("self._schedule_hub_upload"), "Trainer"),
        fact("waits for uploads in the end", mentions("self._finish_hub_uploads"), "Trainer"),
    ),
    seam(
        "trainer.prepare_batch",
        f"{TRAINER}:Trainer.prepare_batch(self, batch)",
        "hints, telemetry: a batch is ready, placement hints go onto its tensors, and the wait for it is over",
        fact("the loop calls it on self", calls("self.prepare_batch"), "Trainer.train"),
        # False means the end of the epoch, and must reach the loop.
        fact("hints: an empty batch comes back as it is", contains("return batch")),
    ),
    seam(
        "trainer.model_predict",
        f"{TRAINER}:Trainer.model_predict(self, prepared_batch, custom_timesteps)",
        "activations, weights: what autograd saves in the forward pass goes to Grace, blocks' weights come from there",
        fact(ON_SELF, mentions("self.model_predict"), "Trainer"),
        # One forward pass, whose backward pass follows, is one step of what was learned about its shape.
        fact("activations: the model predicts once", calls("self.model.model_predict", times=1)),
    ),
    seam(
        "trainer.enable_gradient_checkpointing",
        f"{TRAINER}:Trainer.enable_gradient_checkpointing(self)",
        "activations: checkpointing stays as SimpleTuner switches it; what is kept runs past it, block by block",
        fact(ON_SELF, mentions("self.enable_gradient_checkpointing"), "Trainer"),
        # The same key tells whether blocks can be recomputed.
        fact("on where the configuration says so", mentions("self.config.gradient_checkpointing")),
    ),
    seam(
        "trainer.emit_event",
        f"{TRAINER}:Trainer._emit_event(self, event, message_level)",
        "telemetry: our metrics are added to training status events",
        fact(ON_SELF, mentions("self._emit_event"), "Trainer"),
        fact("sends the very dict it got", _sends_the_event),
    ),
    seam(
        "trainer.manual_validation",
        f"{TRAINER}:Trainer._consume_manual_validation_request(self)",
        "ramp: a request is taken at the end of a window, and not lost before it",
    ),
    seam(
        "trainer.manual_checkpoint",
        f"{TRAINER}:Trainer._consume_manual_checkpoint_request(self)",
        "ramp, preemption: a request is taken at a window's end, and not lost before; a signal's goes through it",
        # A signal's request is registered as one.
        fact("preemption: asks the consumer that was registered", contains("self._manual_checkpoint_consumer()")),
    ),
    seam(
        "trainer.should_checkpoint_epoch",
        f"{TRAINER}:Trainer._should_checkpoint_epoch(self, epoch)",
        "ramp: a checkpoint at an epoch's end waits for the end of the window",
    ),
    seam(
        "trainer.recalculate_training_steps",
        f"{TRAINER}:Trainer._recalculate_training_steps(self)",
        "ramp: a run that is given by its epochs has as many steps as their data have windows",
        fact(ON_SELF, mentions("self._recalculate_training_steps"), "Trainer"),
        # The windows are counted by the same number, and what it sets is replaced right after it.
        fact("counts the micro-batches", assigns("self.config.total_num_batches")),
        fact("sets the steps", assigns("self.config.max_train_steps")),
    ),
    seam(
        "validation.intermediary",
        f"{VALIDATION}:Validation.should_perform_intermediary_validation",
        "ramp: nothing is validated in the middle of a window",
    ),
    seam(
        "validation.epoch_relative_step",
        f"{VALIDATION}:Validation._epoch_relative_step(self, steps_per_epoch)",
        "ramp: steps per epoch change during a ramp, so the end of the data decides",
        optional=True,
    ),
    seam(
        "ema.to",
        "simpletuner.helpers.training.ema:EMAModel.to(self, *args, **kwargs)",
        "state: shadows that are moved get their new memory in Grace",
        # They are found there, and counted.
        fact("shadows are a list", assigns("self.shadow_params"), "EMAModel.__init__"),
        # With accelerator the shadows stay through every update.
        fact("moves only where ema_device is cpu", mentions("self.args.ema_device"), "EMAModel.step"),
    ),
)
