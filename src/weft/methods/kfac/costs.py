"""The costs of K-FAC: products of captured tensors, sums over replicas, inverses, and what they hold.

An inverse of n x n numbers takes n^3 operations: a Cholesky factor, and its inverse. They run in fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain

import numpy as np

from weft.describe.amount import Amount
from weft.describe.families.transformer import ONE, TOKENS
from weft.describe.layer import Matmul, PassWork
from weft.methods.kfac.kinds import FACTORS, owed_by
from weft.methods.kfac.options import Operand, options_of, read_operands
from weft.predict.cost.hooks import CostHook, CostOf, Taken, by_table, collective_hook
from weft.predict.cost.memory import STEPPED_BYTES
from weft.predict.cost.network import Network
from weft.predict.cost.pricing import Pricing
from weft.predict.cost.residency import Held, ResidentBytes
from weft.program.arrays import Ints

# Seconds of a Cholesky factor and its inverse over those of a product with as many operations: 2 to 5 on CPUs
# for sizes of 256 to 4096. `benchmarks/curvature` measures it.
_INVERSE_SLOWDOWN = 3.0
_IN = "fp32"


def _operands(pricing: Pricing) -> tuple[Operand, ...]:
    found = options_of(pricing.plan)
    assert found is not None, "a program with these rows is of a plan with their options"
    return read_operands(found.operands)


def _squares(sizes: Sequence[int]) -> PassWork:
    """Return the products of a tensor, (tokens, size), with itself."""
    products = (Matmul(count=ONE, rows=Amount.of(n), inner=TOKENS, columns=Amount.of(n)) for n in sizes)
    return PassWork(matmuls=tuple(products), kernels=len(sizes))


def _inverse(size: int) -> PassWork:
    operations = _INVERSE_SLOWDOWN * size**3
    # A product of 2 n m k operations.
    product = Matmul(
        count=ONE,
        rows=Amount.of(size),
        inner=Amount.of(operations / (2.0 * size**2)),
        columns=Amount.of(size),
    )
    return PassWork(matmuls=(product,), kernels=3)


def _preconditioning(operands: Sequence[Operand], blocks: int) -> PassWork:
    products = []
    for one in operands:
        inner = Amount.of(one.inner)
        for size in one.columns:
            columns = Amount.of(size)
            products.append(Matmul(count=Amount.of(blocks), rows=columns, inner=inner, columns=inner))
            products.append(Matmul(count=Amount.of(blocks), rows=columns, inner=columns, columns=inner))
    return PassWork(matmuls=tuple(products), kernels=len(products) * blocks)


def _columns(operands: Sequence[Operand]) -> list[int]:
    return list(chain.from_iterable(one.columns for one in operands))


def _inner(operands: Sequence[Operand]) -> list[int]:
    return [one.inner for one in operands]


WorkOf = Callable[[Pricing, tuple[Operand, ...], int, int], PassWork]


def _computation(work_of: WorkOf, *, captured: bool) -> CostHook:
    """Return the cost hook of work given by operands, stage and part; `captured`: in the plan's precision."""

    def hook(pricing: Pricing, rows: Ints) -> Taken:
        operands, placed, columns = _operands(pricing), pricing.placed, pricing.program.columns
        compute = pricing.model.compute
        precision = pricing.plan.precision if captured else _IN

        def place_s(stage: int, part: int, devices: int) -> tuple[float, float, float]:
            work, shape = work_of(pricing, operands, stage, part), placed.shape(stage)
            each = zip(placed.device_sets[devices], placed.speed_sets[devices], strict=True)
            seconds = (
                pricing.in_program_s(compute.work_s(work, shape, precision, device), device, speed)
                for device, speed in each
            )
            return max(seconds), 0.0, 0.0

        sets = placed.device_set_of_rank[columns.rank[rows]]
        taken = by_table(place_s, columns.stage[rows], columns.part[rows], sets)
        stages = {(int(stage), int(one)) for stage, one in zip(columns.stage[rows], sets, strict=True)}
        used = [times for place in stages for times in placed.stage_times[place]]
        return taken._replace(
            spread=max(times.half_width for times in used), sources=frozenset(times.source for times in used)
        )

    return hook


def _blocks(pricing: Pricing, stage: int) -> int:
    owed = owed_by(pricing.program)
    return len(owed.blocks[stage]) if owed is not None else 0


def _held(pricing: Pricing) -> Held:
    """Return the bytes of factors and inverses, and of captured tensors until the last one is used."""
    held, owed, plan = np.zeros(pricing.program.ranks, dtype=np.int64), owed_by(pricing.program), pricing.plan
    if owed is None:
        return Held(held)
    operands = _operands(pricing)
    sizes = [*_inner(operands), *_columns(operands)]
    element = STEPPED_BYTES[plan.precision]
    for stage, blocks in enumerate(owed.blocks):
        shape = pricing.placed.shape(stage)
        tokens = shape.micro_batch_size * shape.sequence
        micro_batches = plan.stages[stage].replicas[0].micro_batches
        # A factor and its inverse, and while inverses are made, one more.
        matrices = 2 * element * sum(size * size for size in sizes)
        captured = plan.element_bytes * tokens * micro_batches * sum(sizes)
        held[pricing.placed.ranks_of_stage[stage]] += len(blocks) * (matrices + captured)
    return Held(held, source="counted by linear layers")


_ADDED_UP = collective_hook(lambda pricing: Network.all_reduce)
COSTS = (
    CostOf(
        kind="input_curvature",
        hook=_computation(lambda pricing, operands, stage, part: _squares(_inner(operands)), captured=True),
    ),
    CostOf(
        kind="output_curvature",
        hook=_computation(lambda pricing, operands, stage, part: _squares(_columns(operands)), captured=True),
    ),
    CostOf(kind="reduce_input_curvature", hook=_ADDED_UP),
    CostOf(kind="reduce_output_curvature", hook=_ADDED_UP),
    CostOf(
        kind="invert_input_curvature",
        hook=_computation(
            lambda pricing, operands, stage, part: _inverse(_inner(operands)[part % FACTORS]), captured=False
        ),
    ),
    CostOf(
        kind="invert_output_curvature",
        hook=_computation(
            lambda pricing, operands, stage, part: _inverse(_columns(operands)[part % FACTORS]),
            captured=False,
        ),
    ),
    CostOf(
        kind="precondition",
        hook=_computation(
            lambda pricing, operands, stage, part: _preconditioning(operands, _blocks(pricing, stage)),
            captured=False,
        ),
    ),
    ResidentBytes(what="curvature", hook=_held),
)
