"""`TwoWaySums`: gradients added up piece by piece, encoded on the way to their owners and on the way back.

The r-th of equal shares of a piece belongs to the r-th rank. Rank i has the gradient g_i and the error e_i,
and the owner of a share has the error E. Sums are in the order of the ranks (Zhong et al., arXiv 2105.07829):

    p_i = g_i + e_i,  c_i = C(p_i),  e_i <- p_i - D(c_i);   P = sum_i D(c_i) + E,  c = C(P),  E <- P - D(c)

All ranks step with D(c). If it is not finite, they keep the errors of before.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import torch

from weft.methods.clan.options import FP32_BYTES, NAME, ClanOptions
from weft.methods.clan.ranges import GradientPiece, joined, pieces_of
from weft.methods.clan.runtime.codecs import BlockCodec, Draw, codec_of
from weft.sync.base import Group, Meeting, ParameterPlace
from weft.sync.codecs.counter import Key
from weft.sync.dense import Dense

# Pieces of a stage under way at once: the first one is decoded before the fourth one is encoded.
IN_FLIGHT = 3


@dataclass(slots=True)
class UnderWay:
    """A piece between two instructions: its payloads, and the next error of its owner."""

    payloads: torch.Tensor
    error: torch.Tensor | None = None


@dataclass(slots=True)
class PiecedStage:
    """A stage's pieces and errors.

    Attributes:
        whole: the ranges of the flat gradient that are sent whole.
        group: the replicas of the stage.
        error: of this rank, shape of the flat gradient; None where no errors are kept.
        owned: by piece, the errors of the sums that this rank owns, in its blocks.
        squares: the result of the last `compress`.
    """

    pieces: tuple[GradientPiece, ...]
    whole: tuple[slice, ...]
    group: Group
    error: torch.Tensor | None = None
    owned: list[torch.Tensor] = field(default_factory=list)
    squares: torch.Tensor | float = 0.0


class TwoWaySums(Dense):
    """Sums of encoded pieces; `reduce` adds up all other ranges of a gradient as they are."""

    def __init__(self, options: ClanOptions) -> None:
        self._options = options
        self._codecs: dict[tuple[int, int], BlockCodec] = {}
        self._places: dict[int, Sequence[ParameterPlace]] = {}
        self._stages: dict[int, PiecedStage] = {}
        self._under_way: dict[tuple[int, int], UnderWay] = {}
        # Payloads, kept from piece to piece, because one stream fills them and another one reads them.
        self._rooms: dict[tuple[str, int, int], torch.Tensor] = {}

    def lay_out(self, stage: int, places: Sequence[ParameterPlace]) -> None:
        self._places[stage] = places

    def cut(self, stage: int, pieces: int, group: Group, whole: Collection[int] = ()) -> None:
        """Cut a stage's gradient into pieces; parameters with the numbers `whole` are sent whole, too."""
        compressed: list[slice] = []
        others: list[slice] = []
        for number, (start, shape) in enumerate(self._places[stage]):
            found = slice(start, start + prod(shape))
            small = FP32_BYTES * prod(shape) < self._options.minimum_bytes
            (others if small or number in whole else compressed).append(found)
        cut = pieces_of(joined(compressed), pieces, group.size * self._options.block, group.size)
        self._stages[stage] = PiecedStage(cut, joined(others), group)

    def group_of(self, stage: int) -> Group:
        """Return the replicas of a stage."""
        return self._stages[stage].group

    def begin(self, stage: int, flat: torch.Tensor) -> None:
        one = self._stages.get(stage)
        if one is not None and self._options.keeps_errors:
            one.error = torch.zeros_like(flat)
            one.owned = [flat.new_zeros(piece.blocks, self._options.block) for piece in one.pieces]

    def tensors(self) -> Mapping[str, torch.Tensor]:
        found = {
            f"error/{number}": one.error for number, one in self._stages.items() if one.error is not None
        }
        return found | {
            f"owned/{number}/{part}": owned
            for number, one in self._stages.items()
            for part, owned in enumerate(one.owned)
        }

    def carried(self, stage: int) -> torch.Tensor | None:
        one = self._stages.get(stage)
        if one is None or one.error is None:
            return None
        total = one.error.clone()
        for piece, owned in zip(one.pieces, one.owned, strict=True):
            for part in piece.owned_ranges(one.group.place, self._options.block):
                total[part.flat] += owned.view(-1)[part.own]
        one.group.add_up(total)
        return total

    def carry_on(self, stage: int, carried: torch.Tensor) -> None:
        """Give each owner the rest of its shares. Parameters that are now sent whole leave it behind."""
        if stage not in self._stages or not self._options.keeps_errors:
            return
        one = self._stages[stage]
        for piece, owned in zip(one.pieces, one.owned, strict=True):
            for part in piece.owned_ranges(one.group.place, self._options.block):
                owned.view(-1)[part.own] = carried[part.flat]

    def compress(self, gradient: torch.Tensor, meeting: Meeting) -> tuple[torch.Tensor, torch.Tensor]:
        """Encode the shares of all owners of a piece, and leave the next error in its place in `gradient`.

        Return two ratios of the stage's pieces so far, of shape () and in fp64. The first is the square of
        the rest that decoding leaves out, over that of the encoded numbers. The second is the norm of the
        rest, over that of the gradient. Where errors are dropped, both are of this rank's own share.
        """
        (stage, piece), codec = self._piece(meeting), self._codec(meeting.stage, meeting.part)
        shares = gradient.new_zeros(stage.group.size, piece.blocks, self._options.block)
        flat = shares.view(-1)
        for one in piece.ranges:
            flat[one.own] = gradient[one.flat]
        of_gradient = _square(shares)
        if stage.error is not None:
            for one in piece.ranges:
                flat[one.own] += stage.error[one.flat]
        payloads = self._room("given", len(shares), meeting, gradient)
        for place, (share, payload) in enumerate(zip(shares.to(torch.float32), payloads, strict=True)):
            elements = piece.elements_of(place, self._options.block)
            codec.encode(share, elements, payload, self._draw(meeting, "push", place))
        self._under_way[meeting.stage, meeting.part] = UnderWay(payloads)
        own = range(stage.group.place, stage.group.place + 1)
        seen = own if stage.error is None else range(len(shares))
        encoded = _square(shares[seen.start : seen.stop])
        for place in seen:
            draw = self._draw(meeting, "push", place)
            _leave(codec, shares[place], payloads[place], piece.elements_of(place, self._options.block), draw)
        left = _square(shares[seen.start : seen.stop])
        for one in piece.ranges if stage.error is not None else ():
            gradient[one.flat] = flat[one.own]
        squares = torch.stack([encoded, left, encoded if stage.error is None else of_gradient])
        stage.squares = squares + (stage.squares if meeting.part else 0.0)
        whole, left, of_gradient = stage.squares
        return _ratio(left, whole), _ratio(left, of_gradient).sqrt()

    def push(self, gradient: torch.Tensor, meeting: Meeting) -> None:
        """Give every owner its shares."""
        stage, piece = self._piece(meeting)
        under_way = self._under_way[meeting.stage, meeting.part]
        if piece.blocks:
            taken = self._room("taken", stage.group.size, meeting, gradient)
            stage.group.all_to_all(taken.view(-1), under_way.payloads.view(-1))
            under_way.payloads = taken

    def aggregate(self, gradient: torch.Tensor, meeting: Meeting) -> None:
        """Decode and add up the shares that this rank owns, and encode the sum."""
        stage, piece = self._piece(meeting)
        under_way, place = self._under_way[meeting.stage, meeting.part], stage.group.place
        draw, codec = self._draw(meeting, "pull", place), self._codec(meeting.stage, meeting.part)
        total = gradient.new_empty(piece.blocks, self._options.block)
        codec.decode_sum(under_way.payloads, total, draw)
        elements = piece.elements_of(place, self._options.block)
        total.view(-1)[elements:] = 0.0
        if stage.owned:
            total += stage.owned[meeting.part]
        under_way.payloads = self._room("own", 1, meeting, gradient)
        codec.encode(total.to(torch.float32), elements, under_way.payloads[0], draw)
        if stage.owned:
            _leave(codec, total, under_way.payloads[0], elements, draw)
            under_way.error = total

    def pull(self, gradient: torch.Tensor, meeting: Meeting) -> None:
        """Get the encoded sums of all owners."""
        stage, piece = self._piece(meeting)
        under_way = self._under_way[meeting.stage, meeting.part]
        if piece.blocks:
            everyone = self._room("everyone", stage.group.size, meeting, gradient)
            stage.group.all_gather(everyone.view(-1), under_way.payloads.view(-1))
            under_way.payloads = everyone

    def decompress(self, gradient: torch.Tensor, meeting: Meeting) -> None:
        """Put the decoded sum into its place in `gradient`, and keep the new errors if it is finite."""
        stage, piece = self._piece(meeting)
        under_way = self._under_way.pop((meeting.stage, meeting.part))
        if not piece.blocks:
            return
        shares = gradient.new_empty(stage.group.size, piece.blocks, self._options.block, dtype=torch.float32)
        codec = self._codec(meeting.stage, meeting.part)
        for place, payload in enumerate(under_way.payloads):
            codec.decode(payload, shares[place], self._draw(meeting, "pull", place))
        decoded = shares.view(-1)
        if stage.error is not None and under_way.error is not None:
            finite = torch.stack(decoded[: piece.elements].aminmax()).isfinite().all()
            for one in piece.ranges:
                before = stage.error[one.flat]
                torch.where(finite, gradient[one.flat], before, out=before)
            before = stage.owned[meeting.part]
            torch.where(finite, under_way.error, before, out=before)
        for one in piece.ranges:
            gradient[one.flat] = decoded[one.own]

    def reduce(self, gradient: torch.Tensor, meeting: Meeting) -> None:
        """Add up the ranges that are sent whole; all of a gradient that belongs to no stage."""
        stage = self._stages.get(meeting.stage)
        if stage is None:
            super().reduce(gradient, meeting)
            return
        parts = [gradient[one] for one in stage.whole]
        length = sum(len(one) for one in parts)
        if not length:
            return
        message = gradient.new_zeros(-(-length // meeting.group.size) * meeting.group.size)
        torch.cat(parts, out=message[:length])
        meeting.group.add_up(message)
        for part, summed in zip(
            parts, message.split([*map(len, parts), len(message) - length]), strict=False
        ):
            part.copy_(summed)

    def _piece(self, meeting: Meeting) -> tuple[PiecedStage, GradientPiece]:
        stage = self._stages[meeting.stage]
        return stage, stage.pieces[meeting.part]

    def _codec(self, stage: int, part: int) -> BlockCodec:
        if (stage, part) not in self._codecs:
            self._codecs[stage, part] = codec_of(self._options.of_piece(stage, part))
        return self._codecs[stage, part]

    def _room(self, what: str, shares: int, meeting: Meeting, like: torch.Tensor) -> torch.Tensor:
        """Return payloads of a piece to fill, shape (shares, bytes)."""
        stage, piece = self._piece(meeting)
        size = self._codec(meeting.stage, meeting.part).options.payload_bytes(piece.blocks)
        place = meeting.stage, meeting.part % IN_FLIGHT
        if (what, *place) not in self._rooms:
            most = max(
                self._codec(meeting.stage, part).options.payload_bytes(one.blocks)
                for part, one in enumerate(stage.pieces)
            )
            self._rooms[(what, *place)] = like.new_empty(shares * most, dtype=torch.uint8)
        return self._rooms[(what, *place)][: shares * size].view(shares, size)

    def _draw(self, meeting: Meeting, direction: str, place: int) -> Draw:
        """Return the random numbers of a share that this rank encodes, or that an owner has encoded."""
        where = meeting.stage, meeting.step, meeting.part
        own = Key.of(meeting.seed, NAME, direction, *where, meeting.replica)
        first = place * self._stages[meeting.stage].pieces[meeting.part].blocks
        return Draw(own, Key.of(meeting.seed, NAME, "indices", *where), first)


def _leave(codec: BlockCodec, share: torch.Tensor, payload: torch.Tensor, elements: int, draw: Draw) -> None:
    """Subtract from a share, shape (blocks, block), what its payload is decoded to."""
    decoded = torch.empty_like(share, dtype=torch.float32)
    codec.decode(payload, decoded, draw)
    share.sub_(decoded).view(-1)[elements:] = 0.0


def _square(numbers: torch.Tensor) -> torch.Tensor:
    """Return the sum of the squares of a contiguous tensor, shape (), in fp64."""
    flat = numbers.view(-1)
    return torch.dot(flat, flat).double()


def _ratio(part: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """Return a ratio of two numbers, 0 where both are 0."""
    return torch.where(whole > 0, part / whole, part)
