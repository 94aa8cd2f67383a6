"""The parts that methods add to a rank's runtime: handlers of their kinds, and state from step to step.

A method lists these in the `PARTS` of its runtime module (`weft.bundles`). The runtime knows the interface
`MethodState`, and no single method.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import nn

from weft.bundles import runtime_parts
from weft.describe.plan import Plan
from weft.program.arrays import Ints
from weft.program.rank_program import RankProgram
from weft.run.stage.roots import Root
from weft.run.stage.taps import Tap
from weft.run.streams import Completion, Value
from weft.run.transport.mesh import Groups

if TYPE_CHECKING:
    from weft.planning.planned_job import PlannedJob
    from weft.run.handlers.base import Handler
    from weft.run.resources import Resources
    from weft.run.stage.stage_pass import StagePass
    from weft.run.workspace import Batch, Workspace


@dataclass(frozen=True, kw_only=True)
class HandlerOf:
    """A kind of instruction and its handler."""

    kind: str
    handler: Handler


@dataclass(frozen=True, slots=True)
class OwnGradient:
    """Flat gradients of one stage on one rank: those it steps, and those it counts for all ranks.

    Exactly one rank counts each element of the whole gradient.
    """

    stepped: tuple[torch.Tensor, ...] = ()
    counted: tuple[torch.Tensor, ...] = ()


class StepGate(Protocol):
    """A method's condition on the optimizer step of a stage."""

    def reads(self) -> tuple[Value[Any], ...]:
        """Return the values that the step waits for; called when the step is issued."""
        ...

    def votes(self, *values: Value[Any]) -> torch.Tensor | None:
        """Return 1 to leave the step out, else 0; None stands for 0. Called when the values are there.

        The vote has shape () and type fp32, and is on the device of the gradient.
        """
        ...

    def stepped(self) -> None:
        """Finish the method's work after the step, even if the step was left out."""
        ...


@dataclass(frozen=True, kw_only=True)
class Making:
    """The inputs of a method's state on one rank; `settings` are the job's settings of this method."""

    plan: Plan
    program: RankProgram
    stages: Mapping[int, nn.Module]
    groups: Groups
    device: torch.device
    settings: Mapping[str, Any] = field(default_factory=dict)


class PartOfSum(NamedTuple):
    """A rank's share of a number of a step: the sum of values of one element, times a weight."""

    values: tuple[Value[torch.Tensor], ...]
    weight: float = 1.0

    def read(self) -> float:
        """Return the share; call it when the values are there."""
        return self.weight * sum((value.content.item() for value in self.values), 0.0)


class Counter(Protocol):
    """Metrics of held-out micro-batches, added up by the loss function in some passes only."""

    @property
    def counted(self) -> tuple[dict[str, float], int]:
        """The sums of this rank so far, and the number of micro-batches."""
        ...

    def go_on(self, sums: Mapping[str, float], micro_batches: int) -> None:
        """Take up what was `counted` before."""
        ...

    def counting(self) -> AbstractContextManager[None]:
        """Count until the end of the block, on top of what is counted."""
        ...


class EvaluationBeside(Protocol):
    """Evaluations of held-out batches whose passes are instructions of training steps.

    Attributes:
        steps: of one evaluation.
        begun: the number of steps before the evaluation that is under way; None: there is none.
    """

    steps: int
    begun: int | None

    def prepare(self, batches: Sequence[Batch], counter: Counter) -> None:
        """Take the batches of all evaluations; called once, before the first step and after a resume."""
        ...

    def start(self, done: int) -> None:
        """Evaluate the weights after so many steps in the next `steps` steps; every rank calls it."""
        ...

    def take_shares(self) -> list[float]:
        """End the evaluation and return this rank's share of the loss of each batch."""
        ...


class CopyBeside(Protocol):
    """Copies of weights and optimizer states for a checkpoint, as instructions of the step behind it."""

    def take(
        self, tensors: Mapping[str, torch.Tensor], room: Mapping[str, torch.Tensor]
    ) -> Mapping[str, torch.Tensor]:
        """Copy tensors to their `room` in the next step, before they change; return those that it leaves."""
        ...

    def copied(self) -> list[Completion]:
        """Return the ends of the copies; called once, after that step was issued."""
        ...


