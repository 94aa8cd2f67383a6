"""Laws of planners whose stages stand in a row: PipeDream's and Piper's optimizers, and equal stages."""

from __future__ import annotations

from itertools import combinations, pairwise

import numpy as np
import pytest
from graphpipe_graphs import Graph, found_by, graphs, is_acyclic, partitioner, plain_costs, trees
from hypothesis import example, given
from hypothesis import strategies as st

from weft.describe.cluster import Link
from weft.describe.layer_graph import chain_edges
from weft.planning.planners.downsets import Price, Question, Row, RowSearch, downsets
from weft.planning.planners.equal_split import EqualSplitPlanner
from weft.planning.planners.graph_costs import GraphCosts, PassCosts
from weft.planning.planners.pipedream import PipeDreamPlanner, PipeDreamPrice
from weft.planning.planners.piper import PiperPlanner, PiperPrice

COLUMN = st.lists(st.sampled_from([0.0, 1.0, 2.0, 3.0, 5.0]), min_size=8, max_size=8)


def chain(count: int, columns: list[list[float]], devices: int) -> GraphCosts:
    """A chain with these seconds, sent and reduced bytes, at a byte per second."""
    seconds, sent, reduced = (np.array(column[:count]) for column in columns)
    none = 0 * seconds
    return GraphCosts(
        edges=chain_edges(count),
        passes={(1, "none"): PassCosts(1 + seconds, none, none, none, sent)},
        state_bytes=none,
        buffer_bytes=none,
        reduced_bytes=reduced,
        memory_bytes=float("inf"),
        devices=devices,
        global_batch=12,
        link=Link(1.0, 0.0),
    )


def slowest_s(costs: GraphCosts, stages: list[tuple[range, int]], price: Price) -> float:
    """The slowest stage of layers and replicas by a price, from the formulas' own sums."""
    passes, worst = costs.passes[1, "none"], 0.0
    for layers, replicas in stages:
        first, last = layers[0], layers[-1]
        before = float(passes.sent_bytes[first - 1]) if first else 0.0
        behind = float(passes.sent_bytes[last]) if last + 1 < costs.layers else 0.0
        own = [column[first : last + 1].sum() for column in (passes.forward_s, costs.reduced_bytes)]
        worst = max(worst, priced(price, *map(float, own), before, behind, replicas))
    return worst


def priced(
    price: Price, computed: float, reduced: float, before: float, behind: float, replicas: int
) -> float:
    """Seconds of a stage by the published formulas, with 12 micro-batches and a byte per second."""
    if isinstance(price, PiperPrice):
        return (
            computed / replicas
            + 2 * (before + behind) / replicas
            + 4 * (replicas - 1) * reduced / replicas / 12
        )
    assert isinstance(price, PipeDreamPrice)
    if price.variant == "code":
        share = 1.0 if price.every_micro_batch else replicas / 12
        return (computed + share * 4 * (replicas - 1) * reduced / replicas) / replicas
    return max(max(computed, 2 * (replicas - 1) * reduced * replicas / 12) / replicas, 2 * before)


def rows_of(costs: GraphCosts, devices: int) -> list[list[tuple[range, int]]]:
    """All rows of stages on all devices."""
    found = []
    for stages in range(1, min(costs.layers, devices) + 1):
        for cuts in combinations(range(1, costs.layers), stages - 1):
            borders = [0, *cuts, costs.layers]
            for shares in combinations(range(1, devices), stages - 1):
                marks = [0, *shares, devices]
                parts = [range(*pair) for pair in pairwise(borders)]
                counts = [end - begin for begin, end in pairwise(marks)]
                found.append(list(zip(parts, counts, strict=True)))
    return found


def searched(costs: GraphCosts, price: Price, degrees: tuple[int, ...]) -> Row:
    sets = downsets(costs.layers, costs.edges, 1000)
    assert sets is not None
    search = RowSearch(costs=costs, sets=sets, price=price)
    (row,) = search.rows([Question(1, ("none",), degrees, costs.devices)])
    return row


PRICES = (
    PipeDreamPrice(bytes_per_s=1.0),
    PipeDreamPrice(bytes_per_s=1.0, variant="code"),
    PipeDreamPrice(bytes_per_s=1.0, variant="code", every_micro_batch=True),
    PiperPrice(bytes_per_s=1.0),
)


@pytest.mark.parametrize("price", PRICES)
@given(st.integers(1, 8), st.lists(COLUMN, min_size=3, max_size=3), st.integers(1, 4))
def test_rows_of_a_chain_are_the_best_of_all(
    price: Price, count: int, columns: list[list[float]], devices: int
) -> None:
    costs = chain(count, columns, devices)
    row = searched(costs, price, tuple(range(1, devices + 1)))
    best = min(slowest_s(costs, stages, price) for stages in rows_of(costs, devices))
    assert row.sample_s == pytest.approx(best)
    own = [(range(one.layers[0], one.layers[-1] + 1), one.replicas) for one in row.graph.stages]
    assert slowest_s(costs, own, price) == pytest.approx(best)


