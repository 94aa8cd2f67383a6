"""The costs of layers for planners of stage graphs are those of weft's own models."""

from __future__ import annotations

from dataclasses import replace

import pytest

from weft.describe.layout import Layout
from weft.errors import InputError
from weft.planning.planners.bounds import Bounds
from weft.planning.planners.graph_costs import graph_costs
from weft.planning.problem import problem_of

# Layers do not wait for a host, which may run ahead from one to the next.
PROBLEM = problem_of(model="bert-1m", on="8xa100-40gb", global_batch=32, launch="captured")
COSTS = graph_costs(PROBLEM, [1, 4])
LAYERS = range(COSTS.layers)


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_one_stage_costs_what_its_layout_does(size: int, recompute: str) -> None:
    layout = Layout(pp=1, dp=2, loops=1, micro_batch_size=size, schedule="1f1b").recomputing(recompute)  # type: ignore[arg-type]
    bounds, stage = Bounds(PROBLEM), COSTS.stage(LAYERS, size, 2, recompute)  # type: ignore[arg-type]
    assert stage.computed_s == pytest.approx(bounds.stage_seconds(layout)[0])
    # A whole stage takes no more than all of its layers.
    assert 0.9 * stage.peak_bytes(1) <= bounds.held_at_risk(layout).max() <= stage.peak_bytes(1) * (1 + 1e-6)
    network = PROBLEM.cost_model.network
    reduced = round(bounds.exchanged_bytes(layout)[0].sum())
    # The planner knows a ring's latency and bandwidth; for so few bytes, trees have others.
    assert stage.reduced_s == pytest.approx(network.all_reduce_s(range(2), reduced), rel=0.35)


def test_a_stage_sends_what_crosses_its_borders_both_ways() -> None:
    sent = COSTS.passes[4, "none"].sent_bytes
    middle = COSTS.stage([1], 4, 1)
    each = (COSTS.link.latency_s + one / COSTS.link.bytes_per_s for one in sent[:2])
    assert middle.sent_s == pytest.approx(2 * sum(each))
    assert COSTS.stage(LAYERS, 4, 1).sent_s == 0.0


def test_replicas_share_the_time_of_a_sample() -> None:
    one, two = (COSTS.stage([1], 4, replicas) for replicas in (1, 2))
    alone, shared = COSTS.sample_s(one, 4, 1), COSTS.sample_s(two, 4, 2)
    assert shared == pytest.approx(alone / 2 + two.reduced_s / 32)


def test_edges_must_go_to_later_layers() -> None:
    with pytest.raises(InputError, match=r"edge \(2, 1\) must go from a layer to a later one"):
        replace(COSTS, edges=((0, 1), (2, 1)))
