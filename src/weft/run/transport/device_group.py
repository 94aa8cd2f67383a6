"""`DeviceGroup`: collectives of ranks on tensors where they lie, by the backend of their device.

On an accelerator the calls launch kernels in the current stream, and the host goes on. On a CPU they block.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Self

import torch
import torch.distributed as dist

GLOO, NCCL = "gloo", "nccl"
# A tag of gloo's messages that none has.
_NEVER_SENT = 99


class DeviceGroup:
    """A torch process group; a `weft.sync.base.Group`.

    `ranks` are its members, by their place in it; None takes them from torch.
    """

    def __init__(
        self, group: dist.ProcessGroup, ranks: Sequence[int] | None = None, backend: str = GLOO
    ) -> None:
        self.backend = backend
        self._group = group
        self._ranks = tuple(dist.get_process_group_ranks(group) if ranks is None else ranks)
        self.size, self.place = group.size(), group.rank()

    @classmethod
    def open(cls, name: str, ranks: Sequence[int], timeout: timedelta, backend: str = GLOO) -> Self:
        """Open a group of these ranks of the job; only members call it, all with the same name.

        The name must be new in this job. All ranks open their groups in one order.
        """
        members = sorted(ranks)
        store = dist.PrefixStore(f"weft group {name}", _job_store())
        place = members.index(dist.get_rank())
        opened = _OPENERS[backend](store, place, len(members), timeout)
        # It has all the group calls used here; torch's types omit them.
        return cls(opened, members, backend)  # type: ignore[arg-type]

    def all_reduce(self, tensor: torch.Tensor) -> None:
        self._group.allreduce([tensor]).wait()

    def add_up(self, flat: torch.Tensor, sent_as: torch.dtype | None = None) -> None:
        # `to` returns the tensor itself if it has this precision.
        sent = flat.to(sent_as or flat.dtype)
        self.all_reduce(sent)
        if sent is not flat:
            flat.copy_(sent)

    def reduce_scatter(self, flat: torch.Tensor, sent_as: torch.dtype | None = None) -> torch.Tensor:
        return self._scattered_sum(flat.to(sent_as or flat.dtype)).to(flat.dtype)

    def _scattered_sum(self, sent: torch.Tensor) -> torch.Tensor:
        share = sent.new_empty(len(sent) // self.size)
        self._group._reduce_scatter_base(share, sent, dist.ReduceScatterOptions()).wait()
        return share

    def all_gather(self, flat: torch.Tensor, share: torch.Tensor) -> None:
        self._group._allgather_base(flat, share).wait()

    def all_to_all(self, taken: torch.Tensor, given: torch.Tensor) -> None:
        self._group.alltoall_base(taken, given, [], []).wait()

    def all_to_all_rows(
        self, taken: torch.Tensor, given: torch.Tensor, taken_rows: Sequence[int], given_rows: Sequence[int]
    ) -> None:
        self._group.alltoall_base(taken, given.contiguous(), list(taken_rows), list(given_rows)).wait()

    def exchange(self, taken: torch.Tensor, given: torch.Tensor, places: Sequence[int]) -> None:
        length = len(given) // len(places)
        lengths = [length if place in places else 0 for place in range(self.size)]
        self.all_to_all_rows(taken, given, lengths, lengths)

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        whole = tensor.contiguous()
        self._group.broadcast(whole, self._ranks.index(source)).wait()
        if whole is not tensor:
            tensor.copy_(whole)

    def send(self, tensor: torch.Tensor, place: int) -> None:
        self._group.send([tensor.contiguous()], place, 0).wait()

    def receive(self, tensor: torch.Tensor, place: int) -> None:
        self._group.recv([tensor], place, 0).wait()

    def close(self) -> None:
        """Shut the group down; its threads end with the last reference to it."""
        self._group.shutdown()

    def cut(self) -> None:
        """Close all connections of a gloo group, so that calls under way fail; any thread may call it.

        Its `abort` does nothing in torch 2.13. But a call that times out closes the group's connections. This
        one waits for a message that nobody sends. A broken connection refuses it at once and the others stay
        open. So each peer is tried.
        """
        for turn in range(1, self.size):
            with suppress(RuntimeError):
                call = self._group.recv([torch.empty(1)], (self.place + turn) % self.size, _NEVER_SENT)
                call.wait(timedelta(milliseconds=1))


def abort(groups: Iterable[DeviceGroup]) -> None:
    """End all calls under way in these groups; later ones fail. Any thread may call it.

    A kernel of NCCL whose partner is gone ends with its communicator only.
    """
    nccl, others = list[Any](), list[DeviceGroup]()
    for group in groups:
        if group.backend == NCCL:
            nccl.append(group._group)
        else:
            others.append(group)
    # All communicators at once: to end one may wait for a kernel of another.
    if nccl:
        nccl[0]._group_start()
        for one in nccl:
            one.abort()
        nccl[0]._group_end()
    for group in others:
        group.cut()


def _open_nccl(store: dist.Store, place: int, size: int, timeout: timedelta) -> dist.Backend:
    """Return an NCCL group; its members connect in the first call."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, place, size, options)  # type: ignore[return-value]


_OPENERS = {GLOO: dist.ProcessGroupGloo, NCCL: _open_nccl}


def _job_store() -> dist.Store:
    """Return the store through which the job's ranks exchange their addresses."""
    world = dist.group.WORLD
    assert world is not None, "the job has begun"
    return world.get_group_store()
