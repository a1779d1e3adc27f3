"""A model on its way from its files: block by block to where it will live, the files' pages given back behind it.

SimpleTuner reads all weights into mappings of their files and then takes the whole model to the device (to quantise it,
and before adapters train). ``nn.Module._apply`` is the one way that every such move goes, so while a model is loaded we
stand behind it: after each of the denoiser's blocks has moved, and before the next does, features may take its weights
on to their home.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from simpletuner_gh200.config.blocks import MemorySettings, WeightSettings
from simpletuner_gh200.config.settings import Settings
from simpletuner_gh200.memory.weight_files import give_back, give_back_mapped
from simpletuner_gh200.seams.feature import Feature, Request
from simpletuner_gh200.seams.patch import Patch, Patches, wrap_method

if TYPE_CHECKING:
    import torch


class LoadingFeature(Feature):
    name = "loading"

    def __init__(self) -> None:
        self._patches = Patches()
        self._file_patches = Patches()
        self._moving: dict[int, list[torch.nn.Parameter]] = {}
        """Weights of each block of the denoiser that is moved now, by the module's id."""
        self._files: set[str] = set()
        self._behind_blocks = 0
        """Bytes given back while blocks were on their way."""

    def request(self, settings: Settings, environment: Mapping[str, str]) -> Request:
        part = settings.part(WeightSettings)
        if part.release_weight_files:
            return "requested"
        return "off" if part.weights == "hbm" and not releases(settings) else "auto"

    # -- moments ---------------------------------------------------------------------------------------

    def start(self, trainer: Any) -> None:
        import torch

        self._patches.install(wrap_method(torch.nn.Module, "_apply", self._applied))
        if releases(self.settings):
            self._file_patches.install(Patch(torch.UntypedStorage, "from_file", self._remembering))

    def _remembering(self, original: Any) -> Any:
        def from_file(filename: Any, *args: Any, **kwargs: Any) -> Any:
            self._files.add(os.path.realpath(os.fspath(filename)))
            return original(filename, *args, **kwargs)

        return staticmethod(from_file)

    def _applied(self, wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        if any(instance is one for one in denoisers(self.runtime.trainer)):
            from simpletuner_gh200.model.blocks import find_blocks

            found = find_blocks([instance])
            self._moving = {id(block.module): [piece.parameter for piece in block.pieces] for block in found}
            del found  # it holds where each weight was
            try:
                return wrapped(*args, **kwargs)
            finally:
                self._moving = {}
        weights = self._moving.get(id(instance))
        if weights is None:
            return wrapped(*args, **kwargs)
        before = _on_the_host(weights) if self._files else {}
        result = wrapped(*args, **kwargs)
        self.runtime.call("block_loaded", self.runtime.trainer, weights)
        left = before.items() - _on_the_host(weights).items()
        if left:
            self._behind_blocks += give_back_mapped(left, self._files)
        return result

    def data_ready(self, trainer: Any) -> None:
        """Text encoders and VAE have done their first work; what of them is still mapped stays."""
        self._give_back()

    def hooks_ready(self, trainer: Any) -> None:
        """The model is where it will be; others hold modules and make copies of them from here on."""
        self._patches.remove()

    def before_train(self, trainer: Any) -> None:
        """A checkpoint was read as well, into the weights where they are."""
        self._file_patches.remove()
        self._give_back()

    def _give_back(self) -> None:
        for path in self._files:
            give_back(path)

    def close(self) -> None:
        self._patches.remove()
        self._file_patches.remove()

    def summary(self) -> dict[str, Any]:
        return {"files": len(self._files), "given_back_behind_blocks": self._behind_blocks}


def releases(settings: Settings) -> bool:
    """Are files' pages to be given back?"""
    part = settings.part(WeightSettings)
    if part.release_weight_files is None:
        return part.weights != "hbm" or settings.part(MemorySettings).memory == "auto"
    return part.release_weight_files


def denoisers(trainer: Any) -> list[torch.nn.Module]:
    """What is trained, or stands beside it: modules of the run's model, as SimpleTuner names them."""
    import torch

    model = getattr(trainer, "model", None)
    found = (getattr(model, name, None) for name in ("model", "controlnet"))
    return [one for one in found if isinstance(one, torch.nn.Module)]


def _on_the_host(weights: Sequence[torch.nn.Parameter]) -> dict[int, int]:
    """Address -> bytes, of those that nobody else looks at."""
    from simpletuner_gh200.model.tensors import size_of, storage_users

    alone = (weight for weight in weights if weight.device.type == "cpu" and storage_users(weight) == 1)
    return {weight.data_ptr(): size_of(weight) for weight in alone}


FEATURE = LoadingFeature
