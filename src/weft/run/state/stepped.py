"""`SteppedWeights`: what a rank's optimizer steps of a stage, where that is not the parameters themselves.

That is so where replicas share out what they step, and where parameters have fewer bits than their optimizer
needs. In place of each parameter, and in the same group, the optimizer is given the piece of it that lies in
the rank's own range of the flat weights. What it does to every element is then what it would do to the whole.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from weft.describe.optimizers import declared_work
from weft.errors import InputError, Violation
from weft.run.state.bucket import FlatLayout
from weft.run.state.precision import give
from weft.sync.base import Group

# They step every element by itself and make their states at the first step.
ELEMENTWISE: tuple[type[torch.optim.Optimizer], ...] = (
    torch.optim.Adadelta,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.SGD,
)


@dataclass(frozen=True, slots=True)
class Piece:
    """What a rank's optimizer steps of a parameter: its elements `start` to `end`, counted in flat order.

    The parameter's first element is at `begins` of the flat weights. A parameter that does not lie there
    (tied to one of another stage) is a piece of its own, stepped by every replica.
    """

    parameter: nn.Parameter
    begins: int
    start: int
    end: int
    stepped: nn.Parameter


@dataclass(frozen=True, slots=True)
class OwnRange:
    """The range of a stage's flat tensors that this rank steps, all of one length.

    Attributes:
        start: its first element.
        weights: what the parameters are made of, in their precision.
        masters: what is stepped; the same tensor as `weights` where both have one precision.
        gradient: the gradient to step with.
        group: the ranks that own the ranges of this length, one after the other; None where this rank owns
            all.
    """

    start: int
    weights: torch.Tensor
    masters: torch.Tensor
    gradient: torch.Tensor
    group: Group | None


class SteppedWeights:
    """The pieces that one rank steps of one stage.

    Args:
        layout: of the stage.
        own: this rank's range.
        optimizer: made for the whole stage; from now on it steps the pieces, and after every step the
            parameters get what became of the masters.
    """

    def __init__(self, layout: FlatLayout, own: OwnRange, optimizer: torch.optim.Optimizer) -> None:
        self._own = own
        self._inside = layout.parameters
        self._optimizer = optimizer
        self._outside = _outside(layout, optimizer, own.weights.dtype)
        self.pieces = _cut(layout, own) + self._outside
        narrow(optimizer, self.pieces)
        optimizer.register_step_post_hook(lambda *_: self.publish())

    @property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        """What the ranks of the group step together, and their own copies of weights of other stages."""
        return self._inside + tuple(piece.parameter for piece in self._outside)

    def publish(self) -> None:
        """Round the masters to the weights that parameters are made of; nothing where they are the same."""
        if self._own.weights is not self._own.masters:
            self._own.weights.copy_(self._own.masters)
        for piece in self._outside:
            if piece.stepped is not piece.parameter:
                piece.parameter.detach().copy_(piece.stepped.detach())

    def whole_states(self) -> dict[nn.Parameter, dict[str, torch.Tensor]]:
        """Optimizer states of the parameters that begin in this rank's range, in the parameters' shapes.

        A parameter that reaches into other ranges is completed by their ranks, so that besides its range a
        rank holds one parameter's states more at most. Blocks; every rank of the group calls it.
        """
        found = {}
        for piece in self.pieces:
            # Sorted, so that both ends of every message mean the same.
            states = sorted(self._optimizer.state.get(piece.stepped, {}).items())
            whole = {leaf: self._completed(piece, value) for leaf, value in states}
            if piece.start == 0:
                found[piece.parameter] = whole
        return found

    def whole_weights(self) -> dict[nn.Parameter, torch.Tensor]:
        """Masters of the parameters that begin in this rank's range, in their shapes; as `whole_states`."""
        wholes = [(piece, self._completed(piece, piece.stepped.detach())) for piece in self.pieces]
        return {piece.parameter: whole for piece, whole in wholes if piece.start == 0}

    def _completed(self, piece: Piece, value: torch.Tensor) -> torch.Tensor:
        """Return a value of a whole parameter where it begins, elsewhere the piece that was sent there."""
        length, group = piece.parameter.numel(), self._own.group
        if value.ndim == 0 or group is None:
            return value
        if value.numel() == length:
            return value.view_as(piece.parameter)
        size = len(self._own.masters)
        if piece.start > 0:
            group.send(value, piece.begins // size)
            return value
        whole = torch.empty(length, dtype=value.dtype)
        whole[: piece.end] = value
        for other in range(group.place + 1, (piece.begins + length - 1) // size + 1):
            start = other * size - piece.begins
            group.receive(whole[start : start + size], other)
        return whole.view_as(piece.parameter)


def require_elementwise(optimizers: Iterable[torch.optim.Optimizer], needed_by: str) -> None:
    """Refuse optimizers that a share of a stage cannot be given to.

    Raises:
        InputError: one line for every kind of optimizer that may look at a parameter as a whole.
    """
    names = {type(one).__name__ for one in optimizers if not _is_elementwise(one)}
    problems = [
        Violation(
            "optimizer",
            f"{name} is not known to step every element by itself, as {needed_by} needs; known are "
            f"{', '.join(known.__name__ for known in ELEMENTWISE)}",
            "AdamW",
        )
        for name in sorted(names)
    ]
    if problems:
        raise InputError(problems)


def _is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether it is known to step every element by itself, or says so."""
    said = declared_work(optimizer, type(optimizer).__name__)
    return said.elementwise if said is not None else type(optimizer) in ELEMENTWISE


def narrow(optimizer: torch.optim.Optimizer, pieces: Iterable[Piece]) -> None:
    """Let an optimizer that has not stepped yet step the pieces, each in its parameter's group."""
    stepped = {piece.parameter: piece.stepped for piece in pieces}
    for group in optimizer.param_groups:
        group["params"] = [stepped[parameter] for parameter in group["params"] if parameter in stepped]


def _cut(layout: FlatLayout, own: OwnRange) -> tuple[Piece, ...]:
    """Return the pieces of the parameters in the own range."""
    pieces = []
    for index, start, end in layout.within(own.start, own.start + len(own.masters)):
        parameter, begins = layout.parameters[index], layout.starts[index]
        here = slice(begins + start - own.start, begins + end - own.start)
        # A whole parameter keeps its shape, which optimizers that are given whole ones may look at.
        shape = parameter.shape if end - start == parameter.numel() else (end - start,)
        stepped = nn.Parameter(own.masters[here].view(shape))
        stepped.grad = own.gradient[here].view(shape)
        pieces.append(Piece(parameter, begins, start, end, stepped))
    return tuple(pieces)


def _outside(layout: FlatLayout, optimizer: torch.optim.Optimizer, dtype: torch.dtype) -> tuple[Piece, ...]:
    """The optimizer's parameters that do not lie in the flat weights, whole; they get that precision."""
    inside = {id(parameter) for parameter in layout.parameters}
    pieces = []
    for one in (one for group in optimizer.param_groups for one in group["params"] if id(one) not in inside):
        stepped = one
        if one.dtype != dtype:
            stepped = nn.Parameter(one.detach().clone())
            stepped.grad = one.grad
            give(one, one.detach().to(dtype))
        pieces.append(Piece(one, 0, 0, one.numel(), stepped))
    return tuple(pieces)
