"""A rank's copies of weights that several stages use.

Each copy collects the gradients of its own stage. Before the stages step, the gradients of all copies on all
ranks are added up. So all copies step with the same gradient and stay equal bit by bit. A rank has whole
copies, with gradients apart from those of its stages, or shards of copies.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from weft.methods.tying.kinds import REDUCE_TIED, TiesStages
from weft.methods.tying.program import NAME
from weft.methods.tying.runtime.copies import TiedGradient, copies_of, equalise
from weft.methods.tying.runtime.shards import TiedShards
from weft.program.program import NONE, Instruction
from weft.run.handlers.base import GRADIENT, Issue
from weft.run.methods import Making, MethodState, OwnGradient, StepGate
from weft.run.state.precision import PRECISIONS, STEPPED
from weft.run.streams import Completion, Stream, Value
from weft.run.workspace import Workspace
from weft.sync.base import Meeting, Synchroniser

if TYPE_CHECKING:
    from weft.run.resources import Resources


class TiedState(MethodState):
    """The tied weights of a rank's stages, by the `part` of their reductions; all copies start equal."""

    def __init__(self, making: Making) -> None:
        program, groups, columns = making.program, making.groups, making.program.columns
        owed = program.obligations.methods[NAME]
        assert isinstance(owed, TiesStages)
        self.whole: dict[int, TiedGradient] = {}
        self.sharded: dict[int, TiedShards] = {}
        reduced, precision = making.plan.reduce_precision, STEPPED[making.plan.precision]
        sent_as = precision if reduced is None else PRECISIONS[reduced]
        self._like = torch.empty(0, dtype=precision, device=making.device)
        for row in np.flatnonzero(columns.kind == REDUCE_TIED).tolist():
            part, number = int(columns.part[row]), int(columns.group[row])
            members, group = program.groups[number], groups.collective[number]
            copies = copies_of(owed.stages, part, making.stages)
            if owed.sharded:
                self.sharded[part] = TiedShards(copies, owed.stages[part], group, sent_as)
            else:
                self.whole[part] = TiedGradient(copies, len(members), leads=members[0] == groups.rank)
            equalise(copies, group, members[0])

    def begin(self, resources: Resources) -> None:
        for one in self.sharded.values():
            one.begin(resources.stepped, resources.device)

    def _of(self, stage: int) -> list[TiedGradient]:
        return [one for one in self.whole.values() if stage in one.copies]

    def counted_elsewhere(self, stage: int) -> tuple[nn.Parameter, ...]:
        return tuple(one.copies[stage] for one in self.sharded.values() if stage in one.counted_elsewhere)

    def apart(self, stage: int) -> tuple[nn.Parameter, ...]:
        return tuple(one.copies[stage] for one in self._of(stage))

    def own_gradient(self, stage: int) -> OwnGradient:
        """Return the gradients of a stage's copies; of each weight, the first holder's first copy counts."""
        copies = self._of(stage)
        counted = (one.gradient(stage) for one in copies if one.leads and one.stages[0] == stage)
        return OwnGradient(tuple(one.gradient(stage) for one in copies), tuple(counted))

    def stages_of(self, part: int) -> tuple[int, ...]:
        """Return the rank's stages with a copy of a weight."""
        return self.sharded[part].stages if part in self.sharded else self.whole[part].stages

    def add_up(self, part: int, synchroniser: Synchroniser, meeting: Meeting) -> None:
        """Add up the gradients of all copies of a weight; every rank of the meeting calls it."""
        if part in self.sharded:
            self.sharded[part].add_up(self._like)
        else:
            self.whole[part].reduce(synchroniser, meeting)

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
    part, group = instruction.part, resources.groups.collective[instruction.group]
    stages = state.stages_of(part)

    def issue(stream: Stream) -> Completion:
        meeting = Meeting(group=group, step=workspace.step)

        def work() -> None:
            state.add_up(part, resources.synchroniser, meeting)

        reduced = stream.run(label, work, *(workspace.latest(GRADIENT, stage) for stage in stages))
        for stage in stages:
            workspace.values[GRADIENT, stage, NONE] = Value.of(None, reduced)
        return reduced

    return issue
