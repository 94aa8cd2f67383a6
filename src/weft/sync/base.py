"""Interfaces between the runtime and a synchroniser, the method that makes replicas agree."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch


class Group(Protocol):
    """Ranks that exchange contiguous tensors in place, on any device.

    The calls go to a stream of the Program. They block the calling thread, or launch kernels in the current
    stream of the device. Later work on the stream sees the result. Every rank of the group makes the same
    calls in the same order.

    Attributes:
        size, place: the number of ranks, and the index of this rank among them.
    """

    size: int
    place: int

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Replace a tensor by the sum over all ranks, added in any order."""
        ...

    def add_up(self, flat: torch.Tensor, sent_as: torch.dtype | None = None) -> None:
        """Replace `flat`, shape (n,), by the sum over all ranks; n is a multiple of `size`.

        Repetitions have the same bits. Through host memory the sum is in the order of the ranks.
        `sent_as` is the precision on the way; `flat` keeps its own.
        """
        ...

    def reduce_scatter(self, flat: torch.Tensor, sent_as: torch.dtype | None = None) -> torch.Tensor:
        """Return this rank's share, shape (n / size,), of the sum over all ranks; keep `flat` as is.

        Order and `sent_as` are as in `add_up`, and the share has the precision of `flat`.
        """
        ...

    def all_gather(self, flat: torch.Tensor, share: torch.Tensor) -> None:
        """Fill `flat`, shape (n,), with the shares of all ranks, shape (n / size,), in rank order."""
        ...

    def all_to_all(self, taken: torch.Tensor, given: torch.Tensor) -> None:
        """Send the r-th of `size` equal parts of `given`, shape (n,), to rank r; fill `taken` by rank."""
        ...

    def all_to_all_rows(
        self, taken: torch.Tensor, given: torch.Tensor, taken_rows: Sequence[int], given_rows: Sequence[int]
    ) -> None:
        """Send the next `given_rows[r]` rows of `given` to rank r; fill `taken` by rank."""
        ...

    def exchange(self, taken: torch.Tensor, given: torch.Tensor, places: Sequence[int]) -> None:
        """Exchange equal parts with the members at `places`, sorted, which include this rank.

        The r-th part of `given`, shape (n,), goes to the r-th of them. What it sends fills the r-th part of
        `taken`. Members outside `places` call it, too, with places of their own.
        """
        ...

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Replace a tensor, contiguous or not, by the one of rank `source`, numbered over the whole job."""
        ...

    def send(self, tensor: torch.Tensor, place: int) -> None:
        """Send a tensor to the rank with index `place` in the group."""
        ...

    def receive(self, tensor: torch.Tensor, place: int) -> None:
        """Fill a tensor with the message of the rank with index `place` in the group."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """One synchronisation of replicas.

    Attributes:
        group: the ranks that agree.
        stage: the stage of the gradient or weights; -1 for a weight that several stages share.
        step: the optimizer step, counted over the whole job.
        part: the reduction of a stage's gradient in this step, if there are several.
        replica, seed: of this rank and of the job, for random numbers of this meeting.
    """

    group: Group
    stage: int = -1
    step: int = 0
    part: int = 0
    replica: int = 0
    seed: int = 0


class Synchroniser(Protocol):
    """A method for all stages of one rank. The runtime calls it on a separate stream, so it may block.

    A gradient is the flat gradient of a stage or a share of it, on the stage's device. It has shape (n,) and
    is contiguous; n is a multiple of the group's size.
    """

    def reduce(self, gradient: torch.Tensor, meeting: Meeting) -> None:
        """Replace `gradient` on every rank of the meeting by the gradient for the optimizer step."""
        ...

    def reduce_scatter(self, gradient: torch.Tensor, meeting: Meeting) -> torch.Tensor:
        """Return the rank's share, shape (n / size,), of the gradient to step with; keep `gradient` as is.

        The r-th rank of the group gets the r-th share.
        """
        ...


@runtime_checkable
class Gatherer(Synchroniser, Protocol):
    """A synchroniser that also decides how replicas learn each other's stepped weights."""

    def gather(self, weights: torch.Tensor, own: torch.Tensor, meeting: Meeting) -> torch.Tensor:
        """Bring `weights`, shape (n,), up to date from every rank's `own` share, shape (n / size,).

        `weights` is the same on all ranks of the meeting, before and after. It may stay different from the
        shares.

        Returns:
            The payload that this rank has sent, uint8, of shape (bytes,).
        """
        ...

    def take_in(self, weights: torch.Tensor, payloads: torch.Tensor) -> None:
        """Bring `weights`, shape (n,), up to date from the payloads of all ranks, shape (size, bytes).

        A gather ends with it. So weights and logged payloads give the same bits again.
        """
        ...


@runtime_checkable
class StatefulSynchroniser(Protocol):
    """A synchroniser with a state for every stage, kept from meeting to meeting."""

    def begin(self, stage: int, flat: torch.Tensor) -> None:
        """Reset the state of a stage; its meetings exchange flat tensors like `flat`, which holds zeros."""
        ...

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Return the state that a checkpoint keeps on this rank, by name; loading fills the same tensors."""
        ...


@runtime_checkable
class CarryingSynchroniser(StatefulSynchroniser, Protocol):
    """A synchroniser with an unsent rest of all replicas' gradients that another plan can take over."""

    def carried(self, stage: int) -> torch.Tensor | None:
        """Return the unsent rest of a stage's gradients, added up over its replicas; None if there is none.

        It has the shape of the stage's flat gradient. Every rank of the stage calls it between two steps.
        """
        ...

    def carry_on(self, stage: int, carried: torch.Tensor) -> None:
        """Begin with such a rest, the same on every rank of the stage; called after `begin`."""
        ...


class ParameterPlace(NamedTuple):
    """A parameter in a stage's flat gradient: the index of its first element there, and its shape."""

    start: int
    shape: tuple[int, ...]


@runtime_checkable
class ShapedSynchroniser(Synchroniser, Protocol):
    """A synchroniser that needs the places and shapes of a stage's parameters."""

    def lay_out(self, stage: int, places: Sequence[ParameterPlace]) -> None:
        """Take the places of a stage's parameters in its flat gradient; called once, before the others."""
        ...


@dataclass(frozen=True, kw_only=True)
class SynchroniserOf:
    """Factory of a method's synchroniser from its checked options; part of the method's runtime."""

    name: str
    make: Callable[[Any], Synchroniser]
