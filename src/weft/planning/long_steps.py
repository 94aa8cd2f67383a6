"""Prediction of steps of very many micro-batches from two shorter ones.

In a full pipeline each further round of micro-batches takes equally long and leaves equally many bytes. So
the step and the peaks of many rounds lie on a straight line through those of two shorter plans. Tests compare
it with whole simulations. It serves planners with thousands of predictions. A plan to run is always simulated
whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import lcm

from weft.describe.plan import Plan
from weft.describe.prediction import Prediction
from weft.planning.compile import compile_folded, pipeline_layout
from weft.predict.cost.placed_plan import CostModel, PlacedPlan
from weft.predict.cost.price import Priced, price_placed
from weft.predict.cost.residency import Held
from weft.predict.predict import predict_priced
from weft.program.program import Program
from weft.program.schedules import SCHEDULES
from weft.program.schedules.base import Pipeline
from weft.program.schedules.hybrid import Hybrid, depth_of
from weft.timeline.figures import bubble_fraction

# A round is one micro-batch for each device in line. The first rounds fill the pipeline.
FIRST_ROUNDS, ROUNDS_MORE = 2, 1
# Shorter steps than this are simulated whole.
SHORT = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class LongStep:
    """The prediction of a plan's step.

    `held` are the bytes that each simulated rank holds all the time, by name. `resident_bytes` are their
    sums, corrected as peaks. `waiting` is the share of the step in which devices wait.
    """

    prediction: Prediction
    held: Mapping[str, Held] = field(compare=False)
    resident_bytes: tuple[int, ...]
    waiting: float


PriceOf = Callable[[PlacedPlan, Program], Priced]


def predict_long(model: CostModel, plan: Plan, price: PriceOf = price_placed) -> LongStep:
    """Predict a step of a plan, with the prices that `price` gives; exact where it is short.

    Raises:
        InputError: see `predict`.
    """
    shorter, layout = _shorter(plan), pipeline_layout(plan, model.graph)
    programs = [
        compile_folded(one, model.graph, model.cluster, layout.of_length(length) if length else layout)
        for one, length in shorter or ((plan, None),)
    ]
    placed = PlacedPlan(program=programs[0], plan=plan, model=model.of(plan))
    steps = [_predicted(program, price(placed, program)) for program in programs]
    if shorter is None:
        return steps[0]
    near, far = steps
    (_, first), (_, second) = shorter
    rounds = (_share(plan) - first) / (second - first)

    def onward(one: float, other: float) -> float:
        return one + rounds * (other - one)

    def onward_each(ones: Sequence[int], others: Sequence[int]) -> tuple[int, ...]:
        return tuple(round(onward(*pair)) for pair in zip(ones, others, strict=True))

    before, after = near.prediction, far.prediction
    step_s = onward(before.step_s, after.step_s)
    prediction = Prediction(
        step_s=step_s,
        step_low_s=onward(before.step_low_s, after.step_low_s),
        step_high_s=onward(before.step_high_s, after.step_high_s),
        first_step_s=onward(before.first_step_s, after.first_step_s),
        peak_bytes=onward_each(before.peak_bytes, after.peak_bytes),
        peak_high_bytes=onward_each(before.peak_high_bytes, after.peak_high_bytes),
        communicator_bytes=after.communicator_bytes,
        source=after.source,
        shared=after.shared,
    )
    waited_s = onward(near.waiting * before.step_s, far.waiting * after.step_s)
    return replace(far, prediction=prediction, waiting=waited_s / step_s)


def _shorter(plan: Plan) -> tuple[tuple[Plan, int], tuple[Plan, int]] | None:
    """Return two shorter plans with their micro-batches per path, in place of the plan. Return None if it
    is short, or its order, which is not weft's own, may not go in rounds."""
    equal = all(len({copy.micro_batches for copy in stage.replicas}) == 1 for stage in plan.stages)
    if not equal or plan.schedule.name not in SCHEDULES:
        return None
    # Replicas of one stage take their turns at the same time.
    share, devices = _share(plan), plan.pp
    if plan.schedule.name == Hybrid.name:
        return _fewer_rounds(plan, share, devices)
    lengths = _lengths(share, devices)
    return None if lengths is None else ((plan, lengths[0]), (plan, lengths[1]))


def _share(plan: Plan) -> int:
    """Return the micro-batches of each path through a plan's pipelines (`weft.program.layout`)."""
    return plan.micro_batches // lcm(*plan.replicas)


def _lengths(share: int, devices: int) -> tuple[int, int] | None:
    # The rest of the last round stays the same.
    whole = max(devices, SHORT // devices * devices)
    rest = share % whole
    first = rest + FIRST_ROUNDS * whole
    second = first + ROUNDS_MORE * whole
    return (first, second) if share > second else None


def _fewer_rounds(plan: Plan, share: int, devices: int) -> tuple[tuple[Plan, int], tuple[Plan, int]] | None:
    """Return plans with fewer rounds of equally many micro-batches, or with equally many shorter rounds."""
    depth = depth_of(Pipeline(devices, len(plan.stages), share), plan.schedule.options)
    breadth = share // depth
    least = max(FIRST_ROUNDS, -(-SHORT // breadth))
    if depth > least + ROUNDS_MORE:
        counts = (least, least + ROUNDS_MORE)
        return _in_rounds(plan, counts[0], breadth), _in_rounds(plan, counts[1], breadth)
    lengths = _lengths(breadth, devices)
    if lengths is None:
        return None
    return _in_rounds(plan, depth, lengths[0]), _in_rounds(plan, depth, lengths[1])


def _in_rounds(plan: Plan, depth: int, breadth: int) -> tuple[Plan, int]:
    schedule = plan.schedule.model_copy(update={"options": {**plan.schedule.options, "depth": depth}})
    return plan.model_copy(update={"schedule": schedule}), depth * breadth


def _predicted(program: Program, priced: Priced) -> LongStep:
    step = predict_priced(program, priced)
    return LongStep(
        prediction=step.prediction,
        held=step.priced.held,
        resident_bytes=tuple(step.priced.corrected_peaks(step.priced.costs.base_bytes)[0].tolist()),
        waiting=bubble_fraction(step.simulation.timeline),
    )
