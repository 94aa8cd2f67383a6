"""Prediction of steps of very many micro-batches from two shorter ones.

Once a pipeline is full, each further round of micro-batches takes as long as the one before, and leaves as
many bytes more. So the step and the peaks of a plan of many rounds follow from those of two shorter plans by
a straight line; tests hold it against whole simulations. It is for those who predict plans by the thousand: a
plan that is run is always simulated whole.
"""

from __future__ import annotations

from weft.describe.cluster import Cluster
from weft.describe.layer_graph import LayerGraph
from weft.describe.plan import Plan, Prediction, Replica
from weft.planning.compile import compile_folded
from weft.predict.predict import predict
from weft.predict.profile import LayerProfile, MachineMeasurement

# A round is one micro-batch for each device in line. The first rounds fill the pipeline.
FIRST_ROUNDS, ROUNDS_MORE = 3, 2
# Shorter steps than this are simulated whole.
SHORT = 16


def predict_long(
    plan: Plan,
    graph: LayerGraph,
    cluster: Cluster,
    *,
    machine: MachineMeasurement | None = None,
    profile: LayerProfile | None = None,
) -> Prediction:
    """The prediction of a plan; exact where its step is short.

    Raises:
        InputError: as `predict` does.
    """

    def predicted(one: Plan) -> Prediction:
        program = compile_folded(one, graph, cluster)
        return predict(one, program, graph, cluster, machine=machine, profile=profile).prediction

    lengths = _shorter(plan)
    if lengths is None:
        return predicted(plan)
    near, far = (predicted(_shortened(plan, length)) for length in lengths)
    share = plan.stages[0].replicas[0].micro_batches
    rounds = (share - lengths[0]) / (lengths[1] - lengths[0])

    def onward(one: float, other: float) -> float:
        return one + rounds * (other - one)

    return Prediction(
        step_s=onward(near.step_s, far.step_s),
        step_low_s=onward(near.step_low_s, far.step_low_s),
        step_high_s=onward(near.step_high_s, far.step_high_s),
        first_step_s=onward(near.first_step_s, far.first_step_s),
        peak_bytes=tuple(
            round(onward(one, other)) for one, other in zip(near.peak_bytes, far.peak_bytes, strict=True)
        ),
        source=far.source,
    )


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
