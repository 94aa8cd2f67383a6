"""`TiedShards`: a rank's shards of a tied weight's copies, in the flat tensors of the stages that hold them.

A stage lays its copy out with its other weights. So a rank's shards of two copies begin and end elsewhere in
the weight. After the stages' own reductions, two ranks therefore exchange the range of the gradient that both
own. All owners of a range then add up the same numbers in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from typing import NamedTuple

import torch
from torch import nn

from weft.run.state.stepped import Piece, SteppedWeights
from weft.sync.base import Group


class SharedRange(NamedTuple):
    """Elements of a weight in the shard of a sender's copy and in that of a receiver's, by their stages."""

    source: int
    target: int
    common: range


class TiedShards:
    """The shards of one tied weight on one rank.

    Args:
        copies: this rank's copies by stage.
        stages: all stages with a copy, rising.
        group: the ranks that have all shards of every copy, each once.
        sent_as: the precision of gradients on the way.
    """

    def __init__(
        self, copies: Mapping[int, nn.Parameter], stages: tuple[int, ...], group: Group, sent_as: torch.dtype
    ) -> None:
        self.copies = dict(copies)
        self._all = stages
        self._group = group
        self._sent_as = sent_as
        self._pieces: dict[int, Piece] = {}
        # By member of the group: the ranges that this rank gives to it, and takes from it.
        self._given: list[list[SharedRange]] = []
        self._taken: list[list[SharedRange]] = []

    @property
    def stages(self) -> tuple[int, ...]:
        return tuple(self.copies)

    @property
    def counted_elsewhere(self) -> tuple[int, ...]:
        """The stages with copies whose gradients the first of all stages counts."""
        return tuple(stage for stage in self.stages if stage != self._all[0])

    def begin(self, stepped: Mapping[int, SteppedWeights], device: torch.device) -> None:
        """Find this rank's pieces and tell all ranks of the group; every one of them calls it."""
        for stage, copy in self.copies.items():
            piece = next((one for one in stepped[stage].pieces if one.parameter is copy), None)
            if piece is not None:
                self._pieces[stage] = piece
        own = [self._pieces.get(stage) for stage in self._all]
        ends = [end for one in own for end in ((0, 0) if one is None else (one.start, one.end))]
        mine = torch.tensor(ends, dtype=torch.int64, device=device)
        table = mine.new_empty(self._group.size * len(mine))
        self._group.all_gather(table, mine)
        members = table.view(self._group.size, len(self._all), 2).tolist()
        owned = [[range(*ends) for ends in member] for member in members]
        here = owned[self._group.place]
        self._given = [list(self._shared(here, other)) for other in owned]
        self._taken = [list(self._shared(other, here)) for other in owned]

    def add_up(self, like: torch.Tensor) -> None:
        """Make the gradient of every own piece the sum over all copies, in the order of the stages.

        `like` has the precision and the device of gradients; a rank may have no piece.
        """
        arrived = [one for ranges in self._taken for one in ranges]
        cut = [self._cut(source, common) for ranges in self._given for source, _, common in ranges]
        sent = torch.cat([like.new_empty(0), *cut]).to(self._sent_as)
        room = sent.new_empty(sum(len(common) for *_, common in arrived))
        self._group.all_to_all_rows(room, sent, _rows(self._taken), _rows(self._given))
        parts = room.split([len(common) for *_, common in arrived])
        for stage, piece in self._pieces.items():
            gradient = _gradient(piece)
            # On its way to others, the own summand is rounded, too.
            terms = [(stage, range(piece.start, piece.end), gradient.to(self._sent_as))]
            terms += [
                (source, common, part)
                for (source, target, common), part in zip(arrived, parts, strict=True)
                if target == stage
            ]
            total = torch.zeros_like(gradient)
            for _, common, term in sorted(terms, key=lambda one: one[0]):
                total[common.start - piece.start : common.stop - piece.start] += term
            gradient.copy_(total)

    def _shared(self, sender: list[range], receiver: list[range]) -> Iterator[SharedRange]:
        """Yield the ranges that both own, from the elements of the weight in each one's shards, by stage."""
        for source, target in product(range(len(self._all)), repeat=2):
            one, other = sender[source], receiver[target]
            common = range(max(one.start, other.start), min(one.stop, other.stop))
            if source != target and common:
                yield SharedRange(self._all[source], self._all[target], common)

    def _cut(self, stage: int, common: range) -> torch.Tensor:
        piece = self._pieces[stage]
        return _gradient(piece)[common.start - piece.start : common.stop - piece.start]


def _gradient(piece: Piece) -> torch.Tensor:
    assert piece.stepped.grad is not None, "it is stepped"
    return piece.stepped.grad.view(-1)


def _rows(of_members: list[list[SharedRange]]) -> list[int]:
    return [sum(len(common) for *_, common in ranges) for ranges in of_members]
