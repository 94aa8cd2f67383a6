"""The cost of a block with products in 8 bits: their speed, and the traffic of the casts before them.

Bytes per element of 16 bits are those of `torchao/testing/training/roofline_utils.py`, for compiled layers.
Tensorwise, the first product of an operand reads it for the largest absolute value (2). It reads it again (2)
and writes it (1). Its second product adds a write (1), or a second cast of a weight (3).
Rowwise, the first product reads (2) and writes (1). Its second product needs scales along the other side. It
transposes the operand (4, or 2 while the operand is in the first cast), and casts it (3).

Backward passes keep the operands in the training's precision, as torchao's `matmul_with_hp_or_float8_args`
does. So the kept activations are those of the unchanged layer. The price of emulation is not modelled.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from weft.describe.device import FP8
from weft.describe.families.transformer import transposed_input, transposed_weight
from weft.describe.job import Job
from weft.describe.layer import FP8_PRODUCT, Layer, Matmul, PassWork
from weft.describe.layer_choices import LayerOption, Value
from weft.methods.fp8_linears.options import NAME, RECIPES
from weft.methods.fp8_linears.products import MULTIPLE, converted

ELEMENT_BYTES = 2.0


@dataclass(frozen=True, slots=True)
class _Cast:
    """The cast of one operand: bytes moved per element, and kernels."""

    moved: float
    kernels: int


# By recipe: the casts of both operands of the output, and of the gradients of the input and of the weight.
_CASTS = {
    "tensorwise": (
        (_Cast(5.0, 3), _Cast(5.0, 3)),
        (_Cast(5.0, 3), _Cast(3.0, 1)),
        (_Cast(1.0, 0), _Cast(1.0, 0)),
    ),
    "rowwise": (
        (_Cast(3.0, 1), _Cast(3.0, 1)),
        (_Cast(3.0, 1), _Cast(7.0, 2)),
        (_Cast(5.0, 1), _Cast(5.0, 1)),
    ),
}


def refuse(layer: Layer, value: Value) -> str | None:
    if value not in RECIPES:
        return f"{value!r} is not one of {', '.join(RECIPES)}"
    if not converted(layer):
        return f"{layer.name} is no block with linear products of multiples of {MULTIPLE}"
    return None


def refuse_job(job: Job) -> str | None:
    """Return the reason why a job's devices or precision cannot multiply in 8 bits, or None."""
    devices = [group.device for group in job.cluster.groups if not group.device.synchronous]
    lacking = sorted({device.name for device in devices if FP8 not in device.flops_per_s})
    if lacking:
        return f"{', '.join(lacking)} cannot multiply in fp8; leave the table out"
    if job.precision == "fp16" or (devices and job.precision != "bf16"):
        return f'operands are cast from bf16, and not from {job.precision}; nearest train.precision: "bf16"'
    return None


def changed(layer: Layer, value: Value, sequence: int) -> Layer:
    """Return the block with its products in 8 bits."""
    products = converted(layer)
    output, of_input, of_weight = _CASTS[str(value)]
    return replace(
        layer,
        forward=_cast(layer.forward, products, *output),
        backward_input=_cast(layer.backward_input, map(transposed_weight, products), *of_input),
        backward_weight=_cast(layer.backward_weight, map(transposed_input, products), *of_weight),
    )


def _cast(work: PassWork, products: Iterable[Matmul], left: _Cast, right: _Cast) -> PassWork:
    """Return a pass with these of its products in 8 bits, and with the casts of their two operands."""
    chosen, memory, kernels = set(products), work.memory, work.kernels
    for one in work.matmuls:
        if one in chosen:
            memory += one.rows * one.inner * (left.moved / ELEMENT_BYTES)
            memory += one.inner * one.columns * (right.moved / ELEMENT_BYTES)
            kernels += left.kernels + right.kernels
    matmuls = tuple(replace(one, kernel=FP8_PRODUCT) if one in chosen else one for one in work.matmuls)
    return PassWork(matmuls, memory, kernels)


OPTION = LayerOption(name=NAME, refuse=refuse, changed=changed, refuse_job=refuse_job)