class MethodState:
    """A method's state on one rank, kept from step to step; a method overrides the functions it needs."""

    def apart(self, stage: int) -> tuple[nn.Parameter, ...]:
        """Return the parameters of a stage with gradients that the method keeps itself."""
        return ()

    def counted_elsewhere(self, stage: int) -> tuple[nn.Parameter, ...]:
        """Return the parameters of a stage with gradients that another stage counts, too."""
        return ()

    def own_gradient(self, stage: int) -> OwnGradient:
        """Return the gradients of those parameters."""
        return OwnGradient()

    def begin(self, resources: Resources) -> None:
        """Take what the method needs of the rank's resources; called once, when they are complete."""

    def take_sources(self, sources_in: Callable[[int], Ints]) -> None:
        """Take the sources of the data; every rank calls it before its first step of a run.

        Args:
            sources_in: from a step to the sources of its samples, in the order of the batch.
        """

    def gate(self, workspace: Workspace, stage: int) -> StepGate | None:
        """Return the condition on the steps of a stage; None if the method has none."""
        return None

    def loss_factor(self) -> float | torch.Tensor:
        """Return the factor of all losses in the gradients of the next backward passes.

        If the device decides it, it is a tensor of shape (). The method divides the gradient by it before
        the optimizer steps. Called when the passes run.
        """
        return 1.0

    def figures(self, workspace: Workspace) -> Mapping[str, Value[torch.Tensor]]:
        """Return numbers of the current step, by name, for the run's metrics."""
        return {}

    def require(self, figures: Mapping[str, float]) -> None:
        """Check the figures of a step when the host has read them, maybe a step later.

        Raises:
            RunError: if the training cannot go on from the step.
        """

    def series(self, workspace: Workspace) -> Mapping[str, Value[torch.Tensor]]:
        """Return rows of numbers of the current step, by name; the host reads them a step later."""
        return {}

    def taps(self, stage: int) -> Sequence[Tap]:
        """Return the method's taps on a stage's micro-batches; called once, after `begin`."""
        return ()

    def roots(self, stage: int) -> Sequence[Root]:
        """Return the roots of a stage's backward passes besides its output; called once, after `begin`."""
        return ()

    def around_forward(self, stage: int, micro_batch: int, run: StagePass) -> StagePass:
        """Return the forward pass of a micro-batch in training, with the method's work around it."""
        return run

    def shares(self, workspace: Workspace) -> Mapping[str, PartOfSum]:
        """Return this rank's shares of numbers of the ending step, by name; all ranks' shares are added up.

        Every rank of a program returns the same names; a share of no values is 0.
        """
        return {}

    @property
    def evaluation(self) -> EvaluationBeside | None:
        """The evaluations that the method runs beside training steps; None: it runs none."""
        return None

    @property
    def checkpoint_copies(self) -> CopyBeside | None:
        """The copies for checkpoints that the method makes beside training steps; None: it makes none."""
        return None

    def moves_after(self, done: int) -> bool:
        """Return whether `move` may move weights between ranks after so many steps, or tells of it."""
        return False

    def move(self, done: int, job: PlannedJob) -> Mapping[str, Any] | None:
        """Move weights and their states between ranks if the job's predictions say that it pays.

        Every rank calls it between two steps. It returns an event to tell, or None.
        """
        return None

    def take_in(self, *, away: bool) -> None:
        """Let in replicas that were away between two steps; every rank calls it. `away`: this one was."""

    def returned(self, away_since: Mapping[int, int], step: int) -> Mapping[str, Any] | None:
        """Return the event of replicas that are back before a step, by the first steps of their absences."""
        return None

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Return the tensors that a checkpoint keeps, by name; loading fills the same tensors."""
        return {}

    def rank_tensors(self) -> Mapping[str, torch.Tensor]:
        """Return the tensors that a checkpoint keeps for this rank alone; a resume needs the same plan."""
        return {}

    def agreed(
        self, own: Mapping[str, torch.Tensor], parameters: Mapping[str, str]
    ) -> Mapping[str, torch.Tensor]:
        """Return the weights and optimizer states that stand for all replicas, by name, instead of `own`.

        Every rank calls it between two steps. If the result differs from `own`, replicas differ. `parameters`
        maps a tensor's name to its parameter: the tensor itself, or the one it is a state of.
        """
        return own

    def watching(self) -> AbstractContextManager[Callable[[], Mapping[str, Any]]]:
        """Enter a block of evaluation; the function returns what its passes showed, as JSON values by name.

        Every rank enters it, and calls the function after the block.
        """
        return nullcontext(dict)

    def settled(self) -> AbstractContextManager[None]:
        """Enter a block where the weights are those that stand for all replicas; every rank enters it."""
        return nullcontext()

    def resume(self) -> None:
        """Go on from the rank's own tensors, which were loaded."""

    def rebase(self) -> None:
        """Restart from weights that were loaded and that no step of this state has made."""


@dataclass(frozen=True, kw_only=True)
class StateOf:
    """A maker of a method's state, for programs that have obligations to the method."""

    method: str
    make: Callable[[Making], MethodState]


def states_of(making: Making, settings: Mapping[str, Mapping[str, Any]]) -> dict[str, MethodState]:
    """Return, by name, the states of the methods to which a program has obligations."""
    owed = making.program.obligations.methods
    return {
        one.method: one.make(
            Making(
                plan=making.plan,
                program=making.program,
                stages=making.stages,
                groups=making.groups,
                device=making.device,
                settings=settings.get(one.method, {}),
            )
        )
        for one in runtime_parts(StateOf)
        if one.method in owed
    }
