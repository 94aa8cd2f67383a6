"""`HostGroup`: collectives of ranks through host memory, on which gloo works.

Only this module and `weft.run.transport.channels` know of the copies: all callers give tensors on their
device. A CPU's tensors are in host memory already, and nothing is copied.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from weft.run.transport import rank_order
from weft.run.transport.device_group import DeviceGroup

# The tag of rows, beside that of messages.
_ROWS = 1
# Bytes for another rank from which on a slow link costs more than the calls for each rank by itself.
_LARGE = 1 << 15


class HostGroup(DeviceGroup):
    """A gloo process group; each call returns when its result is there. Sums are in the ranks' order."""

    def all_reduce(self, tensor: torch.Tensor) -> None:
        on_host = tensor.to("cpu")
        super().all_reduce(on_host)
        bring_back(tensor, on_host)

    def add_up(self, flat: torch.Tensor, sent_as: torch.dtype | None = None) -> None:
        rank_order.add_up(flat, self, sent_as or flat.dtype)

    def reduce_scatter(self, flat: torch.Tensor, sent_as: torch.dtype | None = None) -> torch.Tensor:
        return rank_order.reduce_scatter(flat, self, sent_as or flat.dtype)

    def all_gather(self, flat: torch.Tensor, share: torch.Tensor) -> None:
        on_host = host_room(flat)
        super().all_gather(on_host, share.to("cpu"))
        bring_back(flat, on_host)

    def all_to_all(self, taken: torch.Tensor, given: torch.Tensor) -> None:
        length = len(given) // self.size
        if length * given.itemsize >= _LARGE:
            self.all_to_all_rows(taken, given, [length] * self.size, [length] * self.size)
            return
        on_host = host_room(taken)
        super().all_to_all(on_host, given.to("cpu"))
        bring_back(taken, on_host)

    def all_to_all_rows(
        self, taken: torch.Tensor, given: torch.Tensor, taken_rows: Sequence[int], given_rows: Sequence[int]
    ) -> None:
        """Exchange rows; each rank receives before it sends.

        In gloo's own all-to-all, each rank sends first. A peer then learns only after all these rows that
        the rank can receive. So a slow link carries one direction after the other.
        """
        on_host = host_room(taken)
        into, out = on_host.split(list(taken_rows)), given.to("cpu").split(list(given_rows))
        turns = range(1, self.size)
        sources = [place for turn in turns if len(into[place := (self.place - turn) % self.size])]
        targets = [place for turn in turns if len(out[place := (self.place + turn) % self.size])]
        works = [self._group.recv([into[place]], place, _ROWS) for place in sources]
        works += [self._group.send([out[place]], place, _ROWS) for place in targets]
        into[self.place].copy_(out[self.place])
        for work in works:
            work.wait()
        bring_back(taken, on_host)

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        on_host = tensor.to("cpu")
        super().broadcast(on_host, source)
        bring_back(tensor, on_host)

    def send(self, tensor: torch.Tensor, place: int) -> None:
        super().send(tensor.to("cpu"), place)

    def receive(self, tensor: torch.Tensor, place: int) -> None:
        on_host = host_room(tensor)
        super().receive(on_host, place)
        bring_back(tensor, on_host)


def host_room(tensor: torch.Tensor) -> torch.Tensor:
    """Return host memory to receive a tensor's values: the tensor itself if it is on the CPU."""
    return tensor if tensor.device.type == "cpu" else torch.empty_like(tensor, device="cpu")


def bring_back(tensor: torch.Tensor, on_host: torch.Tensor) -> None:
    """Fill a tensor from host memory, unless it is the same memory."""
    if on_host is not tensor:
        tensor.copy_(on_host)
