"""A rank's whole copies of weights that several stages use, with gradients apart from those of its stages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

import torch
from torch import nn

from weft.errors import InputError, Violation
from weft.sync.base import Group, Meeting, Synchroniser


@runtime_checkable
class TiedStage(Protocol):
    """A stage with copies of other stages' weights."""

    def tied_parameters(self) -> tuple[nn.Parameter, ...]:
        """Return the stage's copies, in the order of the program's tied weights."""
        ...


class TiedGradient:
    """The gradients of one tied weight on one rank, flat; `.grad` of each copy is a view of its own gradient.

    Args:
        copies: this rank's copies by stage.
        holders: the number of ranks with copies; the gradient is padded so that they can shard it equally.
        leads: True if this rank is the first of them.
    """

    def __init__(self, copies: Mapping[int, nn.Parameter], holders: int, *, leads: bool) -> None:
        self.copies = dict(copies)
        self.leads = leads
        self._flat: dict[int, torch.Tensor] = {}
        for stage, copy in copies.items():
            length = -(-copy.numel() // holders) * holders
            flat = torch.zeros(length, dtype=copy.dtype, device=copy.device)
            copy.grad = flat[: copy.numel()].view_as(copy)
            self._flat[stage] = flat

    @property
    def stages(self) -> tuple[int, ...]:
        return tuple(self.copies)

    def gradient(self, stage: int) -> torch.Tensor:
        """Return the gradient of the copy of `stage`, flat, with zeros after the weight's elements."""
        return self._flat[stage]

    def reduce(self, synchroniser: Synchroniser, meeting: Meeting) -> None:
        """Make every copy's gradient the sum of all, on every rank of the meeting."""
        total, *others = self._flat.values()
        for gradient in others:
            total += gradient
        if meeting.group.size > 1:
            synchroniser.reduce(total, meeting)
        for gradient in others:
            gradient.copy_(total)

    def clear(self, stage: int) -> None:
        self._flat[stage].zero_()


def equalise(copies: Mapping[int, nn.Parameter], group: Group, source: int) -> None:
    """Give a rank's copies of a weight the values of the first copy on rank `source`."""
    first, *others = copies.values()
    group.broadcast(first.detach(), source)
    for copy in others:
        copy.detach().copy_(first.detach())


def copies_of(
    tied: tuple[tuple[int, ...], ...], part: int, stages: Mapping[int, nn.Module]
) -> dict[int, nn.Parameter]:
    """Return a rank's copies of tied weight `part` by stage; `tied` has the stages of every tied weight.

    Raises:
        InputError: if a stage of the rank has another number of tied parameters than the program gives it.
    """
    copies = {}
    for stage in (stage for stage in tied[part] if stage in stages):
        module = stages[stage]
        own = [other for other, holders in enumerate(tied) if stage in holders]
        parameters = module.tied_parameters() if isinstance(module, TiedStage) else ()
        if len(parameters) != len(own):
            problem = f"has {len(parameters)} tied parameters, the program gives it {len(own)}"
            raise InputError(Violation(f"stage {stage}", problem))
        copies[stage] = parameters[own.index(part)]
    return copies
