"""Dense synchronisation adds in the order of the ranks, whoever is late."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from installing import forget_installed, register
from pool import WorkerPool

from weft.describe.plan import Choice
from weft.errors import InputError
from weft.run.transport.device_group import DeviceGroup
from weft.run.transport.host_group import HostGroup
from weft.run.transport.rank_order import PIECE_ELEMENTS
from weft.sync import get_synchroniser
from weft.sync.base import Meeting
from weft.sync.dense import Dense, RoundedDense

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


def reduce_in(rank: int, ranks: int, sent_as: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The whole sum and this rank's share of it, both of gradients that travel in that precision."""
    gradient, meeting = gradient_of(rank), Meeting(group=HostGroup(dist.new_group()))
    share = RoundedDense(sent_as).reduce_scatter(gradient, meeting)
    assert torch.equal(gradient, gradient_of(rank))
    RoundedDense(sent_as).reduce(gradient, meeting)
    return gradient, share


@pytest.mark.processes
@pytest.mark.parametrize("sent_as", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_gradients_are_rounded_for_the_way_and_added_up_as_wide_as_they_were(
    worker_pool: WorkerPool, ranks: int, sent_as: torch.dtype
) -> None:
    total = gradient_of(0).to(sent_as).float()
    for rank in range(1, ranks):
        total += gradient_of(rank).to(sent_as).float()
    results = worker_pool.run(reduce_in, sent_as, ranks=ranks)
    assert torch.equal(torch.cat([share for _, share in results]), total)
    # Where all receive the whole sum, it travels in that precision, too.
    assert all(torch.equal(found, total.to(sent_as).float()) for found, _ in results)


def sent_bytes(rank: int, ranks: int, sent_as: torch.dtype | None) -> dict[str, list[int]]:
    """The bytes that a rank hands to the exchanges of a reduction."""
    counted: dict[str, list[int]] = {"all_to_all": [], "all_gather": [], "all_reduce": []}

    class Counting(HostGroup):
        def all_to_all(self, taken: torch.Tensor, given: torch.Tensor) -> None:
            counted["all_to_all"].append(given.nbytes)
            super().all_to_all(taken, given)

        def all_gather(self, flat: torch.Tensor, share: torch.Tensor) -> None:
            counted["all_gather"].append(flat.nbytes)
            super().all_gather(flat, share)

        def all_reduce(self, tensor: torch.Tensor) -> None:
            counted["all_reduce"].append(tensor.nbytes)
            super().all_reduce(tensor)

    dense = Dense() if sent_as is None else RoundedDense(sent_as)
    dense.reduce(gradient_of(rank), Meeting(group=Counting(dist.new_group())))
    return counted


@pytest.mark.processes
def test_the_bytes_on_the_way_are_those_of_the_precision(worker_pool: WorkerPool) -> None:
    for ranks in (2, 3):
        for sent in worker_pool.run(sent_bytes, torch.bfloat16, ranks=ranks):
            assert sent == {"all_to_all": [2 * LENGTH], "all_gather": [2 * LENGTH], "all_reduce": []}
    for sent in worker_pool.run(sent_bytes, None, ranks=3):
        assert sent == {"all_to_all": [4 * LENGTH], "all_gather": [4 * LENGTH], "all_reduce": []}


def overflow(rank: int, ranks: int, kind: type[DeviceGroup], sharded: bool) -> torch.Tensor:
    # Finite in fp32; too large for fp16 on one rank, and minus infinity on another.
    gradient = torch.tensor([1.0, 7e4, 2.0, 3.0]) if rank == 0 else torch.tensor([1.0, 1.0, -7e4, 4.0])
    meeting = Meeting(group=kind(dist.new_group()))
    if sharded:
        return RoundedDense(torch.float16).reduce_scatter(gradient, meeting)
    RoundedDense(torch.float16).reduce(gradient, meeting)
    return gradient


@pytest.mark.processes
@pytest.mark.parametrize("kind", [HostGroup, DeviceGroup])
def test_what_overflows_on_the_way_stays_infinite(worker_pool: WorkerPool, kind: type[DeviceGroup]) -> None:
    expected = torch.tensor([2.0, float("inf"), float("-inf"), 7.0])
    for found in worker_pool.run(overflow, kind, False, ranks=2):
        assert torch.equal(found, expected)
    assert torch.equal(torch.cat(worker_pool.run(overflow, kind, True, ranks=2)), expected)


def test_methods_are_chosen_by_name() -> None:
    assert isinstance(get_synchroniser(Choice(name="dense")), Dense)
    with pytest.raises(
        InputError, match=r"'dens' is not one of clan, cser, dense, .* \(nearest valid: dense\)"
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
    forget_installed()
    with pytest.raises(InputError, match="two methods are called 'dense'"):
        get_synchroniser(Choice(name="rounded"))
