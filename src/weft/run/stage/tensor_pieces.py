"""`TensorCut`: a stage cut where its tensor ranks exchange: at the ends of regions of divided products."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial

import torch
from torch import nn

from weft.run.parallel.tensor_parallel import TensorRanks
from weft.run.stage.pieces import Branch, PieceBorder, PieceList, StagePiece
from weft.run.stage.stage_module import StageModule
from weft.sync.base import Group


class TensorCut:
    """A way to cut a stage of a known family, which tensor ranks divide (`StageCut`)."""

    def __init__(self, stage: StageModule) -> None:
        self._stage = stage

    @classmethod
    def of(cls, module: nn.Module) -> TensorCut | None:
        return cls(module) if isinstance(module, StageModule) else None

    @property
    def borders(self) -> Sequence[PieceBorder]:
        """The entry and the exit of every region: of a table the exit only, and of a head the entry."""
        stage, has_table = self._stage, bool(self._stage.token_table)
        enters = [False] * (stage.embeds and has_table)
        enters += [True, False] * (2 * len(stage.blocks))
        enters += [True] * (stage.ends and has_table)
        exchanges = stage.tensor.exchanges
        return [
            PieceBorder(*(exchanges(enters=one, backward=way) for way in (False, True))) for one in enters
        ]

    def pieces(self, inputs: torch.Tensor) -> Sequence[StagePiece]:
        stage, found, divided = self._stage, PieceList(), bool(self._stage.token_table)
        if stage.embeds and divided:
            found.compute(stage.look_up)
            self._cross(found, enters=False)
            documents = stage.documents
            found.compute(lambda rows: stage.embed(rows, inputs, documents))
        elif stage.embeds:
            found.compute(stage.layer_functions(inputs)[0])
        for one in stage.branches(inputs):
            self._branch(found, one)
        if stage.ends and divided:
            found.compute(stage.last_norm)
            self._cross(found, enters=True)
            found.compute(stage.multiply_out)
        elif stage.ends:
            found.compute(stage.layer_functions(inputs)[-1])
        return found.pieces

    def exchanging_elsewhere(self) -> AbstractContextManager[None]:
        return self._stage.tensor.exchanging_elsewhere()

    def _branch(self, found: PieceList, one: Branch) -> None:
        found.append(lambda state: (one.before(state[0]), state[0]))
        self._cross(found, enters=True)
        found.append(lambda state: (one.inside(state[0]), *state[1:]))
        self._cross(found, enters=False)
        found.append(lambda state: (one.after(*state),))

    def _cross(self, found: PieceList, *, enters: bool) -> None:
        found.cross(partial(self._exchange, enters=enters))

    def _exchange(self, value: torch.Tensor, group: Group, *, enters: bool, backward: bool) -> torch.Tensor:
        divides = self._stage.tensor.divides_sequence
        ranks = TensorRanks(group.place, group.size, divides_sequence=divides)
        ranks.connect(group)
        return ranks.exchange(value, enters=enters, backward=backward)
