"""`Aggregator`: the sums of all stages' pieces on a server, which holds no stage.

A server owns a share of each piece, and has the error E of the share. Names are those of
`weft.methods.clan.runtime.exchange`:

    P = sum_i D(c_i) + E,  c = C(P),  E <- P - D(c)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from weft.methods.clan.options import IN_FLIGHT, ClanOptions
from weft.methods.clan.ranges import GradientPiece
from weft.methods.clan.runtime.codecs import BlockCodec, codec_of
from weft.methods.clan.runtime.draws import draw_of
from weft.methods.clan.runtime.served_group import ServedGroup
from weft.sync.base import Meeting


@dataclass(slots=True)
class ServedPiece:
    """A piece of a stage's gradient on a server.

    Attributes:
        error: of the sum that the server owns, shape (blocks, block); None where no errors are kept.
        taken: the payloads of all replicas, shape (replicas, bytes).
        given: the payload of the encoded sum, shape (bytes,).
    """

    piece: GradientPiece
    codec: BlockCodec
    error: torch.Tensor | None
    taken: torch.Tensor
    given: torch.Tensor


class Aggregator:
    """The owned shares of all stages. Gradients have the type `dtype`."""

    def __init__(self, options: ClanOptions, dtype: torch.dtype, device: torch.device) -> None:
        self._options, self._dtype, self._device = options, dtype, device
        self._groups: dict[int, ServedGroup] = {}
        self._pieces: dict[tuple[int, int], ServedPiece] = {}
        # Payloads, kept from piece to piece, as replicas keep theirs.
        self._rooms: dict[tuple[str, int, int], torch.Tensor] = {}

    def cut(self, stage: int, pieces: int, group: ServedGroup) -> None:
        """Learn the elements of a stage's pieces from its replicas, and make room for their sums."""
        told = torch.empty(group.replicas, pieces, dtype=torch.int64)
        group.from_replicas(told)
        self._groups[stage] = group
        cut = [
            GradientPiece.of(elements, self._options.block, group.servers) for elements in told[0].tolist()
        ]
        codecs = [codec_of(self._options.of_piece(stage, part)) for part in range(pieces)]
        sizes = [codec.options.payload_bytes(one.blocks) for codec, one in zip(codecs, cut, strict=True)]
        for part, (piece, codec, size) in enumerate(zip(cut, codecs, sizes, strict=True)):
            self._pieces[stage, part] = ServedPiece(
                piece=piece,
                codec=codec,
                error=self._sums(piece).zero_() if self._options.keeps_errors else None,
                taken=self._room("taken", stage, part, group.replicas * max(sizes))[
                    : group.replicas * size
                ].view(group.replicas, size),
                given=self._room("given", stage, part, max(sizes))[:size],
            )

    def push(self, meeting: Meeting) -> None:
        """Take the shares of all replicas."""
        self._groups[meeting.stage].from_replicas(self._pieces[meeting.stage, meeting.part].taken)

    def aggregate(self, meeting: Meeting) -> None:
        """Decode and add up the shares, encode the sum, and keep the new error if it is finite."""
        one, server = self._pieces[meeting.stage, meeting.part], self._groups[meeting.stage].server
        elements = one.piece.elements_of(server, self._options.block)
        draw, total = draw_of(meeting, "pull", server, one.piece, server), self._sums(one.piece)
        one.codec.encode_sum(one.taken, total, one.error, elements, one.given, draw)
        if one.error is not None and elements:
            finite = torch.stack(total.aminmax()).isfinite().all()
            torch.where(finite, total, one.error, out=one.error)

    def pull(self, meeting: Meeting) -> None:
        """Give all replicas the encoded sum."""
        self._groups[meeting.stage].to_replicas(self._pieces[meeting.stage, meeting.part].given)

    def give_errors(self) -> None:
        """Give the errors to all replicas, which add up what is unsent."""
        for (stage, _), error in self._errors():
            self._groups[stage].to_replicas(error.view(-1))

    def take_errors(self) -> None:
        """Begin with errors that replicas give, all the same."""
        for (stage, _), error in self._errors():
            taken = error.new_empty(self._groups[stage].replicas, error.numel())
            self._groups[stage].from_replicas(taken)
            error.view(-1).copy_(taken[0])

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Return the errors by name, as a checkpoint keeps them."""
        return {f"owned/{stage}/{part}": error for (stage, part), error in self._errors()}

    def _errors(self) -> list[tuple[tuple[int, int], torch.Tensor]]:
        return [(place, one.error) for place, one in self._pieces.items() if one.error is not None]

    def _sums(self, piece: GradientPiece) -> torch.Tensor:
        return torch.empty(piece.blocks, self._options.block, dtype=self._dtype, device=self._device)

    def _room(self, what: str, stage: int, part: int, size: int) -> torch.Tensor:
        place = what, stage, part % IN_FLIGHT
        if place not in self._rooms:
            self._rooms[place] = torch.empty(size, dtype=torch.uint8, device=self._device)
        return self._rooms[place]
