"""Prediction of steps of very many micro-batches from two shorter ones.

Once a pipeline is full, each further round of micro-batches takes as long as the one before, and leaves as
many bytes more. So the step and the peaks of a plan of many rounds follow from those of two shorter plans by
a straight line; tests hold it against whole simulations. It is for those who predict plans by the thousand: a
plan that is run is always simulated whole.
"""

from __future__ import annotations

from dataclasses import dataclass

from weft.describe.cluster import Cluster
from weft.describe.layer_graph import LayerGraph
from weft.describe.plan import Plan, Prediction, Replica
from weft.planning.compile import compile_folded
from weft.predict.corrections import Correction
from weft.predict.predict import predict
from weft.predict.profile import LayerProfile, MachineMeasurement
from weft.timeline.figures import bubble_fraction

# A round is one micro-batch for each device in line. The first rounds fill the pipeline.
FIRST_ROUNDS, ROUNDS_MORE = 2, 1
# Shorter steps than this are simulated whole.
SHORT = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class LongStep:
    """What is predicted of a plan's step.

    `resident_bytes` are what each rank that was simulated holds all the time; `waiting` is the share of the
    step for which devices wait.
    """

    prediction: Prediction
    resident_bytes: tuple[int, ...]
    waiting: float


def predict_long(
    plan: Plan,
    graph: LayerGraph,
    cluster: Cluster,
    *,
    machine: MachineMeasurement | None = None,
    profile: LayerProfile | None = None,
    correction: Correction | None = None,
) -> LongStep:
    """Predict a step of a plan; exact where it is short.

    Raises:
        InputError: as `predict` does.
    """

    def predicted(one: Plan) -> LongStep:
        program = compile_folded(one, graph, cluster)
        step = predict(one, program, graph, cluster, machine=machine, profile=profile, correction=correction)
        return LongStep(
            prediction=step.prediction,
            resident_bytes=tuple(step.priced.costs.base_bytes.tolist()),
            waiting=bubble_fraction(step.simulation.timeline),
        )

    lengths = _shorter(plan)
    if lengths is None:
        return predicted(plan)
    near, far = (predicted(_shortened(plan, length)) for length in lengths)
    share = plan.stages[0].replicas[0].micro_batches
    rounds = (share - lengths[0]) / (lengths[1] - lengths[0])

    def onward(one: float, other: float) -> float:
        return one + rounds * (other - one)

    before, after = near.prediction, far.prediction
    step_s = onward(before.step_s, after.step_s)
    prediction = Prediction(
        step_s=step_s,
        step_low_s=onward(before.step_low_s, after.step_low_s),
        step_high_s=onward(before.step_high_s, after.step_high_s),
        first_step_s=onward(before.first_step_s, after.first_step_s),
        peak_bytes=tuple(
            round(onward(one, other)) for one, other in zip(before.peak_bytes, after.peak_bytes, strict=True)
        ),
        source=after.source,
        shared=after.shared,
    )
    waited_s = onward(near.waiting * before.step_s, far.waiting * after.step_s)
    return LongStep(prediction=prediction, resident_bytes=far.resident_bytes, waiting=waited_s / step_s)


def _shorter(plan: Plan) -> tuple[int, int] | None:
    """Two counts of micro-batches per replica to look at in place of the plan's, or None if it is short."""
    shares = {copy.micro_batches for stage in plan.stages for copy in stage.replicas}
    share, devices = shares.pop(), plan.mesh.get("pp", 1)
    if shares:
        return None
    # What is left over of the last round stays left over.
    whole = max(devices, SHORT // devices * devices)
    rest = share % whole
    first = rest + FIRST_ROUNDS * whole
    second = first + ROUNDS_MORE * whole
    return (first, second) if share > second else None


def _shortened(plan: Plan, micro_batches: int) -> Plan:
    stages = tuple(
        stage.model_copy(
            update={
                "replicas": tuple(
                    Replica(ranks=one.ranks, micro_batches=micro_batches) for one in stage.replicas
                )
            }
        )
        for stage in plan.stages
    )
    share = plan.stages[0].replicas[0].micro_batches
    batch = plan.global_batch // share * micro_batches
    return plan.model_copy(update={"stages": stages, "global_batch": batch})
