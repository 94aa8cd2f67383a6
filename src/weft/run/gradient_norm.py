"""`GradientNorm`: the norm of a step's whole gradient, and what follows from it.

Every element of the gradient is counted by one rank: where replicas all hold the summed gradient of a stage,
each counts its equal share of it. All ranks get the same number, so that they all clip alike, or all leave
the step out. With a limit the gradient is scaled to it where its norm is larger (Pascanu et al., On the
difficulty of training recurrent neural networks, arXiv 1211.5063).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from weft.errors import RunError
from weft.sync.base import Group
from weft.sync.collectives import PIECE_ELEMENTS

# Added to the norm by torch's own clipping, so that both scale alike.
EPSILON = 1e-6


@dataclass(frozen=True, slots=True)
class OwnGradient:
    """Flat gradients of one stage on one rank: what it steps, and what it answers for in the norm."""

    stepped: tuple[torch.Tensor, ...]
    counted: tuple[torch.Tensor, ...]


class GradientNorm:
    """The norm on one rank.

    Args:
        gradients: by stage.
        clip_norm: the largest norm to step with; None steps with any.
        skip_non_finite: leave out a step whose gradient is not finite, instead of failing.
    """

    def __init__(
        self, gradients: Mapping[int, OwnGradient], *, clip_norm: float | None, skip_non_finite: bool
    ) -> None:
        self._gradients = gradients
        self._clip_norm = clip_norm
        self._skips = skip_non_finite

    def take(self, group: Group) -> torch.Tensor:
        """The norm, shape (1,), in fp64; every rank of the group calls it."""
        device = next((flat.device for one in self._gradients.values() for flat in one.stepped), None)
        squares = torch.zeros(1, dtype=torch.float64, device=device)
        for one in self._gradients.values():
            for flat in one.counted:
                for piece in flat.split(PIECE_ELEMENTS):
                    wide = piece.double()
                    squares += torch.dot(wide, wide)
        if group.size > 1:
            group.all_reduce(squares)
        return squares.sqrt_()

    def clip(self, stage: int, norm: float) -> bool:
        """Scale what this rank steps of a stage down to the limit, where the norm is larger.

        Returns:
            Whether to step with it.

        Raises:
            RunError: when the norm is not finite and such steps are not left out.
        """
        if not math.isfinite(norm):
            if self._skips:
                return False
            raise RunError(
                f"the norm of the gradient is {norm}; try a lower optimizer.learning_rate, "
                "or optimizer.skip_non_finite = true"
            )
        scale = 1.0 if self._clip_norm is None else self._clip_norm / (norm + EPSILON)
        if scale < 1.0:
            for flat in self._gradients[stage].stepped:
                flat.mul_(scale)
        return True