@given(st.integers(1, 8), st.lists(COLUMN, min_size=3, max_size=3), st.integers(1, 4))
def test_piper_is_no_worse_than_pipedream_by_its_own_cost(
    count: int, columns: list[list[float]], devices: int
) -> None:
    costs, degrees = chain(count, columns, devices), tuple(range(1, devices + 1))
    own, other = (searched(costs, price, degrees) for price in (PRICES[3], PRICES[0]))
    stages = [(range(one.layers[0], one.layers[-1] + 1), one.replicas) for one in other.graph.stages]
    assert own.sample_s <= slowest_s(costs, stages, PRICES[3]) * (1 + 1e-9)


@given(graphs(8), st.integers(1, 4), st.sampled_from([0.6, 0.8, 1.0, 3.0]))
def test_rows_are_legal_and_fit(graph: Graph, devices: int, share: float) -> None:
    """Every layer once, stages that can run in turn, and one micro-batch kept for each from there on."""
    memory = share * 2 * graph[0]
    costs = plain_costs(graph[1], [1.0] * graph[0], devices=devices, memory_bytes=memory)
    question = Question(2, ("none",), (1,), devices)
    found = PipeDreamPlanner().rows(costs, [question]), PiperPlanner().rows(costs, [question])
    for rows in (*found, EqualSplitPlanner().rows(costs, [question])):
        assert not isinstance(rows, str)
        for row in rows:
            stages = row.graph.stages
            assert sorted(layer for stage in stages for layer in stage.layers) == list(range(graph[0]))
            assert is_acyclic(graph[1], [stage.layers for stage in stages])
            for place, stage in enumerate(stages):
                assert 2 * len(stage.layers) * (len(stages) - place) <= memory


# Two towers: their best stages cross the order of the layers, and fill both devices.
@example((5, [(0, 2), (2, 3), (1, 4)]), 2)
@given(graphs(7), st.integers(1, 4))
def test_a_bound_by_chains_loses_no_row(graph: Graph, devices: int) -> None:
    works = [1.0 + layer % 3 for layer in range(graph[0])]
    costs = plain_costs(graph[1], works, devices=devices)
    sets = downsets(graph[0], graph[1], 1000)
    assert sets is not None
    search = RowSearch(costs=costs, sets=sets, price=PiperPrice(bytes_per_s=1.0))
    question = Question(1, ("none",), (1,), devices)
    whole = search.row(question)
    assert [row.sample_s for row in search.rows([question])] == [
        pytest.approx(row.sample_s) for row in (whole,) if row is not None
    ]


@given(trees(8), st.integers(1, 4))
def test_no_row_of_the_layers_in_order_beats_the_partitions(graph: Graph, devices: int) -> None:
    """GraphPipe's answer is the best of the graph's and the chain's, so chains have no better rows."""
    costs = plain_costs(graph[1], [1.0 + layer % 3 for layer in range(graph[0])], devices=devices)
    question = Question(4, ("none",), (1,), devices)
    best = min(found_by(partitioner(costs, chain=chain)).sample_s for chain in (False, True))
    rows = [*PipeDreamPlanner(states=0).rows(costs, [question]), *EqualSplitPlanner().rows(costs, [question])]
    for row in rows:
        stages = row.graph.stages
        slowest = max(costs.sample_s(costs.stage(one.layers, 4, 1), 4, 1) for one in stages)
        assert best <= slowest * (1 + 1e-9)


@given(st.integers(1, 12), st.integers(1, 12))
def test_equal_stages_differ_by_one_layer_at_most(count: int, devices: int) -> None:
    costs = plain_costs(chain_edges(count), [1.0] * count, devices=devices)
    rows = EqualSplitPlanner().rows(costs, [Question(1, ("none",), (1,), devices)])
    assert len(rows) == (devices <= count)
    for row in rows:
        sizes = [len(stage.layers) for stage in row.graph.stages]
        assert max(sizes) - min(sizes) <= 1


def test_a_graph_with_too_many_downsets_has_no_plan() -> None:
    edges = [(tower * 4 + layer, tower * 4 + layer + 1) for tower in range(7) for layer in range(3)]
    costs = plain_costs(edges, [1.0] * 28)
    question = Question(1, ("none",), (1,), 4)
    assert PiperPlanner().rows(costs, [question]) == "no plan: the graph has more than 40,000 downsets"
    # PipeDream's planner takes the layers in their order.
    (row,) = PipeDreamPlanner().rows(costs, [question])
    assert [len(one.layers) for one in row.graph.stages] == [7, 7, 7, 7]
