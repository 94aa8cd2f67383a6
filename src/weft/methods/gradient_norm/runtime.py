"""`GradientNorm`: the norm of a step's whole gradient, and the clipping or skipping of the step.

One rank counts each element of the gradient. If all replicas hold a stage's summed gradient, each counts an
equal share of it. All ranks get the same number, so all of them clip alike, or all of them skip the step. A
gradient with a norm above the limit is scaled to the limit (Pascanu et al., On the difficulty of training
recurrent neural networks, arXiv 1211.5063).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from weft.describe.plan import SCALED
from weft.errors import RunError
from weft.methods.gradient_norm.program import NAME
from weft.program.program import NONE, Instruction
from weft.run.handlers.base import GRADIENT, Issue
from weft.run.methods import HandlerOf, Making, MethodState, OwnGradient, StateOf, StepGate
from weft.run.resources import Resources
from weft.run.state.loss_scale import LEAST, LossScale
from weft.run.streams import Completion, Stream, Value
from weft.run.transport.rank_order import PIECE_ELEMENTS
from weft.run.workspace import Workspace
from weft.sync.base import Group

# The norm of all stages, shape (1,).
NORM = "gradient_norm"
# torch's own clipping adds it to the norm, too, so both scale alike.
EPSILON = 1e-6


class GradientNorm(MethodState):
    """The norm on one rank.

    Args:
        clip_norm: the largest norm of a step; None allows any.
        skip_non_finite: skip a step if its gradient is not finite, instead of failing.
        gradients: the gradients of the rank's stages, if they are known already.
        scale: the factor of the losses; None for 1.
    """

    def __init__(
        self,
        *,
        clip_norm: float | None,
        skip_non_finite: bool,
        gradients: Mapping[int, OwnGradient] | None = None,
        scale: LossScale | None = None,
    ) -> None:
        self._gradients: Mapping[int, OwnGradient] = gradients or {}
        self._clip_norm = clip_norm
        self._skips = skip_non_finite
        self._scale = scale

    @classmethod
    def of(cls, making: Making) -> GradientNorm:
        settings = making.settings
        return cls(
            clip_norm=settings.get("clip_norm"),
            skip_non_finite=settings.get("skip_non_finite", False),
            scale=LossScale() if making.plan.precision in SCALED else None,
        )

    def begin(self, resources: Resources) -> None:
        self._gradients = resources.own_gradients

    def gate(self, workspace: Workspace, stage: int) -> StepGate:
        return _Clipping(self, workspace, stage)

    def loss_factor(self) -> float:
        return 1.0 if self._scale is None else self._scale.factor

    def tensors(self) -> Mapping[str, torch.Tensor]:
        return {} if self._scale is None else {"loss_scale": self._scale.state}

    def figures(self, workspace: Workspace) -> Mapping[str, Value[torch.Tensor]]:
        norm = workspace.values.get((NORM, NONE, NONE))
        return {} if norm is None else {NORM: norm}

    def take(self, group: Group) -> torch.Tensor:
        """Return the norm, shape (1,), in fp64; every rank of the group must call it."""
        device = next((flat.device for one in self._gradients.values() for flat in one.stepped), None)
        squares = torch.zeros(1, dtype=torch.float64, device=device)
        for one in self._gradients.values():
            for flat in one.counted:
                for piece in flat.split(PIECE_ELEMENTS):
                    wide = piece.double()
                    squares += torch.dot(wide, wide)
        if group.size > 1:
            group.all_reduce(squares)
        return squares.sqrt_().div_(self.loss_factor())

    def admits(self, stage: int, norm: Value[torch.Tensor]) -> bool:
        """Undo the factor of the losses and clip this rank's gradient of a stage; see `clip`."""
        number = norm.content.item()
        if self._scale is None:
            return self.clip(stage, number)
        finite = math.isfinite(number)
        factor = self._scale.settle(norm, finite=finite)
        return (finite or factor == LEAST) and self.clip(stage, number, factor)

    def clip(self, stage: int, norm: float, factor: float = 1.0) -> bool:
        """Scale this rank's gradient of a stage down to the limit, if the norm is larger.

        Args:
            norm: the norm of the whole gradient.
            factor: that of the losses; the gradient is divided by it.

        Returns:
            True if the stage may step.

        Raises:
            RunError: if the norm is not finite, and such steps are not skipped.
        """
        if not math.isfinite(norm):
            if self._skips:
                return False
            raise RunError(
                f"the norm of the gradient is {norm}; try a lower optimizer.learning_rate, "
                "or optimizer.skip_non_finite = true"
            )
        scale = 1.0 if self._clip_norm is None else self._clip_norm / (norm + EPSILON)
        scale = min(scale, 1.0) / factor
        if scale != 1.0:
            for flat in self._gradients[stage].stepped:
                flat.mul_(scale)
        return True


class _Clipping:
    """The gate of a step: it waits for the norm, and skips the step if the norm is not finite."""

    def __init__(self, norm: GradientNorm, workspace: Workspace, stage: int) -> None:
        self._norm, self._workspace, self._stage = norm, workspace, stage

    def reads(self) -> tuple[Value[torch.Tensor], ...]:
        return (self._workspace.latest(NORM, NONE),)

    def admits(self, *values: Value[Any]) -> bool:
        (norm,) = values
        return self._norm.admits(self._stage, norm)

    def stepped(self) -> None:
        """Do nothing: the step clears the gradient."""


def norm(workspace: Workspace, instruction: Instruction) -> Issue:
    """Take the norm of the whole gradient."""
    label, resources = str(instruction), workspace.resources
    state, group = resources.methods[NAME], resources.groups.collective[instruction.group]
    assert isinstance(state, GradientNorm)

    def issue(stream: Stream) -> Completion:
        value = workspace.values[NORM, NONE, NONE] = Value()

        def work() -> None:
            value.content = state.take(group)

        gradients = (workspace.latest(GRADIENT, stage) for stage in resources.stages)
        value.completion = stream.run(label, work, *gradients)
        return value.completion

    return issue


PARTS = (HandlerOf(kind="norm", handler=norm), StateOf(method=NAME, make=GradientNorm.of))
