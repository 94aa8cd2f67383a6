"""Columns over ranks say what the cluster says rank by rank; rings and spreads against plain loops."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st
from predict.cost.machines import BETWEEN, CPU, GPU, INSIDE

from weft.describe.cluster import Cluster, NodeGroup
from weft.predict.cost.places import ClusterPlaces

CLUSTER = Cluster(
    name="mixed",
    groups=(
        NodeGroup(name="a", count=2, device=GPU, devices=3, link=INSIDE, speeds=(1.0, 0.5, 1.0)),
        NodeGroup(name="b", count=3, device=CPU, devices=2, link=INSIDE),
    ),
    links={("a", "a"): BETWEEN, ("a", "b"): BETWEEN, ("b", "b"): BETWEEN},
)
PLACES = ClusterPlaces(CLUSTER)
RANKS = range(CLUSTER.ranks)
some_ranks = st.sets(st.sampled_from(RANKS), min_size=1).map(sorted)


def hops(ranks: list[int]) -> list[tuple[int, int]]:
    """Neighbours on a ring that go from one node to another."""
    ring = [*pairwise(ranks), (ranks[-1], ranks[0])]
    return [hop for hop in ring if CLUSTER.node_of(hop[0]) != CLUSTER.node_of(hop[1])]


def test_columns_are_what_the_cluster_says_of_each_rank() -> None:
    assert PLACES.group.tolist() == [CLUSTER.group_index_of(rank) for rank in RANKS]
    nodes = list(dict.fromkeys(CLUSTER.node_of(rank) for rank in RANKS))
    assert PLACES.node.tolist() == [nodes.index(CLUSTER.node_of(rank)) for rank in RANKS]
    assert PLACES.speed.tolist() == [CLUSTER.speed_of(rank) for rank in RANKS]
    assert PLACES.synchronous.tolist() == [CLUSTER.device_of(rank).synchronous for rank in RANKS]
    assert PLACES.usable_bytes.tolist() == [CLUSTER.device_of(rank).usable_bytes for rank in RANKS]
    paces = [(CLUSTER.group_index_of(rank), CLUSTER.speed_of(rank)) for rank in RANKS]
    assert [PLACES.paces[pace] for pace in PLACES.pace.tolist()] == paces
    assert list(PLACES.paces) == sorted(set(paces))


@given(st.lists(some_ranks, max_size=4))
def test_a_ring_uses_one_link_where_it_leaves_and_one_where_it_enters_a_node(rings: list[list[int]]) -> None:
    def links(ranks: list[int]) -> set[int]:
        ends = [(hop, hop[::-1]) for hop in hops(ranks)]
        return {
            2 * (int(PLACES.node[here]) * len(CLUSTER.groups) + CLUSTER.group_index_of(there)) + leaves
            for out, back in ends
            for (here, there), leaves in ((out, 1), (back, 0))
        }

    ring, link = PLACES.links_of_rings(rings)
    found = list(zip(ring.tolist(), link.tolist(), strict=True))
    assert found == [(number, one) for number, ranks in enumerate(rings) for one in sorted(links(ranks))]


@given(some_ranks)
def test_a_spread_counts_nodes_and_names_the_groups_of_neighbours(ranks: list[int]) -> None:
    spread = PLACES.spread_of(ranks[::-1])
    members = Counter(CLUSTER.node_of(rank) for rank in ranks)
    assert (spread.ranks, spread.nodes) == (len(ranks), len(members))
    assert (spread.fewest_on_a_node, spread.most_on_a_node) == (min(members.values()), max(members.values()))
    assert spread.even == (len(set(members.values())) == 1)
    assert set(spread.inside) == {node[0] for node, count in members.items() if count > 1}
    pairs = [(CLUSTER.group_index_of(one), CLUSTER.group_index_of(other)) for one, other in hops(ranks)]
    assert set(spread.around) == set(pairs)
    assert set(spread.along) == set(pairs[: len(members) - 1])
