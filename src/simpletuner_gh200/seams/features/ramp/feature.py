"""The batch ramp: made from the settings, kept across checkpoints, in force while the loop runs."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import ceil
from typing import Any, ClassVar

from simpletuner_gh200.config.blocks import RampSettings
from simpletuner_gh200.config.settings import Settings
from simpletuner_gh200.errors import ConfigError, FeatureUnavailable, RunFailed
from simpletuner_gh200.ramp.outlook import Sizes, outlook, whole_windows
from simpletuner_gh200.ramp.schedule import GH200GradientRamp, RampState, Window, rate_factor, resume
from simpletuner_gh200.seams.checkpoints import from_main_process, keep_in_checkpoints
from simpletuner_gh200.seams.feature import Feature, Request
from simpletuner_gh200.seams.features.ramp.windows import Deferral, Windows, epochs_to_steps, rate_patches
from simpletuner_gh200.seams.patch import Patches

logger = logging.getLogger("simpletuner_gh200")

EFFECTIVE_KEY = "gh200/effective_batch_size"
ACCUMULATION_KEY = "gh200/gradient_accumulation_steps"


class RampFeature(Feature):
    name: ClassVar[str] = "ramp"

    def __init__(self) -> None:
        self._ramp: GH200GradientRamp
        self._windows: Windows | None = None
        self._patches = Patches()
        self._saved: RampState | None = None
        self._epochs_derived = False
        self._sizes = Sizes(1)
        self._first: Window | None = None
        self._last: Window | None = None

    def request(self, settings: Settings, environment: Mapping[str, str]) -> Request:
        return "requested" if settings.part(RampSettings).enable_batch_size_rampup else "off"

    @property
    def _settings(self) -> RampSettings:
        return self.settings.part(RampSettings)

    def start(self, trainer: Any) -> None:
        config, accelerator = trainer.config, trainer.accelerator
        if accelerator is None:
            self.runtime.switch_off(self, "there is no accelerator, so nothing is trained")
            return
        refuse_impossible(config, accelerator)
        self._saved = self._first = self._last = None
        self._sizes = Sizes(
            int(config.train_batch_size),
            _data_parallel_size(accelerator),
            int(config.gradient_accumulation_steps),
            int(config.max_train_steps or 0),
            float(getattr(config, "num_train_epochs", 0) or 0),
        )
        found = outlook(self._settings, self._sizes)
        if found.problems:
            raise ConfigError(found.problems)
        self._ramp = found.ramp
        self._epochs_derived = not getattr(config, "num_train_epochs", None)
        # Buckets and epochs are measured by the target; the windows begin with the loop.
        config.gradient_accumulation_steps = self._ramp.target_accumulation
        if self._sizes.by_epochs:
            self._patches.install(epochs_to_steps(trainer, partial(self._measured, accelerator)))
        elif accelerator.is_main_process:
            self._announce(found.notices)

    def _measured(self, accelerator: Any, micro_batches: int) -> int:
        """The data were counted: the schedule's own length may follow from it, and the steps of the run do.

        By the main process's count: a rank with fewer of them would stop while the others wait for it.
        """
        first = self._sizes.micro_batches is None
        micro_batches = from_main_process(accelerator, lambda: micro_batches)
        self._sizes = replace(self._sizes, micro_batches=micro_batches)
        found = outlook(self._settings, self._sizes)
        self._ramp = found.ramp
        steps = whole_windows(self._ramp, micro_batches)
        if first and accelerator.is_main_process:
            self._announce(found.notices)
            for remark in found.remarks:
                logger.info("gh200: ramp: %s", remark)
            logger.info("gh200: ramp: %d micro-batches per rank are %d optimizer steps", micro_batches, steps)
        return steps

    def hooks_ready(self, trainer: Any) -> None:
        def save() -> Mapping[str, Any]:
            return RampState.after(self._ramp, int(trainer.state["global_step"])).to_json()

        def load(section: Mapping[str, Any] | None) -> None:
            self._saved = RampState.from_json(section) if section is not None else None
            if self._saved is not None and self._saved.accumulation:
                # Samplers compare the accelerator with the one that saved them.
                trainer.accelerator.gradient_accumulation_steps = self._saved.accumulation

        keep_in_checkpoints(trainer.accelerator, "ramp", save, load)

    def before_train(self, trainer: Any) -> None:
        step = int(trainer.state["global_step"])
        resumed = resume(self._ramp, self._saved, step)
        _refuse_disagreement(trainer.accelerator, resumed.ramp, step)
        self._ramp = resumed.ramp
        if self._sizes.micro_batches is not None:
            trainer.config.max_train_steps = whole_windows(self._ramp, self._sizes.micro_batches)
        if trainer.accelerator.is_main_process:
            for notice in resumed.notices:
                logger.warning("gh200: ramp: %s", notice)
        if self._epochs_derived:
            _allow_epochs(trainer.config, self._ramp)
        self._hook_loop(trainer)

    def _hook_loop(self, trainer: Any) -> None:
        def next_window() -> Window:
            return self._ramp.window(int(trainer.state["global_step"]))

        windows = Windows(trainer.accelerator, trainer.config, self._ramp.target_accumulation, next_window)
        deferral = Deferral(trainer, lambda: windows.mid_window, lambda: next_window().samples // self._ramp.unit)
        windows.on_open += [self._opened, deferral.window_opened]
        self._windows = windows
        self._patches.install(windows.patch(), *deferral.patches())
        if self._settings.ramp_lr_rule != "none":
            optimizers = trainer.optimizer, getattr(trainer, "sidecar_optimizer", None)
            self._patches.install(*rate_patches(self._factor, *optimizers))

    def _opened(self, window: Window) -> None:
        self._first, self._last = self._first or window, window

    def metrics(self, values: dict[str, Any]) -> None:
        if self._last is not None:
            values.update({EFFECTIVE_KEY: self._last.effective, ACCUMULATION_KEY: self._last.accumulation})
        if isinstance(values.get("learning_rate"), int | float):
            values["learning_rate"] *= self._factor()  # the rate that was used, not the scheduler's

    def after_train(self, trainer: Any) -> None:
        self._patches.remove()
        if self._windows is not None:
            self._windows.let_go()

    def summary(self) -> dict[str, Any]:
        if self._first is None or self._last is None:
            return {}
        first, last = self._first.step, self._last.step
        changes = [self._first, *(window for window in self._ramp.changes if first < window.step <= last)]
        windows = [self._ramp.window(step) for step in range(first, last + 1)]
        return {
            "initial": self._ramp.initial,
            "target": self._ramp.target,
            "windows": [window.accumulation for window in windows],
            "changes": [
                {"step": window.step, "accumulation": window.accumulation, "effective": window.effective}
                for window in changes
            ],
            "samples": sum(window.effective for window in windows),
        }

    def telemetry(self) -> Mapping[str, Any]:
        """What the rest of the run takes: its steps are not as long as those before them."""
        if self._last is None:
            return {}
        end = max(int(self.runtime.trainer.config.max_train_steps), self._last.step + 1)
        return {"samples_left": self._ramp.window(end).samples - self._ramp.window(self._last.step + 1).samples}

    def _factor(self) -> float:
        return rate_factor(self._ramp, self._last.step, self._settings.ramp_lr_rule) if self._last else 1.0

    def _announce(self, notices: Sequence[str]) -> None:
        ramp = self._ramp
        if len(ramp.changes) > 1:  # else there is none, and the notices say why
            logger.info(
                "GH200 gradient accumulation ramp enabled (initial=%d, target=%d, ramp_steps=%d)",
                ramp.initial,
                ramp.target,
                ramp.ramp_steps,
            )
        for notice in notices:
            logger.warning("gh200: ramp: %s", notice)


def _data_parallel_size(accelerator: Any) -> int:
    """Ranks that see different samples; context-parallel ones share theirs."""
    from simpletuner.helpers.metadata.backends import base

    aware = getattr(base, "get_cp_aware_dp_info", None)
    return int(aware(accelerator)[0]) if aware is not None else int(accelerator.num_processes)


def _refuse_disagreement(accelerator: Any, ramp: GH200GradientRamp, step: int) -> None:
    """Ranks with different windows would wait for each other for ever, in the middle of one of them."""
    requested, at = from_main_process(accelerator, lambda: (ramp, step))
    if (requested, at) != (ramp, step):
        raise RunFailed(
            f"this rank would go on from step {step} with {ramp}, the main process from step {at} with {requested}",
            remedy="give every node the same configuration and the same checkpoint",
        )


def _allow_epochs(config: Any, ramp: GH200GradientRamp) -> None:
    """Upstream derived the epochs from the target; a ramp that starts above it consumes more."""
    batches = int(getattr(config, "total_num_batches", 0) or 0)
    if not batches:
        return
    needed = ceil(ramp.window(int(config.max_train_steps)).samples / ramp.unit / batches)
    if needed > config.num_train_epochs:
        logger.info("gh200: ramp: num_train_epochs %s -> %d, to reach max_train_steps", config.num_train_epochs, needed)
        config.num_train_epochs = needed


def refuse_impossible(config: Any, accelerator: Any) -> None:
    """Raise for a set-up in which windows of changing size would not weigh exactly 1."""
    plugin = getattr(getattr(accelerator, "state", None), "deepspeed_plugin", None)
    kind = str(getattr(accelerator, "distributed_type", "")).upper()
    deepspeed = plugin is not None or kind.endswith("DEEPSPEED") or getattr(config, "use_deepspeed_optimizer", False)
    for there, what, reason in (
        (deepspeed, "DeepSpeed", "its engine owns gradient accumulation"),
        (getattr(config, "ramtorch", False), "ramtorch", "it clears gradients after every micro-batch"),
        (
            getattr(config, "optimizer_release_gradients", False),
            "optimizer_release_gradients",
            "gradients are consumed during the backward pass, so that no window of them exists",
        ),
    ):
        if there:
            raise FeatureUnavailable(
                f"the batch ramp can't work with {what}: {reason}",
                remedy=f'train without {what}, or set "enable_batch_size_rampup": false',
            )


FEATURE = RampFeature
