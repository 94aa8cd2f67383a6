"""`HostGroup`: what ranks exchange goes through host memory, which is what gloo works on.

The one place that knows it, with the messages of `weft.run.transport.channels`: everybody else gives tensors
where they lie. On a CPU they are in host memory already, and nothing is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist


class HostGroup:
    """A process group of gloo; a `weft.sync.base.Group`, whose calls return when the result is there.

    `ranks` are its members, by their place in it; None: those that torch knows.
    """

    def __init__(self, group: dist.ProcessGroup, ranks: Sequence[int] | None = None) -> None:
        self._group = group
        self._ranks = tuple(dist.get_process_group_ranks(group) if ranks is None else ranks)
        self.size, self.place = group.size(), group.rank()

    @classmethod
    def open(cls, name: str, ranks: Sequence[int], timeout: timedelta) -> HostGroup:
        """A group of these ranks of the job, each of which opens it under the same name; others do nothing.

        Nobody else has used the name in this job. Of several groups all ranks open their own in one order.
        """
        members = sorted(ranks)
        store = dist.PrefixStore(f"weft group {name}", _job_store())
        place = members.index(dist.get_rank())
        gloo = dist.ProcessGroupGloo(store, place, len(members), timeout)
        # It has all calls of a group that are made here; torch's types leave them out.
        return cls(gloo, members)  # type: ignore[arg-type]

    def all_reduce(self, tensor: torch.Tensor) -> None:
        on_host = tensor.to("cpu")
        self._group.allreduce([on_host]).wait()
        bring_back(tensor, on_host)

    def all_gather(self, flat: torch.Tensor, share: torch.Tensor) -> None:
        on_host = host_room(flat)
        self._group._allgather_base(on_host, share.to("cpu")).wait()
        bring_back(flat, on_host)

    def all_to_all(self, taken: torch.Tensor, given: torch.Tensor) -> None:
        on_host = host_room(taken)
        self._group.alltoall_base(on_host, given.to("cpu"), [], []).wait()
        bring_back(taken, on_host)

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        on_host = tensor.to("cpu").contiguous()
        self._group.broadcast(on_host, self._ranks.index(source)).wait()
        bring_back(tensor, on_host)

    def send(self, tensor: torch.Tensor, place: int) -> None:
        self._group.send([tensor.to("cpu")], place, 0).wait()

    def receive(self, tensor: torch.Tensor, place: int) -> None:
        on_host = host_room(tensor)
        self._group.recv([on_host], place, 0).wait()
        bring_back(tensor, on_host)

    def close(self) -> None:
        """Its threads end with the last reference to it."""
        self._group.shutdown()


def _job_store() -> dist.Store:
    """Where the ranks of the job tell each other where they are."""
    world = dist.group.WORLD
    assert world is not None, "the job has begun"
    return world.get_group_store()


def host_room(tensor: torch.Tensor) -> torch.Tensor:
    """Where to put what is to fill a tensor: the tensor itself, if the host can write it."""
    return tensor if tensor.device.type == "cpu" else torch.empty_like(tensor, device="cpu")


def bring_back(tensor: torch.Tensor, on_host: torch.Tensor) -> None:
    """Fill a tensor with what is in host memory, unless it is the same memory."""
    if on_host is not tensor:
        tensor.copy_(on_host)
