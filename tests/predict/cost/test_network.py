from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from predict.cost.machines import BETWEEN, CPU, INSIDE, MACHINE, cluster

from weft.predict.cost.network import Network

PLAIN = Network(cluster=cluster(device=CPU))
GPUS = Network(cluster=cluster())
MEASURED = Network(cluster=cluster(device=CPU), machine=MACHINE)
sizes = st.integers(0, 10**9)
groups = st.sets(st.integers(0, 7), min_size=2).map(sorted)


@given(groups, sizes, sizes, st.sampled_from([PLAIN, GPUS, MEASURED]))
def test_more_bytes_never_help(ranks: list[int], fewer: int, more: int, network: Network) -> None:
    low, high = sorted((fewer, more))
    assert network.all_reduce_s(ranks, low) <= network.all_reduce_s(ranks, high)


@given(groups, sizes, st.sampled_from([PLAIN, GPUS, MEASURED]))
def test_the_links_of_nodes_are_busy_while_a_collective_between_nodes_runs(
    ranks: list[int], size: int, network: Network
) -> None:
    """At least with what must leave each node, and never longer than the collective takes."""
    nodes = len({rank // 4 for rank in ranks})
    least = (nodes - 1) / nodes * size / BETWEEN.bytes_per_s
    for taken, ways in ((network.all_reduce(ranks, size), 2), (network.all_gather(ranks, size), 1)):
        assert ways * least * (1 - 1e-6) - 1e-9 <= taken.link_s <= taken.seconds * (1 + 1e-12)
        assert (taken.link_s > 0.0) == (nodes > 1 and size > 0)


@given(groups, sizes)
def test_an_all_reduce_is_no_slower_than_a_reduce_scatter_and_an_all_gather(
    ranks: list[int], size: int
) -> None:
    halves = PLAIN.reduce_scatter(ranks, size).seconds, PLAIN.all_gather(ranks, size).seconds
    assert PLAIN.all_reduce_s(ranks, size) <= sum(halves) * (1 + 1e-12)
    assert halves[0] == halves[1] > 0.0


@given(groups, st.integers(1, 10**9))
def test_no_collective_beats_the_bytes_that_must_pass_its_slowest_cut(ranks: list[int], size: int) -> None:
    across = len({rank // 4 for rank in ranks}) > 1
    least = size / BETWEEN.bytes_per_s if across else size / INSIDE.bytes_per_s
    assert PLAIN.all_reduce_s(ranks, size) >= least * (1 - 1e-12)


@given(groups, sizes, sizes)
def test_an_all_to_all_sends_each_part_once(ranks: list[int], fewer: int, more: int) -> None:
    low, high = (PLAIN.all_to_all(ranks, size) for size in sorted((fewer, more)))
    assert low.seconds <= high.seconds
    places = [rank // 4 for rank in ranks]
    here = max(places.count(node) for node in places)
    part = max(fewer, more) / len(ranks)
    if here == len(ranks):
        assert high.seconds == pytest.approx(INSIDE.latency_s + (here - 1) * part / INSIDE.bytes_per_s)
        assert high.link_s == 0.0
    else:
        leaving = here * (len(ranks) - here) * part
        assert high.link_s == pytest.approx(leaving / BETWEEN.bytes_per_s)
        assert high.seconds >= BETWEEN.latency_s + high.link_s - 1e-15


@given(groups, sizes)
def test_an_all_to_all_in_two_levels_takes_the_one_inside_nodes_longer(ranks: list[int], size: int) -> None:
    at_once, in_levels = PLAIN.all_to_all(ranks, size), PLAIN.all_to_all_by_node(ranks, size)
    assert in_levels.link_s == at_once.link_s
    counts = Counter(rank // 4 for rank in ranks)
    here = max(counts.values())
    if len(counts) == 1 or here == 1:
        assert in_levels == at_once
        return
    inside_s = INSIDE.latency_s + (here - 1) / here * size / INSIDE.bytes_per_s
    assert in_levels.seconds == pytest.approx(inside_s + BETWEEN.latency_s + at_once.link_s)


def test_a_ring_takes_the_textbook_time() -> None:
    turn = INSIDE.latency_s + 1e6 / 4 / INSIDE.bytes_per_s
    assert PLAIN.all_reduce_s(range(4), 10**6) == pytest.approx(2 * 3 * turn)
    slow = BETWEEN.latency_s + 1e6 / 2 / BETWEEN.bytes_per_s
    assert PLAIN.all_reduce_s((0, 4), 10**6) == pytest.approx(2 * slow)


def test_hierarchy_wins_where_latency_between_nodes_rules() -> None:
    """Two nodes of four: 3 turns inside and 1 between, instead of 7 between."""
    inside = 3 * (INSIDE.latency_s + 8 / 4 / INSIDE.bytes_per_s)
    between = BETWEEN.latency_s + 2 / 2 / (BETWEEN.bytes_per_s / 4)
    assert PLAIN.all_gather(range(8), 8).seconds == pytest.approx(inside + between)


def wide(nodes: int, devices: int = 1) -> Network:
    return Network(cluster=cluster(nodes=nodes, devices=devices, device=CPU))


def test_hierarchy_takes_the_textbook_time() -> None:
    """Eight nodes of four: all bytes inside, then each device's quarter between, four rings to a link."""
    size = 4 * 10**6
    inside = 3 * (INSIDE.latency_s + size / 4 / INSIDE.bytes_per_s)
    between = 7 * (BETWEEN.latency_s + size / 4 / 8 / (BETWEEN.bytes_per_s / 4))
    assert wide(8, 4).all_gather(range(32), size).seconds == pytest.approx(inside + between)


@pytest.mark.parametrize("levels", range(1, 11))
def test_an_empty_all_reduce_takes_the_logarithm_of_its_ranks(levels: int) -> None:
    nodes = 2**levels
    assert wide(nodes).all_reduce_s(range(nodes), 0) == pytest.approx(2 * levels * BETWEEN.latency_s)


@given(st.integers(3, 64), st.integers(10**4, 10**6))
def test_trees_take_the_best_number_of_pieces(nodes: int, size: int) -> None:
    """The ring or the best whole number of pieces, which the real one comes within a little of."""
    depth, turn = (nodes - 1).bit_length(), size / BETWEEN.bytes_per_s
    ring = 2 * (nodes - 1) * (BETWEEN.latency_s + turn / nodes)
    pieces = [2 * (depth + count - 1) * (BETWEEN.latency_s + turn / count) for count in range(1, 40)]
    reached = wide(nodes).all_reduce_s(range(nodes), size)
    assert reached <= min(ring, *pieces) * (1 + 1e-12)
    assert reached >= min(ring, *pieces) * 0.97


def test_trees_win_where_latency_rules_and_rings_where_bandwidth_does() -> None:
    network = wide(64)
    small, large = (network.all_reduce_s(range(64), size) for size in (1, 10**10))
    assert small == pytest.approx(2 * 6 * BETWEEN.latency_s, rel=1e-3)
    assert large == pytest.approx(2 * 63 * (BETWEEN.latency_s + 1e10 / 64 / BETWEEN.bytes_per_s))


def test_one_rank_has_nobody_to_talk_to() -> None:
    assert PLAIN.all_reduce_s((3,), 10**9) == MEASURED.all_reduce_s((3,), 10**9) == 0.0


@given(st.permutations(range(8)), st.integers(1, 10**9))
def test_the_order_in_which_ranks_are_named_is_nothing(order: list[int], size: int) -> None:
    assert PLAIN.all_reduce_s(order, size) == PLAIN.all_reduce_s(range(8), size)


def test_messages_share_the_link_of_their_node_but_not_the_links_inside() -> None:
    assert PLAIN.message_s(0, 1, 3 * 10**6, 4) == PLAIN.message_s(0, 1, 3 * 10**6) == (1e-5, 3e-6)
    assert PLAIN.message_s(0, 4, 5 * 10**6) == (1e-4, 1e-5)
    assert PLAIN.message_s(0, 4, 5 * 10**6, 4) == pytest.approx((4e-4, 1e-5))


def test_measured_messages_take_the_measured_time_inside_a_node_only() -> None:
    for size, seconds in MACHINE.message:
        assert sum(MEASURED.message_s(0, 1, int(size))) == pytest.approx(seconds)
    assert MEASURED.message_s(0, 4, 10**6) == PLAIN.message_s(0, 4, 10**6)


def test_measured_all_reduces_are_scaled_as_rings_scale() -> None:
    for size, seconds in MACHINE.collectives["all_reduce"][2]:
        assert MEASURED.all_reduce_s((0, 1), int(size)) == pytest.approx(seconds)
    assert MEASURED.all_reduce_s(range(4), 10**6) == pytest.approx(3 * 2e-4 + 1.5 * 1e-3)
    assert MEASURED.all_reduce_s((0, 4), 10**6) == PLAIN.all_reduce_s((0, 4), 10**6)
