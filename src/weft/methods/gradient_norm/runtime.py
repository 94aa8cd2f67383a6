"""`GradientNorm`: the norm of a step's whole gradient, and the clipping or skipping of the step.

One rank counts each element of the gradient. If all replicas hold a stage's summed gradient, each counts an
equal share of it. All ranks get the same number, so all of them clip alike, or all of them skip the step. If
replicas step by themselves, all this holds for the ranks of each replica. A
gradient with a norm above the limit is scaled to the limit (Pascanu et al., On the difficulty of training
recurrent neural networks, arXiv 1211.5063).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from weft.describe.plan import SCALED
from weft.describe.synchronisation import keeps_gradients_local
from weft.errors import RunError
from weft.methods.gradient_norm.program import NAME
from weft.program.program import NONE, Instruction
from weft.program.rank_program import RankProgram
from weft.run.handlers.base import GRADIENT, Issue
from weft.run.methods import HandlerOf, Making, MethodState, OwnGradient, PartOfSum, StateOf, StepGate
from weft.run.resources import Resources, groups_of_stages, share_of
from weft.run.state.loss_scale import LEAST, LossScale
from weft.run.state.whole_sums import needs_of
from weft.run.streams import Completion, Stream, Value
from weft.run.transport.rank_order import PIECE_ELEMENTS
from weft.run.workspace import Workspace
from weft.sync.base import Group

# The norm of all stages, shape (1,).
NORM = "gradient_norm"
# In fp16 only: the factor of the losses in the step, shape (), and the state of the factor behind the step.
LOSS_SCALE, NEXT_SCALE = "loss_scale", "next_loss_scale"
# torch's own clipping adds it to the norm, too, so both scale alike.
EPSILON = 1e-6


class GradientNorm(MethodState):
    """The norm on one rank.

    Args:
        clip_norm: the largest norm of a step; None allows any.
        skip_non_finite: skip a step if its gradient is not finite, instead of failing.
        gradients: the gradients of the rank's stages, if they are known already.
        scale: the factor of the losses; None for 1.
        replica_weight: for a replica that steps by itself, this rank's weight in the mean of all replicas'
            norms. Such a replica skips steps that are not finite, and never fails.
    """

    def __init__(
        self,
        *,
        clip_norm: float | None,
        skip_non_finite: bool,
        gradients: Mapping[int, OwnGradient] | None = None,
        scale: LossScale | None = None,
        replica_weight: float | None = None,
    ) -> None:
        self._gradients: Mapping[int, OwnGradient] = gradients or {}
        self._clip_norm = clip_norm
        self._skips = skip_non_finite
        self._scale = scale
        self._replica_weight = replica_weight
        # The last step that took the norm; a replica may rest in others.
        self.taken_in = -1
        # The stages whose optimizers step with a gradient of norm 1.
        self._unit: frozenset[int] = frozenset()

    @classmethod
    def of(cls, making: Making) -> GradientNorm:
        settings = making.settings
        return cls(
            clip_norm=settings.get("clip_norm"),
            skip_non_finite=settings.get("skip_non_finite", False),
            scale=LossScale(making.device) if making.plan.precision in SCALED else None,
            replica_weight=_replica_weight(making.program)
            if keeps_gradients_local(making.plan.sync)
            else None,
        )

    @property
    def names(self) -> tuple[str, ...]:
        """The names of a step's numbers."""
        return (NORM,) if self._scale is None else (NORM, LOSS_SCALE, NEXT_SCALE)

    def numbers(self, group: Group) -> tuple[torch.Tensor, ...]:
        """Return the numbers of a step, in the order of `names`; every rank of the group must call it."""
        norm = self.take(group)
        if self._scale is None:
            return (norm,)
        # A copy, which the host reads when the next step may have begun.
        return norm, self._scale.factor.clone(), self._scale.after(norm)

    def begin(self, resources: Resources) -> None:
        self._gradients = resources.own_gradients
        self._unit = frozenset(
            stage for stage, one in resources.optimizers.items() if needs_of(one).unit_gradient
        )

    def gate(self, workspace: Workspace, stage: int) -> StepGate:
        return _Clipping(self, workspace, stage)

    def loss_factor(self) -> float | torch.Tensor:
        return 1.0 if self._scale is None else self._scale.factor

    def tensors(self) -> Mapping[str, torch.Tensor]:
        return {} if self._scale is None else {LOSS_SCALE: self._scale.state}

    def figures(self, workspace: Workspace) -> Mapping[str, Value[torch.Tensor]]:
        return self._known(workspace, NORM, LOSS_SCALE) if self._replica_weight is None else {}

    def shares(self, workspace: Workspace) -> Mapping[str, PartOfSum]:
        """Return the share of a rank in the mean norm of replicas that step by themselves."""
        if self._replica_weight is None or not workspace.training:
            return {}
        weight = self._replica_weight / workspace.step_share
        return {NORM: PartOfSum(tuple(self._known(workspace, NORM).values()), weight)}

    def _known(self, workspace: Workspace, *names: str) -> Mapping[str, Value[torch.Tensor]]:
        if self.taken_in != workspace.step:
            return {}
        known = {name: workspace.values.get((name, NONE, NONE)) for name in names}
        return {name: value for name, value in known.items() if value is not None}

    def require(self, figures: Mapping[str, float]) -> None:
        """Check that the norm is finite, unless such steps are skipped or the factor can still fall."""
        norm = figures.get(NORM, 0.0)
        if not math.isfinite(norm) and not self._skips and figures.get(LOSS_SCALE, LEAST) == LEAST:
            raise RunError(
                f"the norm of the gradient is {norm}; try a lower optimizer.learning_rate, "
                "or optimizer.skip_non_finite = true"
            )

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

    def vote(
        self,
        stage: int,
        norm: torch.Tensor,
        factor: torch.Tensor | None = None,
        next_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return 1 if the norm is not finite, else 0, shape (); clip this rank's gradient of a stage.

        In fp16, divide the gradient by the factor of the losses, too, and set that of the next step. Every
        stage of a rank sets the same one. The host reads no number.
        """
        number = norm.squeeze()
        self.clip(stage, number, factor)
        if self._scale is not None and next_scale is not None:
            self._scale.state.copy_(next_scale)
        return number.isfinite().logical_not().float()

    def clip(self, stage: int, norm: torch.Tensor, factor: torch.Tensor | None = None) -> None:
        """Scale this rank's gradient of a stage down to the limit, if the norm is larger; or to norm 1.

        Args:
            norm: the norm of the whole gradient, shape (), in fp64.
            factor: that of the losses, shape (); the gradient is divided by it. None for 1.
        """
        if stage in self._unit:
            # A gradient of zeros stays one.
            scale = torch.where(norm > 0, 1.0 / norm, 1.0)
        elif self._clip_norm is None and factor is None:
            return
        else:
            limit = math.inf if self._clip_norm is None else self._clip_norm
            scale = (limit / (norm + EPSILON)).clamp(max=1.0)
        if factor is not None:
            scale = scale / factor
        # Whoever reads the number of an accelerator waits for it. A CPU saves a pass over the gradient.
        elif scale.device.type == "cpu" and scale.item() == 1.0:
            return
        for flat in self._gradients[stage].stepped:
            flat.mul_(scale)


def _replica_weight(program: RankProgram) -> float:
    """Return the replica's share of the batch, divided by its ranks that take the norm; 0 for other ranks."""
    of_stages = groups_of_stages(program, "norm").items()
    weights = [share_of(program, stage) / len(program.groups[group]) for stage, group in of_stages]
    return weights[0] if weights else 0.0


class _Clipping:
    """The gate of a step: it waits for the norm, and votes against the step if that is not finite."""

    def __init__(self, norm: GradientNorm, workspace: Workspace, stage: int) -> None:
        self._norm, self._workspace, self._stage = norm, workspace, stage

    def reads(self) -> tuple[Value[torch.Tensor], ...]:
        return tuple(self._workspace.latest(name, NONE) for name in self._norm.names)

    def votes(self, *values: Value[Any]) -> torch.Tensor:
        return self._norm.vote(self._stage, *(value.content for value in values))

    def stepped(self) -> None:
        """Do nothing: the step clears the gradient."""


def norm(workspace: Workspace, instruction: Instruction) -> Issue:
    """Take the norm of the whole gradient."""
    label, resources = str(instruction), workspace.resources
    state, group = resources.methods[NAME], resources.groups.collective[instruction.group]
    assert isinstance(state, GradientNorm)

    def issue(stream: Stream) -> Completion:
        state.taken_in = workspace.step
        made: dict[str, Value[torch.Tensor]] = {name: Value() for name in state.names}

        def work() -> None:
            for value, number in zip(made.values(), state.numbers(group), strict=True):
                value.content = number

        gradients = (workspace.latest(GRADIENT, stage) for stage in resources.stages)
        ended = stream.run(label, work, *gradients)
        for name, value in made.items():
            value.completion = ended
            workspace.values[name, NONE, NONE] = value
        return ended

    return issue


PARTS = (HandlerOf(kind="norm", handler=norm), StateOf(method=NAME, make=GradientNorm.of))
