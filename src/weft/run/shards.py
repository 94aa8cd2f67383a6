"""`StageShard`: the equal share of a stage's weights that one of its replicas steps (ZeRO levels 1 and 2).

The weights of a stage lie in one flat tensor beside that of its gradients, and replica r of n owns the r-th
of n equal ranges of both (Rajbhandari et al., arXiv 1910.02054). The borders fall anywhere, also inside a
parameter, so the optimizer of a stage is given, in place of each parameter and in the same group, the piece
of it that lies in the rank's own range. What it does to every element is then what it would do to the whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from weft.errors import InputError, Violation
from weft.run.bucket import FlatLayout, GradientBucket
from weft.sync.collectives import all_gather

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


class StageShard:
    """One rank's share of one stage. The module's parameters become views of the flat weights.

    Between a step and the next gather they hold new values in the rank's own range only.

    Args:
        layout: of the stage, with as many shards as the group has ranks.
        bucket: its gradients.
        optimizer: made for the whole stage; from now on it steps this rank's pieces.
        group: the ranks that share the stage.
        apart: keep the own range of the reduced gradient outside the bucket, which other stages use, too.
    """

    def __init__(
        self,
        layout: FlatLayout,
        bucket: GradientBucket,
        optimizer: torch.optim.Optimizer,
        group: dist.ProcessGroup,
        *,
        apart: bool,
    ) -> None:
        self._layout = layout
        self._optimizer = optimizer
        self._group = group
        self._place = dist.get_rank(group)
        self._length = layout.length // layout.shards
        own = slice(self._place * self._length, (self._place + 1) * self._length)
        self._weights = _flatten(layout)
        self._own_weights = self._weights[own]
        self._own_gradient = layout.zeros(self._length) if apart else bucket.flat[own]
        self.pieces = self._cut(own.start) + _outside(layout, optimizer)
        narrow(optimizer, self.pieces)

    def gather(self) -> torch.Tensor:
        """Bring the weights of the stage up to date from the replicas' shares, and return them flat.

        Blocks; every rank of the group calls it.
        """
        weights = self._weights
        share = self._own_weights.to("cpu", copy=True)
        # gloo works on host memory: elsewhere the weights take the way through it.
        on_host = weights if weights.device.type == "cpu" else torch.empty_like(weights, device="cpu")
        all_gather(on_host, share, self._group)
        return weights if on_host is weights else weights.copy_(on_host)

    def take_in(self, share: torch.Tensor, part: int) -> torch.Tensor:
        """Add the `part`-th reduced share of a step, shape (length / shards,), to the own gradient."""
        gradient = self._own_gradient
        return gradient.copy_(share) if part == 0 else gradient.add_(share.to(gradient.device))

    def whole_states(self) -> dict[nn.Parameter, dict[str, torch.Tensor]]:
        """Optimizer states of the parameters that begin in this rank's share, in the parameters' shapes.

        A parameter that reaches into other shares is completed by their ranks, so that besides its share a
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

    def _completed(self, piece: Piece, value: torch.Tensor) -> torch.Tensor:
        """A state of a whole parameter where it begins, elsewhere the piece that was sent there."""
        length = piece.parameter.numel()
        if value.ndim == 0:
            return value
        if value.numel() == length:
            return value.view_as(piece.parameter)
        if piece.start > 0:
            dist.send(value.to("cpu"), self._rank(piece.begins // self._length), group=self._group)
            return value
        whole = torch.empty(length, dtype=value.dtype)
        whole[: piece.end] = value
        for place in range(self._place + 1, (piece.begins + length - 1) // self._length + 1):
            start = place * self._length - piece.begins
            part = whole[start : start + self._length]
            dist.recv(part, self._rank(place), group=self._group)
        return whole.view_as(piece.parameter)

    def _rank(self, place: int) -> int:
        return dist.get_global_rank(self._group, place)

    def _cut(self, first: int) -> tuple[Piece, ...]:
        """The pieces of the parameters in the own range, which begins at `first` of the flat weights."""
        pieces = []
        for index, start, end in self._layout.share(self._place):
            parameter, begins = self._layout.parameters[index], self._layout.starts[index]
            here = slice(begins + start - first, begins + end - first)
            stepped = nn.Parameter(self._own_weights[here])
            stepped.grad = self._own_gradient[here]
            pieces.append(Piece(parameter, begins, start, end, stepped))
        return tuple(pieces)


def gather_weights(shards: Mapping[int, StageShard]) -> None:
    """Bring the weights of a rank's stages up to date; every rank of the job calls it, between two steps."""
    for stage in sorted(shards):
        shards[stage].gather()


def require_elementwise(optimizers: Iterable[torch.optim.Optimizer], sharding: str) -> None:
    """Refuse optimizers that a share of a stage cannot be given to.

    Raises:
        InputError: one line for every kind of optimizer that may look at a parameter as a whole.
    """
    names = {type(one).__name__ for one in optimizers if type(one) not in ELEMENTWISE}
    problems = [
        Violation(
            "optimizer",
            f"{name} is not known to step every element by itself, as sharding {sharding!r} needs; known are "
            f"{', '.join(known.__name__ for known in ELEMENTWISE)}",
            "AdamW",
        )
        for name in sorted(names)
    ]
    if problems:
        raise InputError(problems)


def narrow(optimizer: torch.optim.Optimizer, pieces: Iterable[Piece]) -> None:
    """Let an optimizer that has not stepped yet step the pieces, each in its parameter's group."""
    stepped = {piece.parameter: piece.stepped for piece in pieces}
    for group in optimizer.param_groups:
        group["params"] = [stepped[parameter] for parameter in group["params"] if parameter in stepped]


def _outside(layout: FlatLayout, optimizer: torch.optim.Optimizer) -> tuple[Piece, ...]:
    """The optimizer's parameters that do not lie in the flat weights, whole."""
    inside = {id(parameter) for parameter in layout.parameters}
    outside = [one for group in optimizer.param_groups for one in group["params"] if id(one) not in inside]
    return tuple(Piece(one, 0, 0, one.numel(), one) for one in outside)


def _flatten(layout: FlatLayout) -> torch.Tensor:
    """Move the parameters of a stage into one flat tensor, of which they become views."""
    flat = layout.zeros(layout.length)
    for parameter, view in zip(layout.parameters, layout.views(flat), strict=True):
        view.copy_(parameter.detach())
        parameter.data = view
    return flat
