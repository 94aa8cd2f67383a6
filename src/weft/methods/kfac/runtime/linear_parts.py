"""The parts of linear layers that a rank has: `WholeLinear`, and `DividedLinear` among tensor ranks.

Tensor ranks divide the features of one side of a linear layer. A factor needs rows with all features of its
side. So each rank takes a share of a micro-batch's rows, as a replica has a share of the batch. The features
of these rows come from all ranks, and the sum over replicas is one over tensor ranks, too. A gradient's
product with a matrix of the divided side needs the whole gradient, and gives this rank's part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from weft.run.parallel.tensor_layers import Division
from weft.run.parallel.tensor_parallel import TensorRanks

INPUTS, OUTPUTS = 0, 1


class WholeLinear:
    """A linear layer that is whole on this rank."""

    def kept(self, side: int, rows: torch.Tensor) -> torch.Tensor:
        """Return the rows of one side that this rank keeps, of those that a pass shows."""
        return rows

    def kept_shape(self, side: int, rows: int, features: int) -> tuple[int, int]:
        """Return the shape of the kept part of (rows, features)."""
        return rows, features

    def of_outputs(self, values: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a tensor with an element, or a row, for each output."""
        return values

    def of_inputs(self, values: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a tensor with an element, or a column, for each input."""
        return values

    def times_outputs(self, matrix: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """Return the product of a matrix of outputs and a gradient, (columns, ...)."""
        return matrix @ gradient

    def times_inputs(self, gradient: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
        """Return the product of a gradient, (columns, inner), and a matrix of inputs."""
        return gradient @ matrix


WHOLE = WholeLinear()


class DividedLinear(WholeLinear):
    """A linear layer that tensor ranks divide along one side.

    Args:
        ranks: those of the replica.
        side: inputs (0) or outputs (1), whose features are divided.
        division: of its weight.
    """

    def __init__(self, ranks: TensorRanks, side: int, division: Division) -> None:
        self.ranks = ranks
        self._side, self._division = side, division

    def divides(self, side: int) -> bool:
        """Return True if ranks divide the features of its inputs (0) or outputs (1)."""
        return side == self._side

    def kept(self, side: int, rows: torch.Tensor) -> torch.Tensor:
        # Outputs of a product with divided inputs are of the stream, of which a rank may have its own tokens.
        if side == self._side or (side == OUTPUTS and self.ranks.divides_sequence):
            return rows
        share = self.ranks.share(len(rows))
        # A copy, as a view would keep all rows.
        return rows[share.start : share.stop].clone()

    def kept_shape(self, side: int, rows: int, features: int) -> tuple[int, int]:
        if side == self._side:
            return rows, self._division.own_length(self.ranks)
        return len(self.ranks.share(rows)), features

    def joined(self, shares: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return rows with all features, from those of all ranks."""
        return self._along(1).joined(shares, self.ranks)

    def of_outputs(self, values: torch.Tensor) -> torch.Tensor:
        return self._along(0).own(values, self.ranks) if self._side == OUTPUTS else values

    def of_inputs(self, values: torch.Tensor) -> torch.Tensor:
        return self._along(values.ndim - 1).own(values, self.ranks) if self._side == INPUTS else values

    def times_outputs(self, matrix: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        return self.of_outputs(matrix) @ (self._whole(gradient, 0) if self._side == OUTPUTS else gradient)

    def times_inputs(self, gradient: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
        return (self._whole(gradient, 1) if self._side == INPUTS else gradient) @ self.of_inputs(matrix)

    def _along(self, axis: int) -> Division:
        return replace(self._division, axis=axis)

    def _whole(self, part: torch.Tensor, axis: int) -> torch.Tensor:
        """Return the whole gradient; every rank calls it."""
        return self._along(axis).joined(list(self.ranks.gather(part)), self.ranks)


def with_all_features(
    linears: Sequence[WholeLinear], side: int, rows: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Return this rank's rows of one side of linear layers with all features, from the kept rows.

    The ranks that divide them call it together. They exchange all of these rows at once.
    """
    found = list(rows)
    divided = [
        (place, one)
        for place, one in enumerate(linears)
        if isinstance(one, DividedLinear) and one.divides(side)
    ]
    if not divided:
        return found
    given, ranks = torch.cat([found[place] for place, _ in divided], 1), divided[0][1].ranks
    counts = [len(ranks.share(len(given), place)) for place in range(ranks.size)]
    own = counts[ranks.place]
    taken = given.new_empty(ranks.size * own, given.shape[1])
    with ranks.meeting():
        ranks.group.all_to_all_rows(taken, given, [own] * ranks.size, counts)
    widths = [found[place].shape[1] for place, _ in divided]
    shares = taken.view(ranks.size, own, sum(widths)).split(widths, 2)
    for (place, one), some in zip(divided, shares, strict=True):
        found[place] = one.joined(some.unbind())
    return found
