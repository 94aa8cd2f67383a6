"""The pieces of a stage between its borders, where the ranks that divide it exchange.

Pieces hand on a state, a tuple: its first value crosses the border, the others stay on the rank. A stage with
branches beside a stream, each with one region of divided products, names its branches
(`weft.run.stage.stage_module.StageModule.branches`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import nn

from weft.run.parallel.tensor_layers import finish
from weft.run.parallel.tensor_parallel import TensorRanks
from weft.run.stage.layers import LayerFunction

State = tuple[torch.Tensor, ...]
Step = Callable[[State], State]


@dataclass(frozen=True, slots=True)
class StagePiece:
    """One piece. `weights` are those of its region of divided products; empty outside of regions."""

    steps: Sequence[Step]
    weights: tuple[nn.Parameter, ...] = ()

    def __call__(self, state: State) -> State:
        for step in self.steps:
            state = step(state)
        return state


class Ran(NamedTuple):
    """A piece that has run: its inputs, which are leaves of its graph, and its outputs."""

    inputs: State
    outputs: State


@dataclass(slots=True)
class Tape:
    """A micro-batch's way through the pieces of a stage; backward takes them off its end."""

    pieces: Sequence[StagePiece] = ()
    ran: list[Ran] = field(default_factory=list)
    behind: State = ()

    @property
    def output(self) -> torch.Tensor:
        """The value that the last run piece hands over its border."""
        return self.ran[-1].outputs[0]


@runtime_checkable
class InPieces(Protocol):
    """A stage that names its pieces."""

    tensor: TensorRanks

    @property
    def borders(self) -> tuple[bool, ...]:
        """True for each border where a region of divided products begins, False where it ends."""
        ...

    def pieces(self, inputs: torch.Tensor) -> Sequence[StagePiece]:
        """Return the pieces that, in order, turn the stage's input into its output; the caller runs the
        exchanges."""
        ...


class Branch(NamedTuple):
    """A branch of a block beside the stream.

    Attributes:
        before: from the stream to the input of the region.
        inside: from that input to the partial result, which leaves the region.
        after: from the sum of all ranks' partial results, and the stream, to the stream.
        weights: the weights used inside.
    """

    before: LayerFunction
    inside: LayerFunction
    after: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    weights: tuple[nn.Parameter, ...]


def plain_branch(norm: nn.Module, inside: LayerFunction, product: nn.Module, region: nn.Module) -> Branch:
    """Return a branch that begins with a norm of the stream and adds its result to the stream.

    `product` is the last one of the region; ranks divide it by rows.
    """

    def after(summed: torch.Tensor, stream: torch.Tensor) -> torch.Tensor:
        return finish(product, summed) + stream

    return Branch(norm, inside, after, tuple(region.parameters()))


@dataclass
class PieceList:
    """A list of pieces under construction: computations, and borders where ranks exchange."""

    pieces: list[StagePiece] = field(default_factory=lambda: [StagePiece([])])
    borders: list[bool] = field(default_factory=list)

    def compute(self, function: LayerFunction) -> None:
        """Append a function of the state's only value."""
        self._append(lambda state: (function(state[0]),))

    def cross(self, *, enters: bool, weights: Iterable[nn.Parameter] = ()) -> None:
        """Begin another piece behind a border."""
        self.borders.append(enters)
        self.pieces.append(StagePiece([], tuple(weights)))

    def branch(self, one: Branch) -> None:
        self._append(lambda state: (one.before(state[0]), state[0]))
        self.cross(enters=True, weights=one.weights)
        self._append(lambda state: (one.inside(state[0]), *state[1:]))
        self.cross(enters=False)
        self._append(lambda state: (one.after(*state),))

    def _append(self, step: Step) -> None:
        last = self.pieces[-1]
        self.pieces[-1] = StagePiece([*last.steps, step], last.weights)
