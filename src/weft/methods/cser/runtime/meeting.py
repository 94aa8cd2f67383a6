"""The meeting of replicas about parts of their weights: weighted means of messages, and a mark in each.

Every message begins with the sender's weight and with a mark of the blocks that it chose. All messages of a
part have one length. So ranks that chose different blocks find out, and none waits for missing bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from weft.errors import RunError
from weft.sync.base import Group

# The numbers before a message: weight and mark.
HEAD = 2
# Marks are smaller, so that fp32 holds them.
MARKS = 2**24


@dataclass(slots=True)
class Assembly:
    """The replicas of one meeting.

    Attributes:
        group: the ranks that meet.
        share: this replica's share of the batch.
        finite: True if it takes part, shape (); otherwise its weight is 0.
        alike: True if all replicas chose the same blocks in all meetings so far, shape ().
    """

    group: Group
    share: float
    finite: torch.Tensor
    alike: torch.Tensor

    @classmethod
    def of(cls, group: Group, share: float, finite: torch.Tensor) -> Assembly:
        return cls(group, share, finite, torch.ones_like(finite))

    def mean(self, own: torch.Tensor, mark: int) -> torch.Tensor:
        """Return the replicas' mean of messages, shape (m,), the same bits on all of them.

        It is `own` where replicas have different marks, below `MARKS`. Each rank adds up a slice in the order
        of ranks, and gives it to the others. These are the two halves of an all-reduce.
        """
        group = self.group
        length = -(-len(own) // group.size)
        given = own.new_zeros(group.size, HEAD + length)
        given[:, 0], given[:, 1] = self._weight(own.dtype), mark
        given[:, HEAD:] = self._weighted(_padded(own, length * group.size)).view(group.size, length)
        taken = torch.empty_like(given)
        group.all_to_all(taken.view(-1), given.view(-1))
        self._compare(taken[:, 1], mark)
        total = taken[0]
        for addend in taken[1:]:
            total = total + addend
        mean = own.new_empty(group.size * length)
        group.all_gather(mean, total[HEAD:] / total[0])
        return torch.where(self.alike, mean[: len(own)], own)

    def messages(self, payload: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the bytes of all replicas, shape (replicas, b), and their weights, which add up to 1."""
        own = torch.cat([self._weight(dtype).view(1).view(torch.uint8), payload])
        everyone = own.new_empty(self.group.size, len(own))
        self.group.all_gather(everyone.view(-1), own)
        weights = torch.cat([numbers_in(one[: dtype.itemsize], dtype) for one in everyone])
        return everyone[:, dtype.itemsize :], weights / weights.sum()

    def _weight(self, dtype: torch.dtype) -> torch.Tensor:
        return self.finite.to(dtype) * self.share

    def _weighted(self, own: torch.Tensor) -> torch.Tensor:
        """Return numbers times this replica's share; 0 times infinity is no 0."""
        return torch.where(self.finite, own * self.share, 0.0)

    def _compare(self, marks: torch.Tensor, mark: int) -> None:
        self.alike = self.alike & (marks == mark).all()


def numbers_in(message: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the numbers in a part of a message, shape (bytes,), at whatever place it begins."""
    return message.clone().view(dtype)


def require_alike(alike: torch.Tensor) -> None:
    """Check what all marks of former meetings say, shape (); the host waits for it.

    Raises:
        RunError: if replicas chose different blocks.
    """
    if not alike.item():
        raise RunError("replicas chose different blocks; their draws differ, so none was averaged")


def _padded(own: torch.Tensor, length: int) -> torch.Tensor:
    return torch.nn.functional.pad(own, (0, length - len(own)))
