"""Seconds of one layer: its passes by the speeds of kernels, and its update."""

from __future__ import annotations

from dataclasses import dataclass

from weft.describe.amount import Shape
from weft.describe.device import PRECISION_BYTES, Device
from weft.describe.layer import Layer, PassWork
from weft.describe.layer_pieces import LayerPiece
from weft.describe.optimizers import ADAMW, OptimizerWork
from weft.predict.cost.memory import state_bytes
from weft.predict.cost.speeds import Speeds


@dataclass(frozen=True, slots=True)
class LayerTimes:
    """Seconds of one micro-batch through layers, and of one update of their parameters."""

    forward_s: float = 0.0
    backward_input_s: float = 0.0
    backward_weight_s: float = 0.0
    update_s: float = 0.0

    @property
    def backward_s(self) -> float:
        return self.backward_input_s + self.backward_weight_s

    def plus(self, other: LayerTimes, times: int) -> LayerTimes:
        return LayerTimes(
            self.forward_s + times * other.forward_s,
            self.backward_input_s + times * other.backward_input_s,
            self.backward_weight_s + times * other.backward_weight_s,
            self.update_s + times * other.update_s,
        )


def pass_s(work: PassWork, shape: Shape, precision: str, device: Device, speeds: Speeds) -> float:
    """Return seconds of one pass of one micro-batch through one layer."""
    seconds = sum(speeds.matmul_s(matmul.flops(shape), precision, matmul.kernel) for matmul in work.matmuls)
    moved = work.memory(shape) * PRECISION_BYTES[precision]
    if moved:
        kernels = max(1, work.kernels - len(work.matmuls))
        seconds += kernels * speeds.memory_s(moved / kernels)
    launches_s = work.kernels * speeds.launch_s
    return seconds + launches_s if device.synchronous else max(seconds, launches_s)


def roofline(
    layer: Layer,
    shape: Shape,
    precision: str,
    device: Device,
    speeds: Speeds,
    optimizer: OptimizerWork = ADAMW,
) -> LayerTimes:
    """Return the times of a layer by the speeds of its kernels."""
    parameters = layer.parameters(shape)
    return LayerTimes(
        pass_s(layer.forward, shape, precision, device, speeds),
        pass_s(layer.backward_input, shape, precision, device, speeds),
        pass_s(layer.backward_weight, shape, precision, device, speeds),
        speeds.memory_s(parameters * state_bytes(precision, optimizer).touched) if parameters else 0.0,
    )


def piece_times(
    piece: LayerPiece, shape: Shape, precision: str, device: Device, speeds: Speeds
) -> LayerTimes:
    """Return the times of a layer piece between two exchanges, by the speeds of its kernels."""
    return LayerTimes(
        pass_s(piece.forward, shape, precision, device, speeds),
        pass_s(piece.backward_input, shape, precision, device, speeds),
        pass_s(piece.backward_weight, shape, precision, device, speeds),
    )


def weight_share(layer: Layer, shape: Shape) -> float:
    """Return the weight gradients' share of the backward pass, by flops, else by elements moved."""
    input_part, weight_part = layer.backward_input, layer.backward_weight
    for works in (
        (input_part.flops(shape), weight_part.flops(shape)),
        (input_part.memory(shape), weight_part.memory(shape)),
    ):
        if sum(works):
            return works[1] / sum(works)
    return 0.5
