"""What the runtime asks of a method that makes replicas agree, and what it gives to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch


class Group(Protocol):
    """Ranks that exchange tensors, which are contiguous and given where they lie, on any device.

    The calls are made on a stream of the Program. They may block the thread that makes them; when a result
    is there, the stream knows. Every rank of the group makes the same calls in the same order.

    Attributes:
        size, place: how many ranks there are, and which of them this one is.
    """

    size: int
    place: int

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Replace a tensor by the sum of all ranks', added in any order."""
        ...

    def all_gather(self, flat: torch.Tensor, share: torch.Tensor) -> None:
        """Fill `flat`, shape (n,), with the shares of all ranks, shape (n / size,), in their order."""
        ...

    def all_to_all(self, taken: torch.Tensor, given: torch.Tensor) -> None:
        """Give the r-th of `size` equal parts of `given`, shape (n,), to rank r, and take one of each."""
        ...

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Replace a tensor, contiguous or not, by that of rank `source` of the whole job."""
        ...

    def send(self, tensor: torch.Tensor, place: int) -> None:
        """Send a tensor to the rank at that place of the group."""
        ...

    def receive(self, tensor: torch.Tensor, place: int) -> None:
        """Fill a tensor with what the rank at that place sends."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """Where replicas agree.

    Attributes:
        group: the ranks that do.
        stage: whose gradient or weights it is about; -1 of a weight that several stages share.
        step: counted over the whole job.
    """

    group: Group
    stage: int = -1
    step: int = 0


class Synchroniser(Protocol):
    """One method, for all stages of one rank. The runtime calls it on a stream of its own, so it may block.

    A gradient is the flat one of a stage, or a share of it: shape (n,), contiguous, where the stage lies. The
    length n is a multiple of the group's size.
    """

    def reduce(self, gradient: torch.Tensor, meeting: Meeting) -> None:
        """Make `gradient` the one to step with on every rank of the meeting."""
        ...

    def reduce_scatter(self, gradient: torch.Tensor, meeting: Meeting) -> torch.Tensor:
        """The rank's own share, shape (n / size,), of the gradient to step with; `gradient` stays as it is.

        The r-th rank of the group gets the r-th share.
        """
        ...


@runtime_checkable
class Averager(Synchroniser, Protocol):
    """One whose replicas step by themselves and agree on weights; its gradients are those of one replica."""

    def average(self, weights: torch.Tensor, share: float, meeting: Meeting) -> None:
        """Make flat `weights`, which are this replica's, those to go on with on every rank of the meeting.

        `share` is the part of the batch that the replica runs.
        """
        ...


@runtime_checkable
class StatefulSynchroniser(Protocol):
    """One that remembers something of every stage from meeting to meeting."""

    def begin(self, stage: int, flat: torch.Tensor) -> None:
        """Begin anew with a stage of which the meetings are about such a flat tensor.

        It has the weights that replicas begin with, or, of one that agrees on gradients, nothing yet.
        """
        ...

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """What a checkpoint keeps of it on this rank, by name; loading fills the same tensors."""
        ...


@dataclass(frozen=True, kw_only=True)
class SynchroniserOf:
    """Makes the synchroniser of a method from its checked options; part of the method's runtime."""

    name: str
    make: Callable[[Any], Synchroniser]
