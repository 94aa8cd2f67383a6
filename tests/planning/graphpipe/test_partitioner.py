"""Partitions of graphs of layers: legal, no worse than others can be, and monotone in what they may use."""

from __future__ import annotations

import pytest
from graphpipe_graphs import (
    Graph,
    best_of_all,
    found_by,
    graphs,
    is_acyclic,
    partitioner,
    plain_costs,
    towers,
    trees,
)
from hypothesis import assume, example, given
from hypothesis import strategies as st

from weft.planning.planners.graph_costs import Edge, GraphCosts
from weft.planning.planners.graphpipe.part_plans import StageGraph
from weft.program.schedules.graph_1f1b import samples_in_flight

SECONDS = st.lists(st.sampled_from([0.0, 1.0, 2.0, 3.0, 5.0]), min_size=10, max_size=10)


def costs_of(
    graph: Graph,
    seconds: list[float],
    devices: int,
    *,
    memory_bytes: float = float("inf"),
    sent_bytes: float = 0.0,
) -> GraphCosts:
    works = seconds[: graph[0]]
    assume(sum(works) > 0.0)
    return plain_costs(graph[1], works, devices=devices, memory_bytes=memory_bytes, sent_bytes=sent_bytes)


def in_flight_of(costs: GraphCosts, found: StageGraph) -> list[int]:
    """The samples in flight by the rule, on the edges that the stages really have."""
    stage_of = {layer: index for index, stage in enumerate(found.stages) for layer in stage.layers}
    pairs = {(stage_of[one], stage_of[other]) for one, other in costs.edges}
    # The rule wants rising edges.
    order = sorted(range(len(found.stages)), key=lambda stage: _rank(stage, pairs))
    place = {stage: index for index, stage in enumerate(order)}
    rising = [(place[one], place[other]) for one, other in pairs if one != other]
    sizes = [found.micro_batch_size * stage.replicas for stage in found.stages]
    kept = samples_in_flight(rising, sizes, [1] * len(order), costs.global_batch)
    return [kept[place[stage]] for stage in range(len(order))]


def _rank(stage: int, pairs: set[Edge]) -> int:
    return max((1 + _rank(one, pairs) for one, other in pairs if other == stage != one), default=0)


# Two branches that are alike.
@example((4, [(0, 1), (0, 2), (1, 3), (2, 3)]), [1.0] * 4, 4, 100.0)
@given(trees(), SECONDS, st.integers(1, 5), st.sampled_from([2.0, 6.0, 20.0, 100.0]))
def test_partitions_are_legal(graph: Graph, seconds: list[float], devices: int, memory: float) -> None:
    """Every layer once, stages that wait for no stage behind them, and their samples in flight fit."""
    costs = costs_of(graph, seconds, devices, memory_bytes=memory)
    found = partitioner(costs, size=1).search()
    if found is None:
        return
    layers = [stage.layers for stage in found.stages]
    assert sorted(layer for stage in layers for layer in stage) == list(range(graph[0]))
    assert is_acyclic(graph[1], layers)
    assert found.devices <= devices
    for stage, kept in zip(found.stages, in_flight_of(costs, found), strict=True):
        # False dependencies may ask for more than the real ones do.
        assert kept <= stage.in_flight
        assert stage.in_flight * len(stage.layers) <= memory


@given(st.integers(1, 9), SECONDS, st.integers(1, 5), st.sampled_from([0.0, 2.0]))
def test_a_chain_has_the_best_cuts(count: int, seconds: list[float], devices: int, sent: float) -> None:
    chain = (count, [(one, one + 1) for one in range(count - 1)])
    costs = costs_of(chain, seconds, devices, sent_bytes=sent)
    least = {(0, 0): 0.0}
    for end in range(1, count + 1):
        for used in range(1, devices + 1):
            for start in range(end):
                if (start, used - 1) in least:
                    stage = costs.stage(range(start, end), 4, 1)
                    cut = max(least[start, used - 1], costs.sample_s(stage, 4, 1))
                    least[end, used] = min(least.get((end, used), cut), cut)
    best = min(value for (end, _), value in least.items() if end == count)
    assert found_by(partitioner(costs)).sample_s == pytest.approx(best)


@given(graphs(6), SECONDS, st.integers(1, 4))
def test_no_partition_is_better_than_the_best(graph: Graph, seconds: list[float], devices: int) -> None:
    costs = costs_of(graph, seconds, devices)
    assert found_by(partitioner(costs)).sample_s >= best_of_all(costs) * (1 - 1e-9)


