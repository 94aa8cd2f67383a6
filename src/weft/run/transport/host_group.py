"""`HostGroup`: collectives of ranks through host memory, on which gloo works.

Only this module and `weft.run.transport.channels` know of the copies: all callers give tensors on their
device. A CPU's tensors are in host memory already, and nothing is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist


class HostGroup:
    """A gloo process group; a `weft.sync.base.Group`, so each call returns when its result is there.

    `ranks` are its members, by their place in it; None takes them from torch.
    """

    def __init__(self, group: dist.ProcessGroup, ranks: Sequence[int] | None = None) -> None:
        self._group = group
        self._ranks = tuple(dist.get_process_group_ranks(group) if ranks is None else ranks)
        self.size, self.place = group.size(), group.rank()

    @classmethod
    def open(cls, name: str, ranks: Sequence[int], timeout: timedelta) -> HostGroup:
        """Open a group of these ranks of the job; only members call it, all with the same name.

        The name must be new in this job. All ranks open their groups in one order.
        """
        members = sorted(ranks)
        store = dist.PrefixStore(f"weft group {name}", _job_store())
        place = members.index(dist.get_rank())
        gloo = dist.ProcessGroupGloo(store, place, len(members), timeout)
        # It has all the group calls used here; torch's types omit them.
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
        """Shut the group down; its threads end with the last reference to it."""
        self._group.shutdown()


def _job_store() -> dist.Store:
    """Return the store through which the job's ranks exchange their addresses."""
    world = dist.group.WORLD
    assert world is not None, "the job has begun"
    return world.get_group_store()


def host_room(tensor: torch.Tensor) -> torch.Tensor:
    """Return host memory to receive a tensor's values: the tensor itself if it is on the CPU."""
    return tensor if tensor.device.type == "cpu" else torch.empty_like(tensor, device="cpu")


def bring_back(tensor: torch.Tensor, on_host: torch.Tensor) -> None:
    """Fill a tensor from host memory, unless it is the same memory."""
    if on_host is not tensor:
        tensor.copy_(on_host)
