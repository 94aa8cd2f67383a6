"""What methods add to the runtime of a rank: handlers of their kinds, and state from step to step.

A method names these among the `PARTS` of its runtime module (`weft.bundles`). The runtime knows what a
`MethodState` is asked for, and no method.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from weft.bundles import runtime_parts
from weft.describe.plan import Plan
from weft.program.rank_program import RankProgram
from weft.run.stage.roots import Root
from weft.run.stage.taps import Tap
from weft.run.streams import Value
from weft.run.transport.mesh import Groups

if TYPE_CHECKING:
    from weft.run.handlers.base import Handler
    from weft.run.resources import Resources
    from weft.run.workspace import Workspace


@dataclass(frozen=True, kw_only=True)
class HandlerOf:
    """How a kind of instruction is executed."""

    kind: str
    handler: Handler


@dataclass(frozen=True, slots=True)
class OwnGradient:
    """Flat gradients of one stage on one rank: what it steps, and what it answers for among all ranks.

    Every element of the whole gradient is counted by one rank.
    """

    stepped: tuple[torch.Tensor, ...] = ()
    counted: tuple[torch.Tensor, ...] = ()


class StepGate(Protocol):
    """What a method has a stage's optimizer step wait for, and does about it."""

    def reads(self) -> tuple[Value[Any], ...]:
        """Return the values that the step follows; asked when it is issued."""
        ...

    def admits(self, *values: Value[Any]) -> bool:
        """Return whether to step; asked when these values are there."""
        ...

    def stepped(self) -> None:
        """What comes after the step, also after one that was left out."""
        ...


@dataclass(frozen=True, kw_only=True)
class Making:
    """What a method's state is made from, on one rank; `settings` are the job's for this method."""

    plan: Plan
    program: RankProgram
    stages: Mapping[int, nn.Module]
    groups: Groups
    device: torch.device
    settings: Mapping[str, Any] = field(default_factory=dict)


class MethodState:
    """What a method keeps on one rank from step to step; each method says what it needs of this."""

    def apart(self, stage: int) -> tuple[nn.Parameter, ...]:
        """Parameters of a stage whose gradients the method keeps itself."""
        return ()

    def own_gradient(self, stage: int) -> OwnGradient:
        """Return the gradients of those parameters."""
        return OwnGradient()

    def begin(self, resources: Resources) -> None:
        """See what else the rank keeps; called once, when all of it is there."""

    def gate(self, workspace: Workspace, stage: int) -> StepGate | None:
        """What the steps of a stage wait for; None where they wait for nothing of the method's."""
        return None

    def figures(self, workspace: Workspace) -> Mapping[str, Value[torch.Tensor]]:
        """Return numbers of the step under way, by name, for the run's metrics."""
        return {}

    def series(self, workspace: Workspace) -> Mapping[str, Value[torch.Tensor]]:
        """Return rows of numbers of the step under way, by name, which the host reads a step later."""
        return {}

    def taps(self, stage: int) -> Sequence[Tap]:
        """What the method sees of micro-batches in a stage; asked once, after `begin`."""
        return ()

    def roots(self, stage: int) -> Sequence[Root]:
        """What the backward passes of a stage start from beside its output; asked once, after `begin`."""
        return ()

    def shares(self, workspace: Workspace) -> Mapping[str, float]:
        """Numbers of the step that ends, by name: what those of all ranks add up to is told of the step.

        Every rank of a program gives the same names, 0 where it has nothing of it. May wait for values.
        """
        return {}

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """What a checkpoint keeps of it, by name; loading fills the same tensors."""
        return {}

    def rank_tensors(self) -> Mapping[str, torch.Tensor]:
        """What a checkpoint keeps of it for this rank alone, where it goes on under the same plan."""
        return {}

    def agreed(
        self, own: Mapping[str, torch.Tensor], parameters: Mapping[str, str]
    ) -> Mapping[str, torch.Tensor]:
        """What stands for all replicas in place of a rank's own weights and optimizer states, by name.

        Every rank calls it between two steps. Where it gives something else than `own`, replicas differ.
        `parameters` are by name of a tensor the parameter that it is, or is a state of.
        """
        return own

    def settled(self) -> AbstractContextManager[None]:
        """Return a block in which the weights are those that stand for all replicas; every rank enters it."""
        return nullcontext()

    def rebase(self) -> None:
        """Begin anew from the weights that have been loaded, which no step of this state has made."""


@dataclass(frozen=True, kw_only=True)
class StateOf:
    """Makes the state of a method, where a program owes it something."""

    method: str
    make: Callable[[Making], MethodState]


def states_of(making: Making, settings: Mapping[str, Mapping[str, Any]]) -> dict[str, MethodState]:
    """Return the states of the methods that a program owes something, by name."""
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
