from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from predict.cost.machines import CPU, MACHINE, MODEL, cluster
from predict.plans import plan_of

from weft.describe.families import layer_graph
from weft.planning.compile import compile_plan
from weft.predict.cost.measured_collectives import (
    BETWEEN_HALF_WIDTH,
    BEYOND_HALF_WIDTH,
    collective_s,
    ranks_half_width,
)
from weft.predict.cost.network import Network
from weft.predict.cost.placed_plan import CostModel
from weft.predict.cost.price import price
from weft.predict.profile import COLLECTIVES, Table

SIZES = (1024.0, 2.0**16, 2.0**20)
counts = st.sets(st.integers(2, 16), min_size=1, max_size=4)
seconds = st.floats(1e-6, 1.0)


@st.composite
def tables(draw: st.DrawFn) -> dict[int, Table]:
    """Measured at several numbers of ranks; more bytes never take less time."""
    return {
        count: tuple(zip(SIZES, sorted(draw(st.tuples(*[seconds] * 3))), strict=True))
        for count in draw(counts)
    }


def ring(ranks: int, moved_bytes: float) -> float:
    return (ranks - 1) * (3e-5 + moved_bytes / ranks / 1e9)


@given(tables())
def test_measured_numbers_of_ranks_take_the_measured_time(measured: dict[int, Table]) -> None:
    for ranks, table in measured.items():
        for size, taken in table:
            assert collective_s(measured, ranks, size) == pytest.approx(taken)


@given(counts, st.integers(2, 32), st.floats(0.0, 2.0**20))
def test_where_rings_were_measured_any_number_of_ranks_takes_as_long_as_a_ring(
    measured: set[int], ranks: int, moved_bytes: float
) -> None:
    rings = {
        count: ((0.0, ring(count, 0.0)), *((size, ring(count, size)) for size in SIZES)) for count in measured
    }
    assert collective_s(rings, ranks, moved_bytes) == pytest.approx(ring(ranks, moved_bytes))


@given(tables(), st.integers(2, 32), st.floats(1.0, 2.0**21))
def test_a_number_of_ranks_takes_a_time_between_those_of_its_neighbours(
    measured: dict[int, Table], ranks: int, moved_bytes: float
) -> None:
    below = max((one for one in measured if one <= ranks), default=min(measured))
    above = min((one for one in measured if one >= ranks), default=max(measured))
    ends = [collective_s({one: measured[one]}, ranks, moved_bytes) for one in (below, above)]
    found = collective_s(measured, ranks, moved_bytes)
    assert min(ends) * (1 - 1e-12) <= found <= max(ends) * (1 + 1e-12)


def test_halfway_between_two_measured_numbers_of_ranks_both_count_alike() -> None:
    latency_only = {2: ((0.0, 1.0), (8.0, 1.0)), 4: ((0.0, 6.0), (8.0, 6.0))}
    # Three ranks take two turns: of one second by the table of two ranks, of two by that of four.
    assert collective_s(latency_only, 3, 8.0) == pytest.approx((2 * 1.0 + 2 * 2.0) / 2)


@given(tables(), st.integers(2, 32), st.floats(0.0, 2.0**21), st.floats(0.0, 2.0**21))
def test_more_bytes_never_help(measured: dict[int, Table], ranks: int, one: float, other: float) -> None:
    low, high = sorted((one, other))
    found = collective_s(measured, ranks, low)
    assert found <= collective_s(measured, ranks, high) * (1 + 1e-12)


def test_the_interval_is_wider_between_measured_numbers_of_ranks_and_widest_beyond_them() -> None:
    widths = [ranks_half_width((2, 4), ranks) for ranks in (2, 3, 4, 5)]
    assert widths == [0.0, BETWEEN_HALF_WIDTH, 0.0, BEYOND_HALF_WIDTH]
    assert ranks_half_width((4,), 2) == BEYOND_HALF_WIDTH > BETWEEN_HALF_WIDTH > 0.0
    assert ranks_half_width((), 2) == 0.0


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_each_collective_has_its_own_tables_inside_nodes_only(collective: str) -> None:
    table = {2: ((4096.0, 5e-4), (2.0**20, 7e-4)), 3: ((4096.0, 9e-4), (2.0**20, 2e-3))}
    machine = replace(MACHINE, collectives={collective: table})
    network = Network(cluster=cluster(device=CPU), machine=machine)
    plain = Network(cluster=cluster(device=CPU))
    for name in COLLECTIVES:
        taken = getattr(network, name)
        if name == collective:
            assert (taken((0, 1), 2**20).seconds, taken((1, 2, 3), 2**20).seconds) == (7e-4, 2e-3)
        else:
            assert taken((0, 1), 2**20) == getattr(plain, name)((0, 1), 2**20)
        assert taken((0, 4), 2**20) == getattr(plain, name)((0, 4), 2**20)


@pytest.mark.parametrize(("axis", "ranks"), [("dp", 3), ("tp", 4)])
def test_a_step_is_less_certain_where_its_collectives_were_measured_with_other_numbers_of_ranks(
    axis: str, ranks: int
) -> None:
    graph, where = layer_graph(MODEL), cluster(nodes=1, device=CPU)
    plan = plan_of(graph, where, **{"pp": 1, axis: ranks})
    table = MACHINE.collectives["all_reduce"][2]
    half_widths = []
    for measured in ((2, ranks), (2,)):
        machine = replace(MACHINE, collectives={"all_reduce": dict.fromkeys(measured, table)})
        priced = price(
            CostModel(graph=graph, cluster=where, machine=machine), compile_plan(plan, graph), plan
        )
        half_widths.append(priced.high_scale - 1.0)
    assert half_widths == pytest.approx([0.15, BEYOND_HALF_WIDTH])
