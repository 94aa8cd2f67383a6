"""Law: a way to agree pays for what it sends on each class of links, and for what it computes."""

from __future__ import annotations

import pytest

from weft.describe.cluster_file import parse_cluster
from weft.describe.synchronisation import AS_IT_IS, Wire
from weft.predict.cost.network import Network

# So many that the start of a collective is nothing.
BYTES = 2**36


def seconds(ranks: list[int], wire: Wire) -> float:
    network = Network(cluster=parse_cluster("16xa100-80gb"))
    return network.carrying(wire).all_reduce_s(ranks, BYTES)


@pytest.mark.parametrize(("ranks", "inside", "between"), [([0, 1], 0.25, 1.0), ([0, 8], 1.0, 0.25)])
def test_bytes_count_on_the_links_that_they_go_over(ranks: list[int], inside: float, between: float) -> None:
    plain = seconds(ranks, AS_IT_IS)
    fewer = seconds(ranks, Wire(inside=inside, between=between))
    assert fewer == pytest.approx(plain / 4, rel=0.02)
    assert seconds(ranks, Wire(inside=between, between=inside)) == plain


def test_a_network_that_carries_all_as_it_is_is_the_same() -> None:
    network = Network(cluster=parse_cluster("2xa100-80gb"))
    assert network.carrying(AS_IT_IS) is network
