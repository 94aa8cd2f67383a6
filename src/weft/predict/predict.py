"""Predict a step: price the program, simulate it, and say how sure the answer is."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from weft.describe.cluster import Cluster
from weft.describe.layer_graph import LayerGraph
from weft.describe.plan import Plan, Prediction
from weft.predict.cost.price import Priced, price
from weft.predict.profile import LayerProfile, MachineMeasurement
from weft.predict.simulator import Simulation, simulate
from weft.program.program import Ints, Program


@dataclass(frozen=True, kw_only=True)
class PredictedStep:
    """The simulation of a plan's program, the record a plan keeps of it, and the costs it rests on."""

    simulation: Simulation
    prediction: Prediction
    priced: Priced


def predict(
    plan: Plan,
    program: Program,
    graph: LayerGraph,
    cluster: Cluster,
    *,
    machine: MachineMeasurement | None = None,
    profile: LayerProfile | None = None,
    run_name: str = "",
) -> PredictedStep:
    """Predict one steady step of a plan.

    A program folded to one replica gives the peaks of all of them: a rank without instructions holds what
    the rank at its place in the simulated replica holds.

    Raises:
        InputError: as `price` and `simulate` do.
    """
    priced = price(program, plan, graph, cluster, machine=machine, profile=profile)
    simulation = simulate(program, priced.costs, run=run_name, plan_id=plan.plan_id)
    prediction = Prediction(
        step_s=simulation.step_s,
        step_low_s=simulation.step_s * priced.low_scale,
        step_high_s=simulation.step_s * priced.high_scale,
        first_step_s=simulation.first_step_s,
        peak_bytes=tuple(_unfolded(plan, program, simulation.peak_bytes).tolist()),
        source=priced.source,
    )
    return PredictedStep(simulation=simulation, prediction=prediction, priced=priced)


def _unfolded(plan: Plan, program: Program, peak_bytes: Ints) -> Ints:
    """Peaks of all ranks from those of the replica that was simulated."""
    if "folded" not in program.meta:
        return peak_bytes
    simulated = int(program.meta["folded"])
    peaks = peak_bytes.copy()
    for stage in plan.stages:
        copies = np.array([copy.ranks for copy in stage.replicas], dtype=np.int64)
        peaks[copies] = peak_bytes[copies[simulated]]
    return peaks
