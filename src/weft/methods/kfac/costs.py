"""The costs of K-FAC: products of captured tensors, sums over replicas, inverses, and what they hold.

An inverse of n x n numbers takes n^3 operations: a Cholesky factor, and its inverse. They run in fp32. Tensor
ranks divide the products. They exchange the rows of divided features, and gather gradients of weights.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import numpy as np

from weft.describe.amount import Amount
from weft.describe.families.transformer import ONE
from weft.describe.layer import Matmul, PassWork
from weft.methods.kfac.kinds import owed_by
from weft.methods.kfac.linears import FACTORS, LinearLayers, Treated, read_treated
from weft.methods.kfac.options import FormName, options_of
from weft.predict.cost.hooks import CostHook, CostOf, Taken, by_table, collective_hook
from weft.predict.cost.memory import STEPPED_BYTES
from weft.predict.cost.network import Network
from weft.predict.cost.pricing import Pricing
from weft.predict.cost.residency import Held, ResidentBytes
from weft.program.arrays import Ints

# Seconds of an inverse over those of a product with as many operations, for n x n numbers: the first, and the
# second over n. `benchmarks/curvature.py` found 4.7, 3.3, 2.4, 2.0 and 1.7 on a CPU for n of 256 to 4096.
# Eigenvectors took 31, 17, 14 and 13 there, for n of 256 to 2048.
_SLOWDOWNS: Mapping[FormName, tuple[float, float]] = {"inverse": (1.55, 900.0), "eigen": (11.0, 4400.0)}
# Products with n x n numbers for each side of a gradient.
_PRODUCTS: Mapping[FormName, int] = {"inverse": 1, "eigen": 2}
_IN = "fp32"
_OWN_TOKENS = Amount.of(1.0, batch=1, sequence=1, tensor=1)


def _treated(pricing: Pricing) -> tuple[Treated, FormName]:
    found = options_of(pricing.plan)
    assert found is not None, "a program with these rows is of a plan with their options"
    return read_treated(found.linears), found.form


def _squares(factors: Sequence[tuple[int, int | None]]) -> PassWork:
    """Return the products of a rank's rows of tensors, (rows, size), with themselves."""
    products = tuple(
        Matmul(count=ONE, rows=Amount.of(size), inner=_rows_of(rows), columns=Amount.of(size))
        for size, rows in factors
    )
    return PassWork(matmuls=products, kernels=len(products))


def _rows_of(rows: int | None) -> Amount:
    """Return the vectors of a micro-batch on a tensor rank that a factor is made of."""
    return _OWN_TOKENS if rows is None else Amount.of(rows, batch=1)


def _inverse(size: int, form: FormName) -> PassWork:
    slowdown, of_small = _SLOWDOWNS[form]
    operations = (slowdown + of_small / size) * size**3
    # A product of 2 n m k operations.
    product = Matmul(
        count=ONE,
        rows=Amount.of(size),
        inner=Amount.of(operations / (2.0 * size**2)),
        columns=Amount.of(size),
    )
    return PassWork(matmuls=(product,), kernels=3)


def _preconditioning(layers: Iterable[LinearLayers], form: FormName) -> PassWork:
    """Return the products for a rank's gradient of each weight."""
    products = []
    for one in (operand for layer in layers for operand in layer.operands):
        inner, own_inner = Amount.of(one.inner), Amount.of(one.inner, tensor=int(one.divides_inner))
        for size in one.columns:
            columns, own_columns = Amount.of(size), Amount.of(size, tensor=int(not one.divides_inner))
            products.append(Matmul(count=ONE, rows=own_columns, inner=inner, columns=own_inner))
            products.append(Matmul(count=ONE, rows=own_columns, inner=columns, columns=own_inner))
    products *= _PRODUCTS[form]
    return PassWork(matmuls=tuple(products), kernels=len(products))


# From the linear layers of a plan, its form of results, a stage's layers and a row's part to its work.
WorkOf = Callable[[Treated, FormName, Sequence[int], int], PassWork]
# From a stage, the ranks of a replica that divide it, and a row's part to the seconds of their exchanges.
ExchangedOf = Callable[[Pricing, int, Sequence[int], int], float]


def _nothing_s(pricing: Pricing, stage: int, ranks: Sequence[int], part: int) -> float:
    return 0.0


def _computation(work_of: WorkOf, *, captured: bool, exchanged_of: ExchangedOf = _nothing_s) -> CostHook:
    """Return the cost hook of some work; `captured`: in the plan's precision."""

    def hook(pricing: Pricing, rows: Ints) -> Taken:
        treated, form = _treated(pricing)
        placed, columns, compute = pricing.placed, pricing.program.columns, pricing.model.compute
        precision = pricing.plan.precision if captured else _IN

        def place_s(stage: int, part: int, devices: int, replica: int) -> tuple[float, float, float]:
            work = work_of(treated, form, pricing.plan.stages[stage].layers, part)
            shape, ranks = placed.shape(stage), pricing.plan.stages[stage].replicas[replica].ranks
            each = zip(placed.device_sets[devices], placed.speed_sets[devices], strict=True)
            seconds = max(
                pricing.in_program_s(compute.work_s(work, shape, precision, device), device, speed)
                for device, speed in each
            )
            exchanged_s = exchanged_of(pricing, stage, ranks, part) if len(ranks) > 1 else 0.0
            return seconds + exchanged_s, 0.0, 0.0

        sets = placed.device_set_of_rank[columns.rank[rows]]
        # Exchanges depend on the replica's ranks.
        replica = columns.replica[rows] if pricing.plan.grid(0).tensor > 1 else np.zeros_like(rows)
        taken = by_table(place_s, columns.stage[rows], columns.part[rows], sets, replica)
        stages = {(int(stage), int(one)) for stage, one in zip(columns.stage[rows], sets, strict=True)}
        used = [times for place in stages for times in placed.stage_times[place]]
        return taken._replace(
            spread=max(times.half_width for times in used), sources=frozenset(times.source for times in used)
        )

    return hook


