"""Dense synchronisation adds in the order of the ranks, whoever is late."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from installing import register
from pool import WorkerPool

from weft.describe.plan import Choice
from weft.errors import InputError
from weft.installed import installed
from weft.run.transport.host_group import HostGroup
from weft.run.transport.rank_order import PIECE_ELEMENTS
from weft.sync import get_synchroniser
from weft.sync.base import Meeting
from weft.sync.dense import Dense

LENGTH = 4 * 3 * 5


def gradient_of(rank: int) -> torch.Tensor:
    # Wide magnitudes, so that another order of the sum has other bits.
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(LENGTH, generator=generator) * 10.0 ** torch.randint(
        -4, 5, (LENGTH,), generator=generator
    )


def reduce_late(rank: int, ranks: int, late: int) -> torch.Tensor:
    gradient, group = gradient_of(rank), HostGroup(dist.new_group())
    if rank == late:
        time.sleep(0.1)
    get_synchroniser(Choice(name="dense")).reduce(gradient, Meeting(group=group))
    return gradient


def share_late(rank: int, ranks: int, late: int) -> torch.Tensor:
    gradient, group = gradient_of(rank), HostGroup(dist.new_group())
    if rank == late:
        time.sleep(0.1)
    share = get_synchroniser(Choice(name="dense")).reduce_scatter(gradient, Meeting(group=group))
    assert torch.equal(gradient, gradient_of(rank))
    return share


def expected_sum(ranks: int) -> torch.Tensor:
    total = gradient_of(0)
    for rank in range(1, ranks):
        total += gradient_of(rank)
    return total


@pytest.mark.processes
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_the_shares_are_those_of_the_sum_in_rank_order(worker_pool: WorkerPool, ranks: int) -> None:
    for late in (0, ranks - 1):
        assert torch.equal(torch.cat(worker_pool.run(share_late, late, ranks=ranks)), expected_sum(ranks))


def share_of_pieces(rank: int, ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The share of a gradient that is exchanged in several pieces, and what it should be."""
    length = ranks * (PIECE_ELEMENTS // ranks + 5)
    gradients = [
        torch.randn(length, generator=torch.Generator().manual_seed(member)) for member in range(ranks)
    ]
    found = HostGroup(dist.new_group()).reduce_scatter(gradients[rank])
    expected = gradients[0].clone()
    for gradient in gradients[1:]:
        expected += gradient
    return found, expected.view(ranks, -1)[rank]


@pytest.mark.processes
@pytest.mark.parametrize("ranks", [2, 3])
def test_long_gradients_are_exchanged_piece_by_piece(worker_pool: WorkerPool, ranks: int) -> None:
    for found, expected in worker_pool.run(share_of_pieces, ranks=ranks):
        assert torch.equal(found, expected)


@pytest.mark.processes
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_the_sum_is_the_one_in_rank_order(worker_pool: WorkerPool, ranks: int) -> None:
    expected = expected_sum(ranks)
    for late in (0, ranks - 1):
        for found in worker_pool.run(reduce_late, late, ranks=ranks):
            assert torch.equal(found, expected)


def test_methods_are_chosen_by_name() -> None:
    assert isinstance(get_synchroniser(Choice(name="dense")), Dense)
    with pytest.raises(
        InputError, match=r"'dens' is not one of dense, local-averaging \(nearest valid: dense\)"
    ):
        get_synchroniser(Choice(name="dens"))
    with pytest.raises(InputError, match="'dense' takes no options, given every"):
        get_synchroniser(Choice(name="dense", options={"every": 2}))
    with pytest.raises(InputError, match=r"sync: evry: unknown key.* \(nearest valid: every\)"):
        get_synchroniser(Choice(name="local-averaging", options={"evry": 2}))


def test_methods_of_others_are_found_by_name_and_do_not_take_those_of_weft(packages: Path) -> None:
    named = {"rounded": "weft.sync.dense:Dense"}
    register(packages, "rounded", {"weft.synchronisers": named})
    assert isinstance(get_synchroniser(Choice(name="rounded")), Dense)
    register(packages, "again", {"weft.synchronisers": {"dense": "weft.sync.dense:Dense"}})
    installed.cache_clear()
    with pytest.raises(InputError, match="two methods are called 'dense'"):
        get_synchroniser(Choice(name="rounded"))
