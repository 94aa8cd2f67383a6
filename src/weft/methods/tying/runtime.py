"""A rank's copies of weights that several stages use.

Each copy collects the gradients of its own stage. Before the stages step, the gradients of all copies on all
ranks are added up. So all copies step with the same gradient and stay equal bit by bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import nn

from weft.errors import InputError, Violation
from weft.methods.tying.kinds import REDUCE_TIED, TiesStages
from weft.methods.tying.program import NAME
from weft.program.program import NONE, Instruction
from weft.run.handlers.base import GRADIENT, Issue
from weft.run.methods import HandlerOf, Making, MethodState, OwnGradient, StateOf, StepGate
from weft.run.streams import Completion, Stream, Value
from weft.run.workspace import Workspace
from weft.sync.base import Group, Meeting, Synchroniser


@runtime_checkable
class TiedStage(Protocol):
    """A stage with copies of other stages' weights."""

    def tied_parameters(self) -> tuple[nn.Parameter, ...]:
        """Return the stage's copies, in the order of the program's tied weights."""
        ...


class TiedGradient:
    """The gradients of one tied weight on one rank, flat; `.grad` of each copy is a view of its own gradient.

    Args:
        copies: this rank's copies by stage.
        holders: the number of ranks with copies; the gradient is padded so that they can shard it equally.
        leads: True if this rank is the first of them.
    """

    def __init__(self, copies: Mapping[int, nn.Parameter], holders: int, *, leads: bool) -> None:
        self.copies = dict(copies)
        self.leads = leads
        self._flat: dict[int, torch.Tensor] = {}
        for stage, copy in copies.items():
            length = -(-copy.numel() // holders) * holders
            flat = torch.zeros(length, dtype=copy.dtype, device=copy.device)
            copy.grad = flat[: copy.numel()].view_as(copy)
            self._flat[stage] = flat

    @property
    def stages(self) -> tuple[int, ...]:
        return tuple(self.copies)

    def gradient(self, stage: int) -> torch.Tensor:
        """Return the gradient of the copy of `stage`, flat, with zeros after the weight's elements."""
        return self._flat[stage]

    def equalise(self, group: Group, source: int) -> None:
        """Give all copies the values of the first copy on rank `source`."""
        first, *others = self.copies.values()
        group.broadcast(first.detach(), source)
        for copy in others:
            copy.detach().copy_(first.detach())

    def reduce(self, synchroniser: Synchroniser, meeting: Meeting) -> None:
        """Make every copy's gradient the sum of all, on every rank of the meeting."""
        total, *others = self._flat.values()
        for gradient in others:
            total += gradient
        if meeting.group.size > 1:
            synchroniser.reduce(total, meeting)
        for gradient in others:
            gradient.copy_(total)

    def clear(self, stage: int) -> None:
        self._flat[stage].zero_()


def copies_of(
    tied: tuple[tuple[int, ...], ...], part: int, stages: Mapping[int, nn.Module]
) -> dict[int, nn.Parameter]:
    """Return a rank's copies of tied weight `part` by stage; `tied` has the stages of every tied weight.

    Raises:
        InputError: if a stage of the rank has another number of tied parameters than the program gives it.
    """
    copies = {}
    for stage in (stage for stage in tied[part] if stage in stages):
        module = stages[stage]
        own = [other for other, holders in enumerate(tied) if stage in holders]
        parameters = module.tied_parameters() if isinstance(module, TiedStage) else ()
        if len(parameters) != len(own):
            problem = f"has {len(parameters)} tied parameters, the program gives it {len(own)}"
            raise InputError(Violation(f"stage {stage}", problem))
        copies[stage] = parameters[own.index(part)]
    return copies


class TiedState(MethodState):
    """The tied weights of a rank's stages, by the `part` of their reductions; all copies start equal."""

    def __init__(self, making: Making) -> None:
        program, groups, columns = making.program, making.groups, making.program.columns
        owed = program.obligations.methods[NAME]
        assert isinstance(owed, TiesStages)
        self.tied: dict[int, TiedGradient] = {}
        for row in np.flatnonzero(columns.kind == REDUCE_TIED).tolist():
            part, group = int(columns.part[row]), int(columns.group[row])
            members = program.groups[group]
            copies = copies_of(owed.stages, part, making.stages)
            self.tied[part] = TiedGradient(copies, len(members), leads=members[0] == groups.rank)
            self.tied[part].equalise(groups.collective[group], members[0])

    def _of(self, stage: int) -> list[TiedGradient]:
        return [one for one in self.tied.values() if stage in one.copies]

    def apart(self, stage: int) -> tuple[nn.Parameter, ...]:
        return tuple(one.copies[stage] for one in self._of(stage))

    def own_gradient(self, stage: int) -> OwnGradient:
        """Return the gradients of a stage's copies; of each weight, the first holder's first copy counts."""
        copies = self._of(stage)
        counted = (one.gradient(stage) for one in copies if one.leads and one.stages[0] == stage)
        return OwnGradient(tuple(one.gradient(stage) for one in copies), tuple(counted))

    def gate(self, workspace: Workspace, stage: int) -> StepGate | None:
        copies = self._of(stage)
        return _Clearing(copies, stage) if copies else None


class _Clearing:
    """The gate that clears a stage's copies; it awaits nothing, because steps follow the reduction anyway."""

    def __init__(self, copies: list[TiedGradient], stage: int) -> None:
        self._copies, self._stage = copies, stage

    def reads(self) -> tuple[Value[Any], ...]:
        return ()

    def votes(self, *values: Value[Any]) -> None:
        """Admit every step."""

    def stepped(self) -> None:
        for one in self._copies:
            one.clear(self._stage)


def reduce_tied(workspace: Workspace, instruction: Instruction) -> Issue:
    """Add up the gradients of all copies of a weight."""
    label, resources = str(instruction), workspace.resources
    state = resources.methods[NAME]
    assert isinstance(state, TiedState)
    tied, group = state.tied[instruction.part], resources.groups.collective[instruction.group]

    def issue(stream: Stream) -> Completion:
        meeting = Meeting(group=group, step=workspace.step)

        def work() -> None:
            tied.reduce(resources.synchroniser, meeting)

        reduced = stream.run(label, work, *(workspace.latest(GRADIENT, stage) for stage in tied.stages))
        for stage in tied.stages:
            workspace.values[GRADIENT, stage, NONE] = Value.of(None, reduced)
        return reduced

    return issue


PARTS = (HandlerOf(kind="reduce_tied", handler=reduce_tied), StateOf(method=NAME, make=TiedState))
