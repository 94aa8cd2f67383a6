"""Law: sums on two levels are in the order of ranks inside nodes, then in that of nodes, in little memory."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from pool import WorkerPool

from weft.methods.hierarchical.options import HierarchicalOptions
from weft.methods.hierarchical.runtime import HierarchicalSums
from weft.run.transport.host_group import HostGroup
from weft.run.transport.rank_order import PIECE_ELEMENTS
from weft.sync.base import Meeting

pytestmark = pytest.mark.processes


def gradient_of(rank: int, length: int) -> torch.Tensor:
    # Wide magnitudes, so that another order of the sum has other bits.
    generator = torch.Generator().manual_seed(rank)
    numbers = torch.randn(length, generator=generator)
    return numbers * 10.0 ** torch.randint(-4, 5, (length,), generator=generator)


def added_up(addends: Sequence[torch.Tensor]) -> torch.Tensor:
    total = addends[0].clone()
    for one in addends[1:]:
        total += one
    return total


def sums(rank: int, ranks: int, per_node: int, length: int) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    """The whole sum, this rank's share, and the elements that a rank sends to others, and to other nodes."""
    sent = []

    class Watched(HostGroup):
        def exchange(self, taken: torch.Tensor, given: torch.Tensor, places: Sequence[int]) -> None:
            each = len(given) // len(places)
            sent.extend((each, place // per_node != self.place // per_node) for place in places)
            super().exchange(taken, given, places)

    gradient, group = gradient_of(rank, length), Watched(dist.new_group())
    one = HierarchicalSums(HierarchicalOptions(replicas_per_node=per_node))
    share = one.reduce_scatter(gradient, Meeting(group=group, stage=0))
    assert torch.equal(gradient, gradient_of(rank, length))
    away, longest = sum(count for count, far in sent if far), max(count for count, _ in sent)
    one.reduce(gradient, Meeting(group=group, stage=0))
    return gradient, share, away, longest


@pytest.mark.parametrize(("ranks", "per_node"), [(4, 2), (6, 2), (6, 3)])
def test_sums_go_by_node(worker_pool: WorkerPool, ranks: int, per_node: int) -> None:
    length = 5 * ranks
    found = worker_pool.run(sums, per_node, length, ranks=ranks)
    gradients = [gradient_of(rank, length) for rank in range(ranks)]
    borders = pairwise(range(0, ranks + 1, per_node))
    expected = added_up([added_up(gradients[first:last]) for first, last in borders])
    assert all(torch.equal(whole, expected) for whole, *_ in found)
    assert torch.equal(torch.cat([share for _, share, *_ in found]), expected)
    # One of the ranks on a node sends each element of the node's sum, once.
    assert {away for *_, away, _ in found} == {length * (ranks - per_node) // (ranks * per_node)}


def test_long_gradients_go_piece_by_piece(worker_pool: WorkerPool) -> None:
    length = 4 * (PIECE_ELEMENTS // 4 + 3)
    for whole, share, _, longest in worker_pool.run(sums, 2, length, ranks=4):
        assert longest <= PIECE_ELEMENTS // 2
        assert share.sum().isfinite()
        assert torch.equal(
            whole[-3:],
            added_up(
                [added_up([gradient_of(rank, length)[-3:] for rank in pair]) for pair in ((0, 1), (2, 3))]
            ),
        )


def as_dense(rank: int, ranks: int, per_node: int, stage: int) -> torch.Tensor:
    gradient, group = gradient_of(rank, 12), HostGroup(dist.new_group())
    options = HierarchicalOptions(replicas_per_node=per_node)
    HierarchicalSums(options).reduce(gradient, Meeting(group=group, stage=stage))
    return gradient


@pytest.mark.parametrize(("per_node", "stage"), [(1, 0), (3, 0), (2, -1)])
def test_one_level_and_shared_weights_are_summed_densely(
    worker_pool: WorkerPool, per_node: int, stage: int
) -> None:
    expected = added_up([gradient_of(rank, 12) for rank in range(3)])
    assert all(torch.equal(one, expected) for one in worker_pool.run(as_dense, per_node, stage, ranks=3))
