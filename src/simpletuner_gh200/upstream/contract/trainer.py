"""The trainer: from its configuration to the end of its loop."""

from __future__ import annotations

import ast

from simpletuner_gh200.upstream import facts
from simpletuner_gh200.upstream.spec import Fact, SeamSpec

MODULE = "simpletuner.helpers.training.trainer"


def _called_on_self(method: str) -> Fact:
    reason = "a method replaced on the class is the one that runs"
    return Fact("called on self", reason, facts.looked_up_on_self(method))


PARSE_ARGUMENTS = SeamSpec(
    name="trainer.parse_arguments",
    module=MODULE,
    qualname="Trainer.parse_arguments",
    parameters=("self", "args", "disable_accelerator", "exit_on_error"),
    features=("core",),
    reason="everything starts here: the settings are parsed and the features decided right after it",
    facts=(
        _called_on_self("Trainer.parse_arguments"),
        Fact("sets config", "features read self.config", facts.assigns("Trainer.parse_arguments", "self.config")),
        Fact(
            "sets accelerator",
            "its methods are hooked on the instance",
            facts.assigns("Trainer.parse_arguments", "self.accelerator"),
        ),
        Fact(
            "accumulation comes from the configuration",
            "the ramp starts from that number",
            facts.mentions("Trainer.parse_arguments", "self.config.gradient_accumulation_steps"),
            features=("ramp",),
        ),
    ),
)


INIT_DATA_BACKEND = SeamSpec(
    name="trainer.init_data_backend",
    module=MODULE,
    qualname="Trainer.init_data_backend",
    parameters=("self",),
    features=("caches", "store"),
    reason="after it the backend instances behind the caches exist, and ours are attached to them",
    facts=(
        _called_on_self("Trainer.init_data_backend"),
        Fact(
            "configures all backends in one call",
            "datasets and caches are complete when it returns",
            facts.calls("Trainer.init_data_backend", "configure_multi_databackend"),
        ),
    ),
)


INIT_HOOKS = SeamSpec(
    name="trainer.init_hooks",
    module=MODULE,
    qualname="Trainer.init_hooks",
    parameters=("self",),
    features=("checkpoints", "state"),
    reason="our state is saved and loaded by hooks registered next to upstream's",
    facts=(
        _called_on_self("Trainer.init_hooks"),
        Fact(
            "saving goes through accelerate's hooks",
            "our hook runs with upstream's, before the checkpoint is complete",
            facts.calls("Trainer.init_hooks", "self.accelerator.register_save_state_pre_hook"),
        ),
        Fact(
            "loading goes through accelerate's hooks",
            "our hook runs with upstream's",
            facts.calls("Trainer.init_hooks", "self.accelerator.register_load_state_pre_hook"),
        ),
    ),
)


INIT_EMA_MODEL = SeamSpec(
    name="trainer.init_ema_model",
    module=MODULE,
    qualname="Trainer.init_ema_model",
    parameters=("self",),
    features=("state",),
    reason="the shadows of EMA are made here, and live in Grace from the start",
    facts=(
        _called_on_self("Trainer.init_ema_model"),
        Fact(
            "sets ema_model", "its shadows are found there", facts.assigns("Trainer.init_ema_model", "self.ema_model")
        ),
    ),
)


INIT_RESUME_CHECKPOINT = SeamSpec(
    name="trainer.init_resume_checkpoint",
    module=MODULE,
    qualname="Trainer.init_resume_checkpoint",
    parameters=("self", "lr_scheduler"),
    features=("resuming",),
    reason="before it looks for a checkpoint, what is not whole is moved out of its sight",
    facts=(
        _called_on_self("Trainer.init_resume_checkpoint"),
        Fact(
            "reads what to resume from off the configuration",
            "ranks are told there which checkpoint is the last whole one",
            facts.mentions("Trainer.init_resume_checkpoint", "self.config.resume_from_checkpoint"),
        ),
    ),
)


STEPS = "self.config.gradient_accumulation_steps"

TRAIN = SeamSpec(
    name="trainer.train",
    module=MODULE,
    qualname="Trainer.train",
    parameters=("self",),
    features=("ramp", "batch_path", "telemetry", "state", "pressure", "prefetch", "preemption"),
    reason="before it everything is prepared and resumed, after it the run is over",
    facts=(
        Fact(
            "one accumulation block",
            "the accumulation is changed between two of its entries, never inside one",
            facts.with_block("Trainer.train", "self.accelerator.accumulate"),
            features=("ramp",),
        ),
        Fact(
            "accumulation is only divided by and reduced modulo",
            "so that a value changed at a closed window is right everywhere in the loop",
            facts.operand_only("Trainer.train", STEPS, (ast.Div, ast.Mod)),
            features=("ramp",),
        ),
        Fact(
            "the loss is averaged over the window",
            "the reported loss follows the accumulation of its window",
            facts.mentions("Trainer.train", STEPS),
            features=("ramp",),
        ),
        Fact(
            "gradients through accelerate",
            "accelerate weighs each micro-batch by the accumulation of the moment",
            facts.mentions("Trainer.train", "self.accelerator.backward"),
            features=("ramp",),
        ),
        Fact(
            "steps when accelerate says so",
            "the optimizer steps at the end of a window, which accelerate decides",
            facts.mentions("Trainer.train", "self.accelerator.sync_gradients"),
            features=("ramp",),
        ),
        Fact(
            "manual validation is polled in the loop",
            "so that it fires with the ramp on, at any accumulation",
            facts.calls("Trainer.train", "self._consume_manual_validation_request"),
            features=("ramp",),
        ),
        Fact(
            "looks for a stop signal at the top of every turn",
            "the wait for a batch begins there, and the loop is left there after a checkpoint that a signal asked for",
            facts.calls("Trainer.train", "self._exit_on_signal", times=1),
            features=("telemetry", "preemption"),
        ),
        Fact(
            "asks for a manual checkpoint after an optimizer step",
            "a signal's checkpoint is written there, by all ranks",
            facts.calls("Trainer.train", "self._consume_manual_checkpoint_request"),
            features=("preemption",),
        ),
        Fact(
            "prefetches as the configuration says when it begins",
            "prefetch_depth is set there, as SimpleTuner's own option",
            facts.all_of(
                facts.mentions("Trainer.train", "self.config.dataloader_prefetch"),
                facts.mentions("Trainer.train", "self.config.dataloader_prefetch_qlen"),
            ),
            features=("prefetch",),
        ),
    ),
)


