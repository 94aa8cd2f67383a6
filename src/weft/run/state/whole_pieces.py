"""Work on whole tensors of which ranks own ranges: each is completed by the rank that owns its beginning."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from weft.run.state.stepped import Piece
from weft.sync.base import Group


def complete_pieces(
    pieces: Sequence[Piece], own: torch.Tensor, group: Group, complete: Callable[[Piece, torch.Tensor], None]
) -> None:
    """Change the gradients of whole parameters in place; every rank of the group calls it.

    A rank gets the other pieces of the parameters that begin in its range, and returns their results.

    Args:
        pieces: this rank's, in the order of the flat tensors.
        own: the gradient of this rank's range; all ranges have its length.
        complete: gets a piece that begins here, and the whole gradient in the shape of its parameter.
    """
    length = len(own)
    # Of all its parameters, a rank has only the first without its beginning, and the last without its end.
    continued = next((piece for piece in pieces if piece.start > 0), None)
    open_ended = next((piece for piece in pieces if piece.start == 0 and piece.end < _length(piece)), None)
    given, taken = [0] * group.size, [0] * group.size
    if continued is not None:
        given[continued.begins // length] = continued.end - continued.start
    if open_ended is not None:
        missing = range(open_ended.begins + open_ended.end, open_ended.begins + _length(open_ended))
        for place in range(group.place + 1, missing[-1] // length + 1):
            ends = min(missing.stop, (place + 1) * length)
            taken[place] = ends - max(missing.start, place * length)
    out = own[:0] if continued is None else _gradient(continued)
    arriving = own.new_empty(sum(taken))
    group.all_to_all_rows(arriving, out, taken, given)
    for piece in pieces:
        if piece.start == 0 and piece.end == _length(piece):
            complete(piece, _gradient(piece).view_as(piece.parameter))
    if open_ended is not None:
        begins = _gradient(open_ended)
        whole = torch.cat([begins, arriving])
        complete(open_ended, whole.view_as(open_ended.parameter))
        begins.copy_(whole[: len(begins)])
        arriving.copy_(whole[len(begins) :])
    group.all_to_all_rows(out, arriving, given, taken)


def _length(piece: Piece) -> int:
    return piece.parameter.numel()


def _gradient(piece: Piece) -> torch.Tensor:
    assert piece.stepped.grad is not None, "it is stepped"
    return piece.stepped.grad.view(-1)
