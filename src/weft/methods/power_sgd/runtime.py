"""PowerSGD (Vogels et al., arXiv 1905.13727): one power iteration per step on each matrix of a gradient.

M_i is the gradient of replica i plus its error. All replicas have the same Q, and the sums run over them:

    P = sum_i M_i Q,  orthonormal;  Q' = sum_i M_i^T P;  sum_i M_i is taken as P Q'^T
    the new error is M_i - P (M_i^T P)^T

The paper subtracts an equal part of P Q'^T on each replica. The sum of all errors is the same, and P and Q'
depend on this sum alone. But each error here is at most as large as its M_i, and does not collect
differences of replicas. Q' is made orthonormal before the next product, so that directions of small
gradients, and those of gradients that were zero once, do not get lost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch

from weft.methods.power_sgd.options import NAME, PowerSgdOptions
from weft.sync.base import Group, Meeting, ParameterPlace, SynchroniserOf
from weft.sync.codecs.counter import Key, uniforms
from weft.sync.dense import Dense


class FactoredMatrix(NamedTuple):
    """A parameter sent as factors of `rank` columns: its number in its stage, and its place in the flat."""

    number: int
    start: int
    rows: int
    columns: int
    rank: int

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the matrix in a stage's flat tensor."""
        return flat[self.start : self.start + self.rows * self.columns].view(self.rows, self.columns)


@dataclass(frozen=True, slots=True)
class FactoredStage:
    """The matrices of a stage sent as factors, and the ranges of its flat gradient sent as they are."""

    matrices: tuple[FactoredMatrix, ...]
    others: tuple[slice, ...]

    @classmethod
    def of(cls, places: Sequence[ParameterPlace], options: PowerSgdOptions) -> FactoredStage:
        """Sort a stage's parameters; the first dimension of a matrix counts its rows."""
        matrices, others = [], []
        for number, (start, shape) in enumerate(places):
            rank = options.rank_of(shape[0], prod(shape[1:])) if len(shape) > 1 else 0
            if rank:
                matrices.append(FactoredMatrix(number, start, shape[0], prod(shape[1:]), rank))
            else:
                others.append(slice(start, start + prod(shape)))
        return cls(tuple(matrices), tuple(others))


class PowerSgd(Dense):
    """Sums of gradients by factors of their matrices; all else is summed as it is.

    So are gradients of weights that several stages share, which belong to no stage here.
    """

    def __init__(self, options: PowerSgdOptions) -> None:
        self._options = options
        # By stage, in the order of the matrices: what each rank keeps, and the Q^T that all have.
        self._stages: dict[int, FactoredStage] = {}
        self._errors: dict[int, torch.Tensor] = {}
        self._rights: dict[int, list[torch.Tensor]] = {}

    def lay_out(self, stage: int, places: Sequence[ParameterPlace]) -> None:
        self._stages[stage] = FactoredStage.of(places, self._options)

    def begin(self, stage: int, flat: torch.Tensor) -> None:
        self._errors[stage] = torch.zeros_like(flat)
        self._rights[stage] = [first_right(stage, one).to(flat) for one in self._stages[stage].matrices]

    def tensors(self) -> Mapping[str, torch.Tensor]:
        errors = {f"error/{stage}": error for stage, error in self._errors.items()}
        return errors | {
            f"right/{stage}/{matrix.number}": right
            for stage, rights in self._rights.items()
            for matrix, right in zip(self._stages[stage].matrices, rights, strict=True)
        }

    def reduce(self, gradient: torch.Tensor, meeting: Meeting) -> None:
        if self._sends_factors(meeting):
            self._decode_sum(gradient, gradient, meeting)
        else:
            super().reduce(gradient, meeting)

    def reduce_scatter(self, gradient: torch.Tensor, meeting: Meeting) -> torch.Tensor:
        """Return this rank's share, shape (n / replicas,), of the sum, which every rank decodes whole."""
        if not self._sends_factors(meeting):
            return super().reduce_scatter(gradient, meeting)
        total = torch.zeros_like(gradient)
        self._decode_sum(gradient, total, meeting)
        return total.view(meeting.group.size, -1)[meeting.group.place]

    def _sends_factors(self, meeting: Meeting) -> bool:
        has_matrices = bool(self._rights.get(meeting.stage))
        return has_matrices and meeting.step >= self._options.start_step

    def _decode_sum(self, gradient: torch.Tensor, total: torch.Tensor, meeting: Meeting) -> None:
        """Fill the parameters' places in `total`, which may be `gradient`, and keep the unsent rest.

        If the sum is not finite, the step is wasted and the device keeps the error and Q of before.
        """
        stage, error = self._stages[meeting.stage], self._errors[meeting.stage]
        kept = self._rights[meeting.stage]
        rest = gradient + error
        matrices = [matrix.view(rest) for matrix in stage.matrices]
        lefts = [matrix @ orthonormal(right.T) for matrix, right in zip(matrices, kept, strict=True)]
        sums = _added_up([*lefts, *(rest[one] for one in stage.others)], meeting.group)
        lefts = [orthonormal(left) for left in sums[: len(lefts)]]
        # A product of a wide transposed matrix and a narrow one is many times slower.
        own = [left.T @ matrix for matrix, left in zip(matrices, lefts, strict=True)]
        rights = _added_up(own, meeting.group)
        for one, left, right in zip(stage.matrices, lefts, rights, strict=True):
            torch.mm(left, right, out=one.view(total))
        for matrix, left, right in zip(matrices, lefts, own, strict=True):
            matrix.addmm_(left, right, alpha=-1.0)
        for other, summed in zip(stage.others, sums[len(lefts) :], strict=True):
            total[other] = summed
            rest[other] = 0.0
        finite = torch.stack(total.aminmax()).isfinite().all()
        for before, after in zip((error, *kept), (rest, *rights), strict=True):
            torch.where(finite, after, before, out=before)


def first_right(stage: int, matrix: FactoredMatrix) -> torch.Tensor:
    """Return the Q^T of a matrix before its first step, shape (rank, columns), in fp32; the same in all jobs.

    Tensor ranks that hold the same matrix have the same Q.
    """
    key = Key.of(0, NAME, stage, matrix.number)
    return uniforms(key, 0, matrix.rank * matrix.columns, "cpu").view(matrix.rank, matrix.columns) - 0.5


def orthonormal(factor: torch.Tensor) -> torch.Tensor:
    """Return an orthonormal basis of the columns of `factor`, shape (n, rank), by reflections.

    Columns that are zero, or depend on each other, get other directions.
    """
    basis: torch.Tensor = torch.linalg.qr(factor).Q
    return basis


def _added_up(addends: Sequence[torch.Tensor], group: Group) -> list[torch.Tensor]:
    """Return the sums of tensors over the group, which travel in one message.

    Each gets memory of its own: the roundings of products depend on where in a message a factor begins.
    """
    lengths = [one.numel() for one in addends]
    padding = -sum(lengths) % group.size
    message = torch.cat([*(one.reshape(-1) for one in addends), addends[0].new_zeros(padding)])
    group.add_up(message)
    parts = message.split([*lengths, padding])
    return [part.clone().view_as(one) for part, one in zip(parts, addends, strict=False)]


PARTS = (SynchroniserOf(name=NAME, make=PowerSgd),)
