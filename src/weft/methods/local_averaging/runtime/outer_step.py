"""The meeting of replicas that step by themselves: the mean of their weights, and the step towards it.

Each rank of a meeting owns a slice of the stage's flat weights. It gets the replicas' mean of the slice, and
gives its next weights to all others. So its states of the outer step are slices, too. Slices begin at
multiples of the widest vector, and sums are in the order of the ranks. So neither the number of slices nor
the order of tensors changes a bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from weft.run.transport.rank_order import reduce_scatter
from weft.sync.base import Group
from weft.sync.dense import Dense


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalRound:
    """The steps of a replica between two meetings.

    Attributes:
        name: that of the averaged part of a stage, by which a method keeps its state.
        share: the replica's share of the batch.
        finite: True if its weights are finite; shape ().
        learning_rate: the mean of its steps.
        number: counts the rounds of the job.
        seed: that of the job.
    """

    name: str
    share: float
    finite: torch.Tensor
    learning_rate: float = 0.0
    number: int = 0
    seed: int = 0

    def gradient(self, moved: torch.Tensor) -> torch.Tensor:
        """Return the pseudo-gradient of a mean way, last minus present weights: it over the learning rate.

        It takes the place of the way, and is 0 for a learning rate of 0.
        """
        return moved.zero_() if self.learning_rate == 0.0 else moved.div_(self.learning_rate)


def own_slice(flat: torch.Tensor, group: Group) -> torch.Tensor:
    """Return this rank's slice, shape (n / ranks,), of a flat tensor of shape (n,), as a view."""
    return flat.view(group.size, -1)[group.place]


def scattered_mean(flat: torch.Tensor, done: LocalRound, group: Group) -> torch.Tensor:
    """Return this rank's slice of the mean over replicas, weighted by their shares; `flat` is overwritten.

    A replica that is not finite has the weight 0. If none is finite, nor is the mean.
    """
    votes = flat.new_empty(group.size)
    group.all_gather(votes, (done.finite.to(flat.dtype) * done.share).view(1))
    weight = votes[group.place] / votes.sum()
    # Zero times infinity is no zero; and the host reads no vote.
    torch.where(done.finite, flat.mul_(weight), weight, out=flat)
    return reduce_scatter(flat, group, flat.dtype)


class Averaging(Dense):
    """The mean of all replicas' weights. Gradients within one replica are summed as in `Dense`."""

    def begin(self, name: str, weights: torch.Tensor, group: Group, lengths: Mapping[str, int]) -> None:
        """Reset the state of a part of a stage.

        Args:
            name: that of the part.
            weights: the flat initial weights, shape (n,), equal on all replicas.
            group: the replicas.
            lengths: those of the tensors in `weights`, by the names of their parameters, in order.
        """

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Return the state that a checkpoint keeps on this rank, by name; loading fills the same tensors."""
        return {}

    def average(self, weights: torch.Tensor, done: LocalRound, group: Group) -> None:
        """Replace a replica's flat `weights`, shape (n,), by those that all ranks of the group agree on."""
        group.all_gather(weights, self.agreed(scattered_mean(weights, done, group), done))

    def agreed(self, mean: torch.Tensor, done: LocalRound) -> torch.Tensor:
        """Return the next weights of this rank's slice from its mean."""
        return mean


class OuterState(NamedTuple):
    """The last agreed weights of a part of a stage, and the momentum of this rank's slice."""

    anchor: torch.Tensor
    momentum: torch.Tensor


class OuterStep(Averaging):
    """A step from the last agreed weights, with a momentum; a method overrides `agreed`."""

    def __init__(self) -> None:
        self.states: dict[str, OuterState] = {}

    def begin(self, name: str, weights: torch.Tensor, group: Group, lengths: Mapping[str, int]) -> None:
        own = own_slice(weights, group)
        self.states[name] = OuterState(own.clone(), torch.zeros_like(own))

    def tensors(self) -> Mapping[str, torch.Tensor]:
        return {
            f"{what}/{name}": value
            for name, state in self.states.items()
            for what, value in state._asdict().items()
        }
