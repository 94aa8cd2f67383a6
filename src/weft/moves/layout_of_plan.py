"""The layout from which a plan was built, or the nearest layout."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from weft.describe.layout import KEPT_IN_PLANS, Layout, rank_order_of
from weft.describe.loss_choice import loss_of
from weft.describe.plan import AXES, RECOMPUTES, Plan
from weft.errors import InputError, Violation
from weft.moves.layout import parts_of, rank_table
from weft.program.schedules import get_schedule
from weft.program.schedules.base import Pipeline, paths_of, placements


def layout_of(plan: Plan, layer_seconds: Sequence[float] | None = None) -> Layout:
    """Return the layout from which `plan` was built.

    A plan does not contain the reason for its cuts. So `layers_per_stage` is None if `layer_seconds` are
    given and balance the stages with the same cuts.

    Raises:
        InputError: when stages or replicas differ in a decision that a layout has once for all of them.
    """
    shares = {tuple(copy.micro_batches for copy in stage.replicas) for stage in plan.stages}
    widths = {len(copy.ranks) for stage in plan.stages for copy in stage.replicas}
    if max(len(shares), len(widths)) != 1:
        raise InputError(Violation("plan", "its stages differ in number, share or width of their replicas"))
    layers = [layer for stage in plan.stages for layer in stage.layers]
    if layers != list(range(len(layers))):
        raise InputError(Violation("plan", "its stages are no cuts of a chain of layers, in their order"))
    if len(plan.stages) % plan.pp:
        problem = f"{len(plan.stages)} stages are not as many for each of {plan.pp} devices"
        raise InputError(Violation("plan", problem))
    (share,), paths = shares, paths_of(get_schedule(plan.schedule.name))
    each = tuple(sum(share[first : first + paths]) for first in range(0, len(share), paths))
    splits = tuple(stage.splits for stage in plan.stages)
    layout = replace(
        _alike(plan, dp=len(each), width=widths.pop()),
        layers_per_stage=tuple(len(stage.layers) for stage in plan.stages),
        micro_batches_per_replica=None if len(set(each)) == 1 else each,
        splits=splits if max(splits) > 1 else (),
    ).recomputing([stage.recompute for stage in plan.stages])
    if layer_seconds is not None:
        balanced = parts_of(replace(layout, layers_per_stage=None), layer_seconds)
        if [list(stage.layers) for stage in plan.stages] == balanced:
            layout = replace(layout, layers_per_stage=None)
    return replace(layout, rank_order=_rank_order_of(plan, layout))


def said_as_layout(plan: Plan) -> Layout | None:
    """Return the layout of a plan; None if its stages are no cuts of the layers in their order."""
    try:
        layout = layout_of(plan)
    except InputError:
        return None
    return layout if layout.stages > 1 else replace(layout, layers_per_stage=None)


def usual_layout_of(plan: Plan) -> Layout:
    """Return a plan's nearest layout with equal stages: most frequent sizes, heaviest recomputation."""
    paths = paths_of(get_schedule(plan.schedule.name))
    copies = _usual([len(stage.replicas) for stage in plan.stages])
    width = _usual([len(copy.ranks) for stage in plan.stages for copy in stage.replicas])
    heaviest = max((stage.recompute for stage in plan.stages), key=RECOMPUTES.index)
    return _alike(plan, dp=max(1, copies // paths), width=width).recomputing(heaviest)


def _alike(plan: Plan, *, dp: int, width: int) -> Layout:
    """Return the layout of a plan's common decisions, with `dp` pipelines and replicas of `width` ranks."""
    # The tensor-parallel degree is `width` divided by the other axes, in stages of every width.
    degrees: dict[str, Any] = {axis: plan.mesh.get(axis, 1) for axis in AXES} | {
        "pp": plan.pp,
        "dp": dp,
        "tp": 1,
    }
    layout = Layout(
        **degrees,
        loops=-(-len(plan.stages) // degrees["pp"]),
        schedule=plan.schedule.name,
        options=plan.schedule.options,
        sync=plan.sync.name,
        **{name: getattr(plan, name) for name in KEPT_IN_PLANS},
        **loss_of(plan.layer_choices),
    )
    return replace(layout, tp=width // layout.width)


def _usual(values: Sequence[int]) -> int:
    """Return the most frequent value, the smaller of equals."""
    counts = Counter(values)
    return min(counts, key=lambda value: (-counts[value], value))


def _rank_order_of(plan: Plan, layout: Layout) -> tuple[int, ...] | None:
    """Return the devices of the mesh's ranks in order; None if each rank is on the device of its number."""
    pipeline = Pipeline(layout.pp, layout.stages, plan.micro_batches // layout.dp)
    placement = placements(get_schedule(layout.schedule), pipeline)
    table = rank_table((layout.pp, layout.dp, layout.width)).tolist()
    order: dict[int, int] = {}
    for stage, devices in zip(plan.stages, placement.T.tolist(), strict=True):
        for number, copy in enumerate(stage.replicas):
            pipeline_number, path = divmod(number, len(devices))
            places = table[devices[path]][pipeline_number]
            for place, rank in zip(places, copy.ranks, strict=True):
                if order.setdefault(place, rank) != rank:
                    stages = f"stages of device {devices[path]} of its pipelines"
                    raise InputError(Violation("plan", f"{stages} lie on ranks {order[place]} and {rank}"))
    return rank_order_of([order[place] for place in sorted(order)])
