"""`TwoWaySums`: gradients added up piece by piece, encoded on the way to their owners and on the way back.

The r-th of equal shares of a piece belongs to the r-th owner: a replica, or a server. Replica i has the
gradient g_i and the error e_i, and the owner of a share has the error E. Sums are in the replicas' order
(Zhong et al., arXiv 2105.07829):

    p_i = g_i + e_i,  c_i = C(p_i),  e_i <- p_i - D(c_i);   P = sum_i D(c_i) + E,  c = C(P),  E <- P - D(c)

All replicas step with D(c). If it is not finite, they keep the errors of before: those of the piece, or those
of the share where servers own it. A server sees no other share.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import torch

from weft.methods.clan.options import FP32_BYTES, IN_FLIGHT, ClanOptions
from weft.methods.clan.ranges import CompressedRange, GradientPiece, joined, pieces_of
from weft.methods.clan.runtime.codecs import BlockCodec, codec_of
from weft.methods.clan.runtime.draws import draw_of
from weft.methods.clan.runtime.served_group import ServedGroup
from weft.sync.base import Group, Meeting, ParameterPlace
from weft.sync.dense import Dense


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
        served: the replicas and the servers that own the sums; None if the replicas do.
        error: of this rank, shape of the flat gradient; None where no errors are kept.
        owned: by piece, the errors of the sums that this rank owns, in its blocks.
        squares: the result of the last `compress`.
    """

    pieces: tuple[GradientPiece, ...]
    whole: tuple[slice, ...]
    group: Group
    served: ServedGroup | None = None
    error: torch.Tensor | None = None
    owned: list[torch.Tensor] = field(default_factory=list)
    squares: torch.Tensor | float = 0.0

    @property
    def owners(self) -> int:
        """The number of shares of each piece."""
        return self.group.size if self.served is None else self.served.servers


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

    def cut(
        self,
        stage: int,
        pieces: int,
        group: Group,
        whole: Collection[int] = (),
        served: ServedGroup | None = None,
    ) -> None:
        """Cut a stage's gradient into pieces; parameters with the numbers `whole` are sent whole, too.

        Servers, if there are some, cut the stage at the same time.
        """
        compressed: list[slice] = []
        others: list[slice] = []
        for number, (start, shape) in enumerate(self._places[stage]):
            found = slice(start, start + prod(shape))
            small = FP32_BYTES * prod(shape) < self._options.minimum_bytes
            (others if small or number in whole else compressed).append(found)
        owners = group.size if served is None else served.servers
        cut = pieces_of(joined(compressed), pieces, self._options.block, owners)
        self._stages[stage] = PiecedStage(cut, joined(others), group, served)
        if served is not None:
            served.to_servers(torch.tensor([[one.elements for one in cut]] * owners))

    def group_of(self, stage: int) -> Group:
        """Return the replicas of a stage."""
        return self._stages[stage].group

    def begin(self, stage: int, flat: torch.Tensor) -> None:
        one = self._stages.get(stage)
        if one is not None and self._options.keeps_errors:
            one.error = torch.zeros_like(flat)
            if one.served is None:
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
        for place, piece, owned in self._counted(one):
            for part in piece.owned_ranges(place, self._options.block):
                total[part.flat] += owned[part.own]
        one.group.add_up(total)
        return total

    def _counted(self, stage: PiecedStage) -> Iterator[tuple[int, GradientPiece, torch.Tensor]]:
        """Yield the errors of owners that this rank counts for all, flat, with the place of their share."""
        if stage.served is None or stage.error is None:
            pairs = zip(stage.pieces, stage.owned, strict=True)
            yield from ((stage.group.place, piece, owned.view(-1)) for piece, owned in pairs)
            return
        for piece in stage.pieces:
            taken = stage.error.new_empty(stage.owners, piece.blocks * self._options.block)
            stage.served.from_servers(taken)
            if stage.group.place == 0:
                yield from ((place, piece, owned) for place, owned in enumerate(taken))

    def carry_on(self, stage: int, carried: torch.Tensor) -> None:
        """Give each owner the rest of its shares. Parameters that are now sent whole leave it behind."""
        if stage not in self._stages or not self._options.keeps_errors:
            return
        one = self._stages[stage]
        for number, piece in enumerate(one.pieces):
            length = piece.blocks * self._options.block
            flat = carried.new_zeros(one.owners * length)
            for part in piece.ranges:
                flat[part.own] = carried[part.flat]
            shares = flat.view(one.owners, length)
            if one.served is None:
                one.owned[number].view(-1).copy_(shares[one.group.place])
            else:
                one.served.to_servers(shares)

    def compress(self, gradient: torch.Tensor, meeting: Meeting) -> tuple[torch.Tensor, torch.Tensor]:
        """Encode the shares of all owners of a piece, and leave the next error in its place in `gradient`.

        Return two ratios of the stage's pieces so far, of shape () and in fp64. The first is the square of
        the rest that decoding leaves out, over that of the encoded numbers. The second is the norm of the
        rest, over that of the gradient. Where errors are dropped, both are of one share.
        """
        (stage, piece), codec = self._piece(meeting), self._codec(meeting.stage, meeting.part)
        shares = gradient.new_zeros(stage.owners, piece.blocks, self._options.block)
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
            codec.encode(share, elements, payload, draw_of(meeting, "push", place, piece, meeting.replica))
        self._under_way[meeting.stage, meeting.part] = UnderWay(payloads)
        own = stage.group.place % stage.owners
        seen = range(own, own + 1) if stage.error is None else range(len(shares))
        encoded = _square(shares[seen.start : seen.stop])
        for place in seen:
            draw = draw_of(meeting, "push", place, piece, meeting.replica)
            codec.leave(shares[place], payloads[place], piece.elements_of(place, self._options.block), draw)
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
        if stage.served is not None:
            stage.served.to_servers(under_way.payloads)
        elif piece.blocks:
            taken = self._room("taken", stage.group.size, meeting, gradient)
            stage.group.all_to_all(taken.view(-1), under_way.payloads.view(-1))
            under_way.payloads = taken

    def aggregate(self, gradient: torch.Tensor, meeting: Meeting) -> None:
        """Decode and add up the shares that this rank owns, and encode the sum."""
        stage, piece = self._piece(meeting)
        under_way, place = self._under_way[meeting.stage, meeting.part], stage.group.place
        codec = self._codec(meeting.stage, meeting.part)
        draw = draw_of(meeting, "pull", place, piece, meeting.replica)
        total = gradient.new_empty(piece.blocks, self._options.block)
        error = stage.owned[meeting.part] if stage.owned else None
        elements = piece.elements_of(place, self._options.block)
        own = self._room("own", 1, meeting, gradient)
        codec.encode_sum(under_way.payloads, total, error, elements, own[0], draw)
        under_way.payloads = own
        if error is not None:
            under_way.error = total

    def pull(self, gradient: torch.Tensor, meeting: Meeting) -> None:
        """Get the encoded sums of all owners."""
        stage, piece = self._piece(meeting)
        under_way = self._under_way[meeting.stage, meeting.part]
        if piece.blocks:
            everyone = self._room("everyone", stage.owners, meeting, gradient)
            if stage.served is None:
                stage.group.all_gather(everyone.view(-1), under_way.payloads.view(-1))
            else:
                stage.served.from_servers(everyone)
            under_way.payloads = everyone

    def decompress(self, gradient: torch.Tensor, meeting: Meeting) -> None:
        """Put the decoded sum into its place in `gradient`, and keep the new errors if it is finite."""
        stage, piece = self._piece(meeting)
        under_way = self._under_way.pop((meeting.stage, meeting.part))
        if not piece.blocks:
            return
        shares = gradient.new_empty(stage.owners, piece.blocks, self._options.block, dtype=torch.float32)
        codec = self._codec(meeting.stage, meeting.part)
        for place, payload in enumerate(under_way.payloads):
            codec.decode(payload, shares[place], draw_of(meeting, "pull", place, piece, meeting.replica))
        decoded = shares.view(-1)
        if stage.error is not None:
            for ranges, elements in self._kept_together(stage, piece):
                finite = torch.stack(decoded[elements].aminmax()).isfinite().all()
                for one in ranges:
                    before = stage.error[one.flat]
                    torch.where(finite, gradient[one.flat], before, out=before)
                if under_way.error is not None:
                    before = stage.owned[meeting.part]
                    torch.where(finite, under_way.error, before, out=before)
        for one in piece.ranges:
            gradient[one.flat] = decoded[one.own]

    def _kept_together(
        self, stage: PiecedStage, piece: GradientPiece
    ) -> Iterator[tuple[Sequence[CompressedRange], slice]]:
        """Yield the ranges of a piece whose errors stay together, and their places in it."""
        if stage.served is None:
            yield piece.ranges, slice(0, piece.elements)
            return
        for place in range(stage.owners):
            first = place * piece.blocks * self._options.block
            if elements := piece.elements_of(place, self._options.block):
                yield piece.owned_ranges(place, self._options.block), slice(first, first + elements)

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


def _square(numbers: torch.Tensor) -> torch.Tensor:
    """Return the sum of the squares of a contiguous tensor, shape (), in fp64."""
    flat = numbers.view(-1)
    return torch.dot(flat, flat).double()


def _ratio(part: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """Return a ratio of two numbers, 0 where both are 0."""
    return torch.where(whole > 0, part / whole, part)
