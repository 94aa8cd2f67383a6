"""The pieces of a stage between its borders, where ranks of its replica exchange.

Pieces hand on a state, a tuple: its first value crosses the border, the others stay on the rank. A stage with
branches beside a stream, each with one region of divided products, names its branches
(`weft.run.stage.stage_module.StageModule.branches`). A method that cuts stages contributes its way to do so
(`CutOf`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

import torch
from torch import nn

from weft.run.parallel.tensor_layers import finish
from weft.run.stage.layers import LayerFunction
from weft.run.stage.roots import Growth
from weft.sync.base import Group

State = tuple[torch.Tensor, ...]
Step = Callable[[State], State]


class BorderExchange(Protocol):
    """The exchange of one micro-batch's values at a border."""

    def __call__(self, value: torch.Tensor, group: Group, *, backward: bool) -> torch.Tensor:
        """Return the value on the other side, from the group's ranks; of a backward pass, the gradient."""
        ...


class PieceBorder(NamedTuple):
    """A border between two pieces; True for each pass that exchanges there."""

    forward: bool
    backward: bool


@dataclass(frozen=True, slots=True)
class StagePiece:
    """One piece, and the exchange at the border behind it."""

    steps: Sequence[Step]
    crossing: BorderExchange | None = None

    def __call__(self, state: State) -> State:
        for step in self.steps:
            state = step(state)
        return state


class Ran(NamedTuple):
    """A piece that has run: its inputs, which are leaves of its graph, its outputs, and roots by place."""

    inputs: State
    outputs: State
    roots: Mapping[int, torch.Tensor]


@dataclass(slots=True)
class Tape:
    """A micro-batch's way through the pieces of a stage; backward takes them off its end.

    `growth` makes the roots of its forward pass. In the backward pass, `of_root` returns the gradient of a
    root by its place. Both are None for a stage without roots.
    """

    pieces: Sequence[StagePiece] = ()
    growth: Growth | None = None
    of_root: Callable[[int, torch.Tensor], torch.Tensor] | None = None
    ran: list[Ran] = field(default_factory=list)
    behind: State = ()

    @property
    def output(self) -> torch.Tensor:
        """The value that the last run piece hands over its border."""
        return self.ran[-1].outputs[0]


class StageCut(Protocol):
    """A way to cut a stage into pieces, one more than its borders."""

    @property
    def borders(self) -> Sequence[PieceBorder]: ...

    def pieces(self, inputs: torch.Tensor) -> Sequence[StagePiece]:
        """Return the pieces that, in order, turn one micro-batch's input into its output."""
        ...

    def exchanging_elsewhere(self) -> AbstractContextManager[None]:
        """Run pieces within this block: they leave the exchanges to the caller."""
        ...


@dataclass(frozen=True, kw_only=True)
class CutOf:
    """A method's way to cut stages; the method contributes it.

    `cut` returns it for a stage, or None for a stage that cannot be cut so.
    """

    method: str
    cut: Callable[[nn.Module], StageCut | None]


class Branch(NamedTuple):
    """A branch of a block beside the stream.

    Attributes:
        before: from the stream to the input of the region.
        inside: from that input to the partial result, which leaves the region.
        after: from the sum of all ranks' partial results, and the stream, to the stream.
    """

    before: LayerFunction
    inside: LayerFunction
    after: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

    def run(self, stream: torch.Tensor) -> torch.Tensor:
        """Return the stream behind the branch, on a rank that exchanges nothing in it."""
        return self.after(self.inside(self.before(stream)), stream)


def plain_branch(norm: nn.Module, inside: LayerFunction, product: nn.Module) -> Branch:
    """Return a branch that begins with a norm of the stream and adds its result to the stream.

    `product` is the last one of the region; ranks divide it by rows.
    """

    def after(summed: torch.Tensor, stream: torch.Tensor) -> torch.Tensor:
        return finish(product, summed) + stream

    return Branch(norm, inside, after)


@dataclass
class PieceList:
    """A list of pieces under construction: computations, and borders where ranks exchange."""

    pieces: list[StagePiece] = field(default_factory=lambda: [StagePiece([])])

    def compute(self, function: LayerFunction) -> None:
        """Append a function of the state's only value."""
        self.append(lambda state: (function(state[0]),))

    def cross(self, crossing: BorderExchange) -> None:
        """Begin another piece behind a border."""
        self.pieces[-1] = replace(self.pieces[-1], crossing=crossing)
        self.pieces.append(StagePiece([]))

    def append(self, step: Step) -> None:
        self.pieces[-1] = replace(self.pieces[-1], steps=[*self.pieces[-1].steps, step])