PREPARE_BATCH = SeamSpec(
    name="trainer.prepare_batch",
    module=MODULE,
    qualname="Trainer.prepare_batch",
    parameters=("self", "batch"),
    features=("hints", "telemetry"),
    reason="a batch is ready: placement hints go onto its tensors, and the wait for it is over",
    facts=(
        Fact(
            "the loop calls it on self",
            "every training batch passes through it",
            facts.calls("Trainer.train", "self.prepare_batch"),
        ),
        Fact(
            "an empty batch comes back as it is",
            "False means the end of the epoch, and must reach the loop",
            facts.contains("Trainer.prepare_batch", "return batch"),
            features=("hints",),
        ),
    ),
)


MODEL_PREDICT = SeamSpec(
    name="trainer.model_predict",
    module=MODULE,
    qualname="Trainer.model_predict",
    parameters=("self", "prepared_batch", "custom_timesteps"),
    features=("activations",),
    reason="the forward pass: what autograd saves in it goes to Grace",
    facts=(
        _called_on_self("Trainer.model_predict"),
        Fact(
            "the model predicts once",
            "one forward pass, whose backward pass follows, is one step of what was learned about its shape",
            facts.calls("Trainer.model_predict", "self.model.model_predict", times=1),
        ),
    ),
)


GRADIENT_CHECKPOINTING = SeamSpec(
    name="trainer.enable_gradient_checkpointing",
    module=MODULE,
    qualname="Trainer.enable_gradient_checkpointing",
    parameters=("self",),
    features=("activations",),
    reason="checkpointing stays as SimpleTuner switches it; what is not to be recomputed runs past it, block by block",
    facts=(
        _called_on_self("Trainer.enable_gradient_checkpointing"),
        Fact(
            "on where the configuration says so",
            "the same key tells whether blocks can be recomputed",
            facts.mentions("Trainer.enable_gradient_checkpointing", "self.config.gradient_checkpointing"),
        ),
    ),
)


EMIT_EVENT = SeamSpec(
    name="trainer.emit_event",
    module=MODULE,
    qualname="Trainer._emit_event",
    parameters=("self", "event", "message_level"),
    features=("telemetry",),
    reason="our metrics are added to training status events",
    facts=(
        _called_on_self("Trainer._emit_event"),
        Fact(
            "sends the very dict it got",
            "what we add to the event is sent",
            facts.inside("Trainer._emit_event", facts.passes("self.webhook_handler.send_raw", "event")),
        ),
    ),
)


MANUAL_VALIDATION = SeamSpec(
    name="trainer.manual_validation",
    module=MODULE,
    qualname="Trainer._consume_manual_validation_request",
    parameters=("self",),
    features=("ramp",),
    reason="a request is taken at the end of a window, and not lost before it",
)


MANUAL_CHECKPOINT = SeamSpec(
    name="trainer.manual_checkpoint",
    module=MODULE,
    qualname="Trainer._consume_manual_checkpoint_request",
    parameters=("self",),
    features=("ramp", "preemption"),
    reason="a request is taken at the end of a window, and not lost before it; a signal's request goes through it",
    facts=(
        Fact(
            "asks the consumer that was registered",
            "a signal's request is registered as one",
            facts.contains("Trainer._consume_manual_checkpoint_request", "self._manual_checkpoint_consumer()"),
            features=("preemption",),
        ),
    ),
)


SHOULD_CHECKPOINT_EPOCH = SeamSpec(
    name="trainer.should_checkpoint_epoch",
    module=MODULE,
    qualname="Trainer._should_checkpoint_epoch",
    parameters=("self", "epoch"),
    features=("ramp",),
    reason="a checkpoint at an epoch's end waits for the end of the window",
)


RECALCULATE_STEPS = SeamSpec(
    name="trainer.recalculate_training_steps",
    module=MODULE,
    qualname="Trainer._recalculate_training_steps",
    parameters=("self",),
    features=("ramp",),
    reason="a run that is given by its epochs has as many steps as their data have windows",
    facts=(
        _called_on_self("Trainer._recalculate_training_steps"),
        Fact(
            "counts the micro-batches",
            "the windows are counted by the same number",
            facts.assigns("Trainer._recalculate_training_steps", "self.config.total_num_batches"),
        ),
        Fact(
            "sets the steps",
            "what it sets is replaced right after it",
            facts.assigns("Trainer._recalculate_training_steps", "self.config.max_train_steps"),
        ),
    ),
)


SPECS = (
    PARSE_ARGUMENTS,
    INIT_DATA_BACKEND,
    INIT_HOOKS,
    INIT_EMA_MODEL,
    INIT_RESUME_CHECKPOINT,
    TRAIN,
    PREPARE_BATCH,
    MODEL_PREDICT,
    GRADIENT_CHECKPOINTING,
    EMIT_EVENT,
    MANUAL_VALIDATION,
    MANUAL_CHECKPOINT,
    SHOULD_CHECKPOINT_EPOCH,
    RECALCULATE_STEPS,
)
