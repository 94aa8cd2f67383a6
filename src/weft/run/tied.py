"""`TiedGradient`: what a rank's copies of a weight that several stages use have in common.

Each copy collects the gradients of its own stage. Before the stages step, all copies of all ranks are added
up, so that each steps with the same gradient and all of them stay equal bit by bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

import torch
from torch import nn

from weft.errors import InputError, Violation
from weft.sync.base import Group, Synchroniser


@runtime_checkable
class Tied(Protocol):
    """A stage that has copies of weights of other stages."""

    def tied_parameters(self) -> tuple[nn.Parameter, ...]:
        """Its copies, in the order of the program's tied weights."""
        ...


class TiedGradient:
    """Gradients of one tied weight on one rank; `.grad` of each copy is a view of its own.

    Args:
        copies: this rank's copies by stage.
        holders: how many ranks have copies; the gradient is padded so that they can share it equally.
        leads: whether this rank is the first of them.
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
        """That of the copy of `stage`, flat; behind the weight's elements are zeros."""
        return self._flat[stage]

    def equalise(self, group: Group, source: int) -> None:
        """Give all copies the values that the first copy of rank `source` has."""
        first, *others = self.copies.values()
        group.broadcast(first.detach(), source)
        for copy in others:
            copy.detach().copy_(first.detach())

    def reduce(self, synchroniser: Synchroniser, group: Group) -> None:
        """Make every copy's gradient the sum of all, on every rank of the group."""
        total, *others = self._flat.values()
        for gradient in others:
            total += gradient
        if group.size > 1:
            synchroniser.reduce(total, group)
        for gradient in others:
            gradient.copy_(total)

    def clear(self, stage: int) -> None:
        self._flat[stage].zero_()


def copies_of(
    tied: tuple[tuple[int, ...], ...], part: int, stages: Mapping[int, nn.Module]
) -> dict[int, nn.Parameter]:
    """A rank's copies of tied weight `part` by stage; `tied` are the stages of every tied weight.

    Raises:
        InputError: when a stage of the rank does not say what its copies are.
    """
    copies = {}
    for stage in (stage for stage in tied[part] if stage in stages):
        module = stages[stage]
        own = [other for other, holders in enumerate(tied) if stage in holders]
        parameters = module.tied_parameters() if isinstance(module, Tied) else ()
        if len(parameters) != len(own):
            problem = f"has {len(parameters)} tied parameters, the program gives it {len(own)}"
            raise InputError(Violation(f"stage {stage}", problem))
        copies[stage] = parameters[own.index(part)]
    return copies