def _held(pricing: Pricing) -> Held:
    """Return the bytes of factors and inverses, and of captured tensors until the last one is used."""
    held, owed, plan = np.zeros(pricing.program.ranks, dtype=np.int64), owed_by(pricing.program), pricing.plan
    if owed is None:
        return Held(held)
    (treated, _), element = _treated(pricing), STEPPED_BYTES[plan.precision]
    for stage, layers in enumerate(owed.layers):
        shape = pricing.placed.shape(stage)
        factors = [one for layer in layers for side in (0, 1) for one in treated[layer].factors(side)]
        # A factor, its inverse, and the next one until all of a layer are there.
        matrices = 3 * element * sum(size * size for size, _ in factors)
        elements = sum(round(_rows_of(rows)(shape)) * size for size, rows in factors)
        captured = plan.element_bytes * elements * plan.stages[stage].replicas[0].micro_batches
        held[pricing.placed.ranks_of_stage[stage]] += matrices + captured
    return Held(held, source="counted by linear layers")


def _rows_s(pricing: Pricing, stage: int, ranks: Sequence[int], layer: int, side: int) -> float:
    """Return the seconds in which ranks exchange a micro-batch's rows of one side of a layer."""
    (treated, _), shape = _treated(pricing), pricing.placed.shape(stage)
    divided = zip(treated[layer].factors(side), treated[layer].divides(side), strict=True)
    elements = sum(_rows_of(rows)(shape) * size for (size, rows), divides in divided if divides)
    return pricing.model.network.all_to_all(ranks, round(pricing.plan.element_bytes * elements)).seconds


def _gradients_s(pricing: Pricing, stage: int, ranks: Sequence[int], part: int) -> float:
    """Return the seconds in which ranks gather the gradient of each weight."""
    (treated, form), element = _treated(pricing), STEPPED_BYTES[pricing.plan.precision]
    layers = (treated[layer] for layer in pricing.plan.stages[stage].layers if layer in treated)
    sizes = Counter(size for layer in layers for one in layer.operands for size in one.weights)
    gather = pricing.model.network.all_gather
    return _PRODUCTS[form] * sum(
        count * gather(ranks, element * size).seconds for size, count in sizes.items()
    )


def _curvature_cost(kind: str, side: int) -> CostOf:
    def work(treated: Treated, form: FormName, layers: Sequence[int], part: int) -> PassWork:
        return _squares(treated[part].factors(side))

    return CostOf(kind=kind, hook=_computation(work, captured=True, exchanged_of=partial(_rows_s, side=side)))


def _inverse_cost(kind: str, side: int) -> CostOf:
    def work(treated: Treated, form: FormName, layers: Sequence[int], part: int) -> PassWork:
        layer, number = divmod(part, FACTORS)
        return _inverse(treated[layer].sizes(side)[number], form)

    return CostOf(kind=kind, hook=_computation(work, captured=False))


def _stage_layers(treated: Treated, form: FormName, layers: Sequence[int], part: int) -> PassWork:
    return _preconditioning((treated[layer] for layer in layers if layer in treated), form)


_ON_WHOLE = _computation(_stage_layers, captured=False, exchanged_of=_gradients_s)


def _on_shards(pricing: Pricing, rows: Ints) -> Taken:
    """Return the times of products, divided among the ranks of a group, and of pieces that move.

    A rank sends one weight at most. It counts as an all-to-all of that many bytes to every rank but itself.
    """
    columns, groups = pricing.program.columns, pricing.program.groups
    products = _ON_WHOLE(pricing, rows)

    def moved_s(group: int, moved_bytes: int) -> tuple[float, float, float]:
        taken = pricing.model.network.all_to_all(groups[group], 2 * moved_bytes)
        return taken.seconds, 0.0, taken.link_s

    moved = by_table(moved_s, columns.group[rows], columns.bytes[rows])
    seconds = products.occupancy / pricing.plan.sharers(0) + moved.occupancy
    return products._replace(occupancy=seconds, link=moved.link)


_ADDED_UP = collective_hook(lambda pricing: Network.all_reduce)
COSTS = (
    _curvature_cost("input_curvature", 0),
    _curvature_cost("output_curvature", 1),
    CostOf(kind="reduce_input_curvature", hook=_ADDED_UP),
    CostOf(kind="reduce_output_curvature", hook=_ADDED_UP),
    _inverse_cost("invert_input_curvature", 0),
    _inverse_cost("invert_output_curvature", 1),
    CostOf(kind="precondition", hook=_ON_WHOLE),
    CostOf(kind="precondition_shards", hook=_on_shards),
    ResidentBytes(what="curvature", hook=_held),
)
