"""Steps of many micro-batches from two shorter ones: equal to whole simulations."""

from __future__ import annotations

import pytest

from weft.describe.cluster_file import parse_cluster
from weft.describe.families import layer_graph
from weft.describe.job import Job
from weft.describe.layout import Layout
from weft.describe.models import resolve_model
from weft.moves.layout import build_plan
from weft.planning.compile import compile_folded
from weft.planning.long_steps import predict_long
from weft.predict.cost.placed_plan import CostModel
from weft.predict.predict import predict
from weft.timeline.figures import bubble_fraction

GRAPH = layer_graph(resolve_model("gpt-1m", sequence=256))
CLUSTER = parse_cluster("16xa100-80gb")


@pytest.mark.parametrize(
    ("schedule", "loops", "blocking", "sharding"),
    [
        ("1f1b", 1, (), "zero-1"),
        ("1f1b", 1, ("messages", "reductions"), "zero-0"),
        ("gpipe", 1, (), "zero-0"),
        ("depth-first", 2, (), "zero-1"),
        ("breadth-first", 2, (), "zero-3"),
        ("zb-h1", 1, ("reductions",), "zero-1"),
    ],
)
@pytest.mark.parametrize("micro_batches", [17, 96, 212])
def test_a_long_step_is_that_of_the_whole_simulation(schedule, loops, blocking, sharding, micro_batches):
    if schedule == "depth-first":
        micro_batches -= micro_batches % 2
    layout = Layout(
        pp=2,
        dp=4,
        tp=2,
        loops=loops,
        micro_batch_size=1,
        schedule=schedule,
        sharding=sharding,
        blocking=blocking,
    )
    require_whole(layout, micro_batches)


@pytest.mark.parametrize(
    ("pp", "loops", "depth", "micro_batches"),
    [
        (2, 2, None, 96),
        (2, 2, None, 54),
        (2, 2, 3, 96),
        (2, 3, 12, 96),
        (1, 4, 48, 48),
        (1, 4, 2, 48),
        (2, 2, 5, 15),
    ],
)
@pytest.mark.parametrize("sharding", ["zero-1", "zero-3"])
def test_rounds_of_a_long_step_are_shorter_or_fewer(pp, loops, depth, micro_batches, sharding):
    layout = Layout(
        pp=pp,
        dp=4,
        loops=loops,
        micro_batch_size=1,
        schedule="hybrid",
        options={} if depth is None else {"depth": depth},
        sharding=sharding,
    )
    require_whole(layout, micro_batches)


def require_whole(layout: Layout, micro_batches: int) -> None:
    """The long step is that of the whole simulation."""
    job = Job(graph=GRAPH, cluster=CLUSTER, global_batch=4 * micro_batches, sequence=256, precision="bf16")
    plan = build_plan(job, layout, [1.0] * len(GRAPH.layers))
    simulated = predict(CostModel(graph=GRAPH, cluster=CLUSTER), plan, compile_folded(plan, GRAPH, CLUSTER))
    whole, step = simulated.prediction, predict_long(CostModel(graph=GRAPH, cluster=CLUSTER), plan)
    found = step.prediction
    assert step.waiting == pytest.approx(bubble_fraction(simulated.simulation.timeline), abs=2e-3)
    assert step.resident_bytes == tuple(simulated.priced.costs.base_bytes.tolist())
    assert found.step_s == pytest.approx(whole.step_s, rel=1e-6)
    assert found.first_step_s == pytest.approx(whole.first_step_s, rel=1e-6)
    assert found.peak_bytes == pytest.approx(whole.peak_bytes, rel=1e-6)
    assert (found.step_low_s, found.step_high_s) == pytest.approx(
        (whole.step_low_s, whole.step_high_s), rel=1e-6
    )
    assert found.source == whole.source
    assert found.communicator_bytes == whole.communicator_bytes
    assert min(found.communicator_bytes) > 0
