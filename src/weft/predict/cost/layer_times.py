"""Seconds of one layer: its passes by the speeds of kernels, and its update."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Protocol

from weft.describe.amount import Shape
from weft.describe.catalogue import catalogue
from weft.describe.device import FP8, PRECISION_BYTES, Device
from weft.describe.layer import (
    FP8_PRODUCT,
    FP32_PRODUCT,
    GRADIENT_PRODUCT,
    LOW_RANK_PRODUCT,
    PLAIN_PRODUCT,
    Layer,
    PassWork,
)
from weft.describe.layer_pieces import LayerPiece
from weft.describe.optimizers import ADAMW, OptimizerWork
from weft.errors import InputError, Violation, require_choice
from weft.predict.cost.hidden_matrices import orthogonalise_s
from weft.predict.cost.host_launches import BACKWARD_LAUNCHES, COLLECTIVE_LAUNCHES, FORWARD_LAUNCHES, pace
from weft.predict.cost.memory import state_bytes
from weft.predict.profile import MachineMeasurement, seconds_of_speeds, value_at

# Shares of the data-sheet peaks that large kernels reach, and the time of every kernel's start and end, in
# host launches. A kernel of x flops reaches share * x / (x + x_half); x_half is the work of a large kernel in
# the start-up time. The catalogue has shares of products by device, measured by others; MATMUL_SHARE is for
# devices without. With 0.869 of an A100, the two others are fitted to the eight training runs on A100 of
# tables 3 and 5 of Korthikanti et al., arXiv 2205.05198; tests/predict/cost/test_korthikanti.py keeps the
# residuals.
MATMUL_SHARE = 0.82
MEMORY_SHARE = 0.65
START_UP_LAUNCHES = 1.0
_FP32 = "fp32"

# Speed of a kernel relative to a large plain product, in products of the whole square of scores; that of
# attention is at `FLASH_TOKENS`. A product of 8 bits is assumed to reach the same share of its own peak, as
# in torchao's roofline_utils.py, unless the catalogue knows. By its release notes, FlashAttention reaches 25
# to 40 % of the peak on an A100, FlashAttention-2 50 to 73 %. A backward pass repeats the scores there: 3.5
# forward passes are done and 3 counted. With causal masks both skip half of the square, at the lower end of
# these. Stored scores are many small products.
KERNEL_SPEEDS: Mapping[str, float] = {
    PLAIN_PRODUCT: 1.0,
    FP8_PRODUCT: 1.0,
    GRADIENT_PRODUCT: 1.0,
    LOW_RANK_PRODUCT: 1.0,
    "scores": 0.7,
    FP32_PRODUCT: 0.7,
    "flash1": 0.35,
    "flash1-causal": 0.51,
    "flash2": 0.60,
    "flash2-causal": 0.95,
}
# On GPUs a flash kernel of s tokens reaches s / (s + half) of its speed on long ones: blocks on the diagonal
# of a causal mask are half idle, and short rows fill few processors. Fitted to the times of Triton's tutorial
# of fused attention (triton-lang.org, tutorial 06), 32 heads of 64, forward and backward. From 1,024 to
# 16,384 tokens its causal kernels become about 1.6 times as fast, the others 1.2 times.
FLASH_TOKENS = 2048
_FLASH_HALVES: Mapping[str, float] = {
    "flash1": 150.0,
    "flash1-causal": 640.0,
    "flash2": 150.0,
    "flash2-causal": 640.0,
}


def length_factor(kernel: str, tokens: float) -> float:
    """Return the speed of a kernel on sequences of so many tokens, over that on `FLASH_TOKENS`."""
    half = _FLASH_HALVES.get(kernel, 0.0)
    return tokens * (FLASH_TOKENS + half) / (FLASH_TOKENS * (tokens + half))


@cache
def _matmul_share(device: str, precision: str, kernel: str) -> float:
    """Return the share of its own peak that a large kernel reaches, by the catalogue where it knows."""
    entry = catalogue().get(device)
    needed = FP8 if kernel == FP8_PRODUCT else precision
    share = MATMUL_SHARE if entry is None else entry.matmul_shares.get(needed, MATMUL_SHARE)
    flash = entry.flash_share if entry is not None and kernel in _FLASH_HALVES else 1.0
    return share * KERNEL_SPEEDS[kernel] * flash


class Speeds(Protocol):
    """Seconds of one kernel on an idle device, without its launch by the host."""

    @property
    def launch_s(self) -> float: ...

    @property
    def precisions(self) -> Collection[str]:
        """The precisions with known products."""
        ...

    def matmul_s(
        self, flops: float, precision: str, kernel: str = PLAIN_PRODUCT, tokens: float = FLASH_TOKENS
    ) -> float:
        """Return seconds of a product; `tokens` of a sequence matter to attention."""
        ...

    def memory_s(self, moved_bytes: float) -> float: ...


@dataclass(frozen=True, slots=True)
class DataSheetSpeeds:
    """Peaks of the data sheet times the efficiency of a kernel of the given size."""

    device: Device

    @property
    def launch_s(self) -> float:
        return self.device.launch_s

    @property
    def precisions(self) -> Collection[str]:
        return self.device.flops_per_s.keys()

    def matmul_s(
        self, flops: float, precision: str, kernel: str = PLAIN_PRODUCT, tokens: float = FLASH_TOKENS
    ) -> float:
        """Return seconds; raise InputError for a precision that the device lacks, or an unknown kernel."""
        require_choice("kernel", kernel, KERNEL_SPEEDS)
        peak = _peak(self.device, precision, kernel)
        share = _matmul_share(self.device.name, precision, kernel)
        if not self.device.synchronous:
            share *= length_factor(kernel, tokens)
        return flops / (peak * share) + self._start_up_s

    def memory_s(self, moved_bytes: float) -> float:
        return moved_bytes / (self.device.memory_bytes_per_s * MEMORY_SHARE) + self._start_up_s

    @property
    def _start_up_s(self) -> float:
        # The processor of a synchronous device is its own host, without start-up time.
        return 0.0 if self.device.synchronous else START_UP_LAUNCHES * self.device.launch_s


class MeasuredSpeeds:
    """Tables measured kernel by kernel; the one launch inside each time is taken out.

    Products of attention count as plain ones; only a profile of the layers has separate times of its kernels.
    Those in fp32 have its table. A product of 8 bits takes a plain one's time, divided by the quotient of the
    data sheet's peaks.
    """

    def __init__(self, machine: MachineMeasurement, device: Device) -> None:
        self.launch_s = machine.launch_s
        self._device = device
        self._matmul = {name: seconds_of_speeds(table) for name, table in machine.matmul.items()}
        self._memory = seconds_of_speeds(machine.memory)

    @property
    def precisions(self) -> Collection[str]:
        return self._matmul.keys()

    def matmul_s(
        self, flops: float, precision: str, kernel: str = PLAIN_PRODUCT, tokens: float = FLASH_TOKENS
    ) -> float:
        known = _FP32 if kernel == FP32_PRODUCT and _FP32 in self._matmul else precision
        seconds = max(0.0, value_at(self._matmul[known], flops) - self.launch_s)
        if kernel != FP8_PRODUCT:
            return seconds
        return seconds * _peak(self._device, precision) / _peak(self._device, precision, kernel)

    def memory_s(self, moved_bytes: float) -> float:
        return max(0.0, value_at(self._memory, moved_bytes) - self.launch_s)


def _peak(device: Device, precision: str, kernel: str = PLAIN_PRODUCT) -> float:
    """Return the data-sheet peak of a kernel; a synchronous device emulates 8 bits in the given precision.

    Raises:
        InputError: for a precision that the device lacks.
    """
    needed = FP8 if kernel == FP8_PRODUCT and not device.synchronous else precision
    if kernel == FP32_PRODUCT and _FP32 in device.flops_per_s:
        needed = _FP32
    peak = device.flops_per_s.get(needed)
    if peak is None:
        has = ", ".join(sorted(device.flops_per_s))
        raise InputError(
            Violation("precision", f"{needed!r} is not supported by {device.name}; it has {has}")
        )
    return peak


@dataclass(frozen=True, slots=True)
class LayerTimes:
    """Seconds of one micro-batch through layers, and of one update of their parameters.

    `issue_forward_s` and `issue_backward_s` are those of a host that issues the kernels of both passes one by
    one. They are 0 where the device is its own host, and where layers were timed as wholes.
    """

    forward_s: float = 0.0
    backward_input_s: float = 0.0
    backward_weight_s: float = 0.0
    update_s: float = 0.0
    issue_forward_s: float = 0.0
    issue_backward_s: float = 0.0

    @property
    def backward_s(self) -> float:
        return self.backward_input_s + self.backward_weight_s

    def issued(self) -> LayerTimes:
        """Return the times on a device that waits for its host, without exchanges."""
        factor = pace(self.forward_s + self.backward_s, 0.0, self.issue_forward_s + self.issue_backward_s)
        return replace(
            self,
            forward_s=factor * self.forward_s,
            backward_input_s=factor * self.backward_input_s,
            backward_weight_s=factor * self.backward_weight_s,
        )

    def plus(self, other: LayerTimes, times: int) -> LayerTimes:
        return LayerTimes(
            self.forward_s + times * other.forward_s,
            self.backward_input_s + times * other.backward_input_s,
            self.backward_weight_s + times * other.backward_weight_s,
            self.update_s + times * other.update_s,
            self.issue_forward_s + times * other.issue_forward_s,
            self.issue_backward_s + times * other.issue_backward_s,
        )


def pass_s(work: PassWork, shape: Shape, precision: str, device: Device, speeds: Speeds) -> float:
    """Return the device's seconds of one pass of one micro-batch through one layer."""
    seconds = sum(
        speeds.matmul_s(matmul.flops(shape), precision, matmul.kernel, shape.sequence)
        for matmul in work.matmuls
    )
    moved = work.memory(shape) * PRECISION_BYTES[precision]
    if moved:
        kernels = max(1, work.kernels - len(work.matmuls))
        seconds += kernels * speeds.memory_s(moved / kernels)
    return seconds + work.kernels * speeds.launch_s if device.synchronous else seconds


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
    touched = parameters * state_bytes(precision, optimizer).touched
    times = piece_times(layer, shape, precision, device, speeds)
    if shape.tensor_parallel > 1 and layer.tensor_reduced.terms and not device.synchronous:
        calls_s = COLLECTIVE_LAUNCHES * layer.tensor_exchanges * speeds.launch_s
        issued = times.issue_forward_s + calls_s, times.issue_backward_s + calls_s
        times = replace(times, issue_forward_s=issued[0], issue_backward_s=issued[1])
    if not parameters:
        return times
    iterated_s = orthogonalise_s(layer, shape, precision, device, speeds, optimizer)
    return replace(times, update_s=speeds.memory_s(touched) + iterated_s)


def piece_times(
    piece: Layer | LayerPiece, shape: Shape, precision: str, device: Device, speeds: Speeds
) -> LayerTimes:
    """Return the times of a layer, or of its piece between two exchanges, without any update."""
    launch_s = 0.0 if device.synchronous else speeds.launch_s
    backward_kernels = piece.backward_input.kernels + piece.backward_weight.kernels
    return LayerTimes(
        pass_s(piece.forward, shape, precision, device, speeds),
        pass_s(piece.backward_input, shape, precision, device, speeds),
        pass_s(piece.backward_weight, shape, precision, device, speeds),
        issue_forward_s=FORWARD_LAUNCHES * piece.forward.kernels * launch_s,
        issue_backward_s=BACKWARD_LAUNCHES * backward_kernels * launch_s,
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
