"""`weft plan --compare-sync`: every synchronisation method on its best layout, with its bytes and codecs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weft.describe.plan import Choice, Plan
from weft.describe.prediction import Prediction
from weft.describe.synchronisation import DENSE, steps_apart
from weft.planning.compile import compile_plan
from weft.planning.long_steps import LongStep, predict_long
from weft.planning.planners import Ranking
from weft.planning.problem import Problem
from weft.planning.synchronisations import Synchronised, synchronised_in_each
from weft.predict.cost.codec_times import no_codec_s, unfused_codec_s
from weft.predict.cost.placed_plan import CostModel, PlacedPlan
from weft.predict.cost.price import price_placed
from weft.predict.cost.pricing import Pricing
from weft.predict.cost.traffic import Traffic, busiest_codecs_s, price_with_codecs, traffic


@dataclass(frozen=True, slots=True)
class CodecFigures:
    """Seconds of a step in which the busiest rank encodes and decodes.

    Attributes:
        exposed_s: the step minus the step of codecs that take no time.
    """

    busy_s: float
    exposed_s: float

    @property
    def hidden_s(self) -> float:
        """Seconds in which codecs run beside other work."""
        # Predicted steps are whole nanoseconds.
        return max(0.0, round(self.busy_s - self.exposed_s, 9))


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncFigures:
    """Figures of a plan's synchronisation.

    Attributes:
        traffic: the bytes that a node sends per step.
        added_bytes: the most that a rank holds beyond the same plan with dense sums.
        codecs: in fused kernels, as the plan is predicted. `unfused`: in plain torch.
        steps_apart: steps between two meetings of replicas that step by themselves; None for others.
    """

    prediction: Prediction
    traffic: Traffic
    added_bytes: int
    codecs: CodecFigures
    unfused: CodecFigures
    steps_apart: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncAnswer:
    """A synchronisation method on its best layout, and its figures; None where it refuses every layout."""

    found: Synchronised
    figures: SyncFigures | None


def compare_synchronisations(
    ranking: Ranking, steps: int, asked: Choice | None = None
) -> tuple[SyncAnswer, ...]:
    """Return an answer for each of `synchronised_in_each`, in its order."""
    found = synchronised_in_each(ranking, steps, asked)
    return tuple(SyncAnswer(found=one, figures=_figures_of(ranking.problem, one)) for one in found)


def _figures_of(problem: Problem, found: Synchronised) -> SyncFigures | None:
    candidate = found.candidate
    if candidate is None or candidate.plan is None:
        return None
    return sync_figures(problem.cost_model, candidate.plan)


def sync_figures(model: CostModel, plan: Plan) -> SyncFigures:
    """Return the figures of a plan's synchronisation, by simulation and by count.

    Raises:
        InputError: as `compile_plan` and `predict_long` do.
    """
    step, at_once, unfused = (
        predict_long(model, plan, price)
        for price in (price_placed, price_with_codecs(no_codec_s), price_with_codecs(unfused_codec_s))
    )
    dense = predict_long(model, plan.model_copy(update={"sync": Choice(name=DENSE)}))
    program = compile_plan(plan, model.graph)
    placed = PlacedPlan(program=program, plan=plan, model=model.of(plan))
    pricing = Pricing(program=program, placed=placed)
    return SyncFigures(
        prediction=step.prediction,
        traffic=traffic(pricing),
        added_bytes=_most_added(step.resident_bytes, dense.resident_bytes),
        codecs=_codecs(busiest_codecs_s(pricing), step, at_once),
        unfused=_codecs(busiest_codecs_s(pricing, unfused_codec_s), unfused, at_once),
        steps_apart=steps_apart(plan.sync),
    )


def _codecs(busy_s: float, step: LongStep, at_once: LongStep) -> CodecFigures:
    return CodecFigures(busy_s, max(0.0, step.prediction.step_s - at_once.prediction.step_s))


def _most_added(held: Sequence[int], held_densely: Sequence[int]) -> int:
    # Servers have the last ranks of a plan, and dense synchronisation has none.
    return max(one - other for one, other in zip(held, held_densely, strict=False))
