"""Predict a step: price the program, simulate it, and give the uncertainty."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from weft.describe.one_line import one_line
from weft.describe.plan import Plan
from weft.describe.prediction import Prediction
from weft.predict.cost.placed_plan import CostModel
from weft.predict.cost.price import Priced, price
from weft.predict.simulator import Simulation, simulate
from weft.program.program import Program


@dataclass(frozen=True, kw_only=True)
class PredictedStep:
    """The simulation of a plan's program, the prediction record for the plan, and the costs behind it."""

    simulation: Simulation
    prediction: Prediction
    priced: Priced

    def __repr__(self) -> str:
        return one_line(self, f"of {self.simulation.instructions} instructions: {self.prediction}")


def predict(model: CostModel, plan: Plan, program: Program, *, run_name: str = "") -> PredictedStep:
    """Predict one steady step of a plan.

    A folded program gives the peaks of all ranks; a rank without instructions has its representative's peak.

    Raises:
        InputError: as `price` and `simulate` do.
    """
    return predict_priced(program, price(model, program, plan), run_name=run_name, plan_id=plan.plan_id)


def predict_priced(
    program: Program, priced: Priced, *, run_name: str = "", plan_id: str = ""
) -> PredictedStep:
    """Predict one steady step of a program with known costs; the names go into its timeline.

    Raises:
        InputError: as `simulate` does.
    """
    simulation = simulate(program, priced.costs, run=run_name, plan_id=plan_id)
    peak_bytes, high_bytes = priced.corrected_peaks(simulation.peak_bytes)
    for rank, alike in priced.twins.items():
        peak_bytes[alike], high_bytes[alike] = peak_bytes[rank], high_bytes[rank]
    beside = priced.communicators.held_bytes
    prediction = Prediction(
        step_s=simulation.step_s,
        step_low_s=simulation.step_s * priced.low_scale,
        step_high_s=simulation.step_s * priced.high_scale,
        first_step_s=simulation.first_step_s,
        peak_bytes=tuple(peak_bytes.tolist()),
        peak_high_bytes=tuple(high_bytes.tolist()),
        communicator_bytes=tuple(beside.tolist()) if beside.any() else (),
        source=priced.source,
        shared=priced.shared,
    )
    return PredictedStep(simulation=simulation, prediction=prediction, priced=priced)


def live_curve(program: Program, predicted: PredictedStep, rank: int) -> list[tuple[float, int]]:
    """Return (seconds since the start of the step, bytes live from then on) of one rank, in order of time.

    An instruction's working bytes count from its start, on top of those just before its end.
    """
    costs, timeline = predicted.priced.costs, predicted.simulation.timeline
    factor = predicted.priced.memory.factor
    live_bytes, working_bytes = (each[timeline.position] for each in (costs.live_bytes, costs.working))
    mine = np.flatnonzero((timeline.rank == rank) & ((live_bytes != 0) | (working_bytes != 0)))
    order = mine[np.lexsort((live_bytes[mine] < 0, timeline.end_ns[mine]))]
    held = int(costs.base_bytes[rank])
    after = held + np.cumsum(live_bytes[order])
    works = working_bytes[order] > 0
    at_work = (after - live_bytes[order] + working_bytes[order])[works]
    times = np.concatenate([timeline.start_ns[order][works], timeline.end_ns[order]]) / 1e9
    levels = np.rint(factor * np.concatenate([at_work, after])).astype(np.int64)
    by_time = np.argsort(times, kind="stable")
    start = (0.0, round(factor * held))
    return [start, *zip(times[by_time].tolist(), levels[by_time].tolist(), strict=True)]