@given(st.lists(st.integers(1, 2), min_size=1, max_size=3), SECONDS, st.integers(1, 4))
def test_towers_are_near_the_best_partition(lengths: list[int], seconds: list[float], devices: int) -> None:
    """The best of the graph's and the chains', as the planner takes it.

    A stage never has a part of one tower and the whole of another, so the best of all may be better.
    """
    edges, works = towers(lengths, [1.0 + one for one in seconds[: len(lengths)]])
    costs = plain_costs(edges, works, devices=devices)
    searches = (
        partitioner(costs),
        *(partitioner(costs, chain=True, by_end=by_end) for by_end in (False, True)),
    )
    best = min(found_by(search).sample_s for search in searches)
    assert best <= best_of_all(costs) * 4 / 3 * (1 + 1e-9)


@given(graphs(8), SECONDS, st.integers(1, 4), st.sampled_from([3.0, 8.0, 30.0]))
def test_more_devices_and_memory_and_time_never_hurt(
    graph: Graph, seconds: list[float], devices: int, memory: float
) -> None:
    few = partitioner(costs_of(graph, seconds, devices, memory_bytes=memory), size=1).search(tolerance=1e-9)
    if few is None:
        return
    for more, room in ((devices + 1, memory), (devices, 2 * memory)):
        search = partitioner(costs_of(graph, seconds, more, memory_bytes=room), size=1)
        assert found_by(search).sample_s <= few.sample_s * (1 + 1e-6)
        assert search.within(1.5 * few.sample_s) is not None


@given(st.permutations([(1, 2.0), (2, 1.0), (2, 1.0), (3, 0.5)]), st.integers(1, 6))
def test_the_order_of_branches_does_not_matter(branches: list[tuple[int, float]], devices: int) -> None:
    bests = []
    for order in (branches, sorted(branches)):
        edges, works = towers(*zip(*order, strict=True))
        bests.append(found_by(partitioner(plain_costs(edges, works, devices=devices))))
    assert bests[0].sample_s == pytest.approx(bests[1].sample_s)
    assert bests[0].in_flight == bests[1].in_flight


@given(graphs(7), SECONDS, st.integers(1, 4))
def test_times_scale_the_seconds_per_sample(graph: Graph, seconds: list[float], devices: int) -> None:
    one, three = (
        found_by(partitioner(costs_of(graph, [scale * second for second in seconds], devices)))
        for scale in (1.0, 3.0)
    )
    assert three.sample_s == pytest.approx(3 * one.sample_s)


def test_two_branches_need_fewer_samples_in_flight() -> None:
    """GraphPipe's case study: two branches of four blocks on eight devices.

    Stages of a branch hold the stem and the head. So the other branch of four stages lies between these two.
    """
    edges, works = towers([4, 4], [1.0, 1.0])
    costs = plain_costs(edges, works, devices=8)
    graph, chain = (found_by(partitioner(costs, chain=one)) for one in (False, True))
    assert graph.sample_s == chain.sample_s == 3.0
    assert (len(graph.stages), len(chain.stages)) == (8, 8)
    assert (graph.in_flight, chain.in_flight) == (6 * 4, 8 * 4)


def test_a_stage_before_branches_keeps_samples_for_the_longest() -> None:
    edges, works = towers([1, 3], [1.0, 1.0])
    found = found_by(partitioner(plain_costs(edges, [1.0, *works[1:-1], 1.0], devices=6)))
    assert [stage.layers for stage in found.stages if 0 in stage.layers] == [(0,)]
    assert found.in_flight == 5 * 4


def test_memory_makes_a_graph_where_a_chain_does_not_fit() -> None:
    edges, works = towers([4, 4], [1.0, 1.0])
    costs = plain_costs(edges, works, devices=8, memory_bytes=56.0)
    assert found_by(partitioner(costs)).sample_s == 3.0
    assert found_by(partitioner(costs, chain=True)).sample_s > 3.0


def test_small_branches_share_a_stage() -> None:
    edges, works = towers([1, 1, 1, 1, 4], [0.25, 0.25, 0.25, 0.25, 1.0])
    found = found_by(partitioner(plain_costs(edges, works, devices=5)))
    assert found.sample_s == 3.0
    assert (1, 2, 3, 4) in [tuple(layer for layer in stage.layers if 0 < layer < 5) for stage in found.stages]
