"""Bytes of a rank: states of its parameters, activations kept for backward passes, buffers, slack."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from weft.describe.amount import Shape
from weft.describe.device import PRECISION_BYTES
from weft.describe.layer_graph import LayerGraph
from weft.errors import InputError, Violation

# Share of all allocated bytes that a caching allocator loses to rounding and fragments.
ALLOCATOR_SLACK = 0.03


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBytes:
    """Bytes per parameter that a rank holds between steps; a property of precision and optimizer."""

    weights: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer

    @property
    def touched(self) -> int:
        """Bytes read and written by one update: gradients are read, everything else is read and written."""
        return self.gradients + 2 * (self.weights + self.optimizer)


_MIXED = StateBytes(weights=2, gradients=4, optimizer=12)

# 16-bit training keeps an fp32 master copy and accumulates gradients in fp32: 18 bytes, as in Korthikanti et
# al., arXiv 2205.05198.
STATE_BYTES: Mapping[tuple[str, str], StateBytes] = {
    ("fp64", "adamw"): StateBytes(weights=8, gradients=8, optimizer=16),
    ("fp32", "adamw"): StateBytes(weights=4, gradients=4, optimizer=8),
    ("bf16", "adamw"): _MIXED,
    ("fp16", "adamw"): _MIXED,
}


def state_bytes(precision: str, optimizer: str = "adamw") -> StateBytes:
    """The declared bytes per parameter.

    Raises:
        InputError: for a combination that is not declared.
    """
    known = STATE_BYTES.get((precision, optimizer))
    if known is None:
        declared = ", ".join(f"{p} with {o}" for p, o in STATE_BYTES)
        raise InputError(Violation("states", f"{precision} with {optimizer} is not one of {declared}"))
    return known


def gradient_element_bytes(precision: str) -> int:
    """Bytes of one gradient element, as it is accumulated and reduced."""
    return state_bytes(precision).gradients


def stage_parameters(graph: LayerGraph, layers: Sequence[int], shape: Shape) -> int:
    """Count of parameters that one tensor rank holds of a stage."""
    return round(sum(graph.layers[index].parameters(shape) for index in layers))


def stage_kept_bytes(graph: LayerGraph, layers: Sequence[int], shape: Shape, precision: str) -> int:
    """Bytes that one micro-batch leaves in a stage from its forward to its backward pass, per tensor rank."""
    element = PRECISION_BYTES[precision]
    chosen = [graph.layers[index] for index in layers]
    return round(sum(layer.kept(shape) * element + layer.kept_bytes(shape) for layer in chosen))
