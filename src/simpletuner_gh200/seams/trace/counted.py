"""What one step takes, as numbers: what the tracing child answers and a plan reads. No torch here."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Counted:
    """Bytes, parameters and floating point operations of one step; additive in the number of alike blocks."""

    parameters: int = 0
    trained: int = 0
    weights: int = 0
    """Bytes of all parameters and buffers."""
    trained_bytes: int = 0
    stepped: int = 0
    """Trained parameters that got a gradient: an optimizer keeps state for no others."""
    gradients: int = 0
    saved: int = 0
    """What autograd keeps between forward and backward, each storage once."""
    saved_tensors: int = 0
    forward: int = 0
    """The most that was alive beyond the weights during the forward pass."""
    peak: int = 0
    """The most that was alive beyond the weights during the step, gradients included."""
    flops: int = 0

    def minus(self, other: Counted) -> Counted:
        return Counted(**{key: value - getattr(other, key) for key, value in asdict(self).items()})
