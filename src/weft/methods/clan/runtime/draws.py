"""The random numbers of a payload: they depend on the seed, the step, the stage, the piece and the sender."""

from __future__ import annotations

from weft.methods.clan.options import NAME
from weft.methods.clan.ranges import GradientPiece
from weft.methods.clan.runtime.codecs import Draw
from weft.sync.base import Meeting
from weft.sync.codecs.counter import Key


def draw_of(meeting: Meeting, direction: str, place: int, piece: GradientPiece, sender: int) -> Draw:
    """Return the random numbers of the share at `place` of a piece, which `sender` encodes."""
    where = meeting.stage, meeting.step, meeting.part
    own = Key.of(meeting.seed, NAME, direction, *where, sender)
    return Draw(own, Key.of(meeting.seed, NAME, "indices", *where), place * piece.blocks)
