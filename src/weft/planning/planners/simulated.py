"""From a planner's candidate to its plan, priced by the simulator and judged by the memory model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from weft.describe.layout import Layout
from weft.describe.plan import Plan
from weft.describe.units import format_bytes, format_odds, format_seconds
from weft.errors import InputError
from weft.moves.layout import build_plan
from weft.moves.layout_of_plan import said_as_layout
from weft.planning.long_steps import LongStep
from weft.planning.planners.base import Candidate, Ranking, Verdict
from weft.planning.planners.bounds import Bounds, Holding
from weft.planning.problem import Problem
from weft.predict.engine import load_compiled_engine
from weft.program.schedules import get_schedule
from weft.program.schedules.base import paths_of

# A search on fewer devices, or of fewer layouts, ends before a compiler is loaded.
COMPILED_FROM_DEVICES = 256
COMPILED_AFTER_LAYOUTS = 100


def prepare(problem: Problem) -> None:
    """Load the compiled engine before simulating many long plans."""
    if problem.job.cluster.ranks >= COMPILED_FROM_DEVICES:
        load_compiled_engine()


def simulated(problem: Problem, candidate: Candidate, layer_seconds: Sequence[float]) -> Candidate:
    """Return the candidate with its plan, the predicted step and peaks, and a verdict.

    `layer_seconds` balance the stages of a layout without given cuts.
    """
    return judged(problem, candidate, build_plan(problem.job, candidate.chain, layer_seconds))


def judged(problem: Problem, candidate: Candidate, plan: Plan) -> Candidate:
    """Return the candidate with this plan, its predicted step and peaks, and a verdict."""
    try:
        step = problem.step_of(plan)
    except InputError as error:
        # Blocking communication can make an order wait for itself; only the program shows this.
        return replace(candidate, verdict=Verdict.REFUSED, reason=str(error.violations[0]))
    too_big = _misfit(problem, plan, step)
    return replace(
        candidate,
        verdict=Verdict.TOO_BIG if too_big else Verdict.FITS,
        reason=too_big or _why(plan, step.waiting),
        peak_bytes=max(step.prediction.peak_bytes),
        plan=plan,
        prediction=step.prediction,
    )


def judged_plan(problem: Problem, plan: Plan) -> Candidate:
    """Return a candidate for a plan of any stages, with its predicted step and peaks, and a verdict."""
    candidate = Candidate(layout=said_as_layout(plan), verdict=Verdict.REFUSED, reason="")
    return judged(problem, candidate, plan)


def _misfit(problem: Problem, plan: Plan, step: LongStep) -> str | None:
    """Return the reason why a plan's step does not fit at the problem's `memory_risk`; None if it fits."""
    prediction = step.prediction
    usable_bytes = problem.cost_model.network.places.usable_bytes[: len(prediction.peak_bytes)]
    over = np.array(prediction.needs_at(problem.memory_risk)) - usable_bytes
    rank = int(np.argmax(over))
    if over[rank] <= 0:
        return None
    resident, missing = step.resident_bytes[rank], int(prediction.needed_bytes[rank] - usable_bytes[rank])
    fills = filled(Holding(resident=resident, activations=prediction.peak_bytes[rank] - resident))
    if prediction.communicator_bytes:
        fills += f", and {format_bytes(prediction.communicator_bytes[rank])} of communicators"
    name, pause = f"rank {rank}", ""
    if rank in plan.servers:
        name, pause = f"{name}, server {plan.servers.index(rank)}", ","
    if missing > 0:
        return f"{name}{pause} would need {format_bytes(missing)} more than its device has: {fills}"
    chance = prediction.chance_to_fit(usable_bytes.tolist())
    return f"would not fit in {format_odds(1.0 - chance)}: {fills} on {name}"


def filled(holding: Holding) -> str:
    """Return the contents of a device's memory, in words."""
    return (
        f"{format_bytes(holding.activations)} of activations beside {format_bytes(holding.resident)} of "
        "states and buffers"
    )


def _why(plan: Plan, waiting: float) -> str:
    if len(set(plan.replicas)) > 1:
        counts = "+".join(map(str, plan.replicas))
        return (
            f"{plan.micro_batches} micro-batches, replicas {counts}, devices wait {waiting:.0%} of the step"
        )
    # A pipeline has the micro-batches of all of its paths.
    paths = paths_of(get_schedule(plan.schedule.name))
    shares = [copy.micro_batches * paths for copy in plan.stages[0].replicas]
    count = max(shares)
    most = "" if len(set(shares)) == 1 else "at most "
    each = f"{most}{count} micro-batch{'es' if count > 1 else ''} per replica"
    if plan.pp == 1:
        return f"{each}, no pipeline"
    return f"{each}, devices wait {waiting:.0%} of the step"


def estimated(layout: Layout, estimate_s: float) -> Candidate:
    """Return a layout with the estimate of a planner's own formula; `PRUNED` until it is simulated."""
    reason = f"estimated {format_seconds(estimate_s)}, others less"
    return Candidate(layout=layout, verdict=Verdict.PRUNED, reason=reason, estimate_s=estimate_s)


def empty_stage(layout: Layout) -> Candidate:
    """Refuse a layout with more stages than layers that compute."""
    reason = f"pp {layout.pp} leaves a stage without layers that compute"
    return Candidate(layout=layout, verdict=Verdict.REFUSED, reason=reason)


def states_too_big(layout: Layout, bounds: Bounds) -> str | None:
    """Return the reason why no device has memory for the states and buffers of a layout; None if one may."""
    over = bounds.resident_bytes(layout) - bounds.largest_memory_bytes
    return (
        f"states and buffers alone need {format_bytes(over)} more than any device has" if over > 0 else None
    )


def too_big(candidate: Candidate, bounds: Bounds) -> Candidate | None:
    """Return the candidate as too big by its states and kept activations; None if it fits."""
    # The order of a long pipeline, which the activations need, takes a hundred times as long.
    if (reason := states_too_big(candidate.chain, bounds)) is not None:
        least_bytes = bounds.resident_bytes(candidate.chain)
        return replace(candidate, verdict=Verdict.TOO_BIG, reason=reason, peak_bytes=least_bytes)
    if bounds.may_fit(candidate.chain):
        return None
    holding = bounds.holding(candidate.chain)
    over = holding.total - bounds.largest_memory_bytes
    needs = f"needs {format_bytes(over)} more than any device has" if over > 0 else "would hardly fit"
    reason = f"{needs}: {filled(holding)}"
    return replace(candidate, verdict=Verdict.TOO_BIG, reason=reason, peak_bytes=holding.total)


def rank_by_estimate(
    problem: Problem, candidates: Sequence[Candidate], bounds: Bounds, finalists: int
) -> Ranking:
    """Simulate candidates, least `estimate_s` first, until `finalists` of them fit.

    All keep the order of their estimates, and equal ones the given order; the simulator does not change it.
    Candidates that stay `PRUNED` come after the simulated ones, refused ones last.
    """
    estimated = [one for one in candidates if one.estimate_s is not None]
    refused = [one for one in candidates if one.estimate_s is None]
    estimated.sort(key=lambda one: one.estimate_s or 0.0)
    ranked: list[Candidate] = []
    fitting = 0
    for one in estimated:
        if fitting < finalists:
            one = simulated(problem, one, bounds.layer_seconds(one.chain))
            fitting += one.verdict is Verdict.FITS
        ranked.append(one)
    ranked.sort(key=lambda one: one.verdict is Verdict.REFUSED)
    return Ranking(problem=problem, candidates=(*ranked, *refused))
