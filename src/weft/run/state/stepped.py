"""`SteppedWeights`: the tensors that a rank's optimizer steps in place of a stage's parameters.

They exist where replicas shard optimizer states, or where parameters have fewer bits than their optimizer
needs. The optimizer gets, in the group of each parameter, its piece in the rank's own range of the flat
weights. It does to every element the same as it would do to the whole.
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
    """The piece of a parameter that a rank's optimizer steps: elements `start` to `end`, in flat order.

    The parameter's first element is at `begins` of the flat weights. A parameter outside of them is a piece
    of its own, and every replica steps it. It is tied to a parameter of another stage.
    """

    parameter: nn.Parameter
    begins: int
    start: int
    end: int
    stepped: nn.Parameter


@dataclass(frozen=True, slots=True)
class OwnRange:
    """The range of a stage's flat tensors that this rank steps; all tensors have its length.

    Attributes:
        start: its first element.
        weights: the range of the flat weights under the parameters, in their precision.
        masters: the stepped values; the same tensor as `weights` if both have one precision.
        gradient: the gradient to step with.
        group: the ranks that own the ranges of this length, in order; None if this rank owns all.
    """

    start: int
    weights: torch.Tensor
    masters: torch.Tensor
    gradient: torch.Tensor
    group: Group | None


class SteppedWeights:
    """The pieces that one rank steps of one stage.

    Args:
        layout: the stage's layout.
        own: this rank's range.
        optimizer: made for the whole stage; from now on it steps the pieces and then updates the parameters.
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
        """The parameters that the group's ranks step together, and own copies of other stages' weights."""
        return self._inside + tuple(piece.parameter for piece in self._outside)

    def publish(self) -> None:
        """Round the masters to the weights under the parameters; do nothing if they are the same."""
        if self._own.weights is not self._own.masters:
            self._own.weights.copy_(self._own.masters)
        for piece in self._outside:
            if piece.stepped is not piece.parameter:
                piece.parameter.detach().copy_(piece.stepped.detach())

    def whole_states(self) -> dict[nn.Parameter, dict[str, torch.Tensor]]:
        """Return the optimizer states of parameters that begin in this rank's range, in the parameters'
        shapes.

        Other ranks send their parts of a parameter that reaches into their ranges. So a rank holds at most
        one more parameter's states than its range. Blocks; every rank of the group calls it.
        """
        found = {}
        for piece in self.pieces:
            # Sorted, so that both ends of every message refer to the same state.
            states = sorted(self._optimizer.state.get(piece.stepped, {}).items())
            whole = {leaf: self._completed(piece, value) for leaf, value in states}
            if piece.start == 0:
                found[piece.parameter] = whole
        return found

    def whole_weights(self) -> dict[nn.Parameter, torch.Tensor]:
        """Return masters of parameters that begin in this range, in their shapes; as `whole_states`."""
        wholes = [(piece, self._completed(piece, piece.stepped.detach())) for piece in self.pieces]
        return {piece.parameter: whole for piece, whole in wholes if piece.start == 0}

    def _completed(self, piece: Piece, value: torch.Tensor) -> torch.Tensor:
        """Return the whole value of a parameter that begins here; otherwise send the own piece."""
        length, group = piece.parameter.numel(), self._own.group
        if value.ndim == 0 or group is None:
            return value
        if value.numel() == length:
            return value.view_as(piece.parameter)
        # States may lie in host memory; ranks exchange tensors of their device.
        value, size = value.to(self._own.masters.device), len(self._own.masters)
        if piece.start > 0:
            group.send(value, piece.begins // size)
            return value
        whole = value.new_empty(length)
        whole[: piece.end] = value
        for other in range(group.place + 1, (piece.begins + length - 1) // size + 1):
            start = other * size - piece.begins
            group.receive(whole[start : start + size], other)
        return whole.view_as(piece.parameter)


def require_elementwise(
    optimizers: Iterable[torch.optim.Optimizer], needed_by: str, *, divides_matrices: bool = False
) -> None:
    """Refuse optimizers that cannot step a share of a stage, or a rank's own part of every matrix.

    Raises:
        InputError: one line for every kind of optimizer that may look at a parameter as a whole.
    """
    names = {type(one).__name__ for one in optimizers if not _steps_shards(one, divides_matrices)}
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


def _steps_shards(optimizer: torch.optim.Optimizer, divides_matrices: bool) -> bool:
    """Return True if the optimizer is known, or declares, to step shards as it steps whole tensors."""
    said = declared_work(optimizer, type(optimizer).__name__)
    if said is None:
        return type(optimizer) in ELEMENTWISE
    return said.divides_matrices if divides_matrices else said.steps_shards


def narrow(optimizer: torch.optim.Optimizer, pieces: Iterable[Piece]) -> None:
    """Make an optimizer that has not stepped yet step the pieces, each in its parameter's group."""
    stepped = {piece.parameter: piece.stepped for piece in pieces}
    for group in optimizer.param_groups:
        group["params"] = [stepped[parameter] for parameter in group["params"] if parameter in stepped]


def _cut(layout: FlatLayout, own: OwnRange) -> tuple[Piece, ...]:
    """Return the pieces of the parameters in the own range."""
    pieces = []
    for index, start, end in layout.within(own.start, own.start + len(own.masters)):
        parameter, begins = layout.parameters[index], layout.starts[index]
        here = slice(begins + start - own.start, begins + end - own.start)
        # A whole parameter keeps its shape: an optimizer may use it.
        shape = parameter.shape if end - start == parameter.numel() else (end - start,)
        stepped = nn.Parameter(own.masters[here].view(shape))
        stepped.grad = own.gradient[here].view(shape)
        pieces.append(Piece(parameter, begins, start, end, stepped))
    return tuple(pieces)


def _outside(layout: FlatLayout, optimizer: torch.optim.Optimizer, dtype: torch.dtype) -> tuple[Piece, ...]:
    """Return the optimizer's parameters outside the flat weights as whole pieces; cast them to `dtype`."""
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
