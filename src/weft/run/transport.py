"""`HostGroup`: what ranks exchange goes through host memory, which is what gloo works on.

The one place that knows it, with the messages of `weft.run.channels`: everybody else gives tensors where they
lie. On a CPU they are in host memory already, and nothing is copied.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

# torch has renamed it, and warns of the former name.
_all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class HostGroup:
    """A process group of gloo; a `weft.sync.base.Group`, whose calls return when the result is there."""

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        self._process_group = process_group
        self.size = dist.get_world_size(process_group)
        self.place = dist.get_rank(process_group)

    def all_reduce(self, tensor: torch.Tensor) -> None:
        on_host = tensor.to("cpu")
        dist.all_reduce(on_host, group=self._process_group)
        bring_back(tensor, on_host)

    def all_gather(self, flat: torch.Tensor, share: torch.Tensor) -> None:
        on_host = host_room(flat)
        _all_gather_flat(on_host, share.to("cpu"), group=self._process_group)
        bring_back(flat, on_host)

    def all_to_all(self, taken: torch.Tensor, given: torch.Tensor) -> None:
        on_host = host_room(taken)
        dist.all_to_all_single(on_host, given.to("cpu"), group=self._process_group)
        bring_back(taken, on_host)

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        on_host = tensor.to("cpu").contiguous()
        dist.broadcast(on_host, source, group=self._process_group)
        bring_back(tensor, on_host)

    def send(self, tensor: torch.Tensor, place: int) -> None:
        dist.send(tensor.to("cpu"), self._rank(place), group=self._process_group)

    def receive(self, tensor: torch.Tensor, place: int) -> None:
        on_host = host_room(tensor)
        dist.recv(on_host, self._rank(place), group=self._process_group)
        bring_back(tensor, on_host)

    def close(self) -> None:
        dist.destroy_process_group(self._process_group)

    def _rank(self, place: int) -> int:
        return dist.get_global_rank(self._process_group, place)


def host_room(tensor: torch.Tensor) -> torch.Tensor:
    """Where to put what is to fill a tensor: the tensor itself, if the host can write it."""
    return tensor if tensor.device.type == "cpu" else torch.empty_like(tensor, device="cpu")


def bring_back(tensor: torch.Tensor, on_host: torch.Tensor) -> None:
    """Fill a tensor with what is in host memory, unless it is the same memory."""
    if on_host is not tensor:
        tensor.copy_(on_host)
