"""A rank's replicas of stages that step by themselves: their rounds, meetings and means."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from weft.describe.synchronisation import local_steps, micro_batches_of_steps
from weft.errors import RunError
from weft.methods.local_averaging.options import LEFT_OUT, NAME
from weft.methods.local_averaging.runtime.averaged_part import averaged_parts
from weft.methods.local_averaging.runtime.outer_step import Averaging
from weft.methods.local_averaging.runtime.replica_means import ReplicaMeans
from weft.program.program import NONE, Instruction
from weft.run.handlers.base import WEIGHTS, Issue
from weft.run.methods import Making, PartOfSum, StepGate
from weft.run.resources import Resources, groups_of_stages, share_of, taken_share
from weft.run.streams import Completion, Stream, Value
from weft.run.workspace import Workspace


class LocalAveraging(ReplicaMeans):
    """The rounds of local steps on one rank; the synchroniser has the states of an outer step."""

    def __init__(self, making: Making) -> None:
        steps = local_steps(making.plan.sync)
        assert steps is not None, "programs have averagings for local steps only"
        super().__init__()
        self._program, self._every = making.program, steps.every
        self._rests = len(micro_batches_of_steps(making.plan)) > 1
        # By stage, the step after which its replicas average next.
        self._due: dict[int, int] = {}

    def begin(self, resources: Resources) -> None:
        assert isinstance(resources.synchroniser, Averaging), "methods with local steps bring such a one"
        self._synchroniser, self._seed = resources.synchroniser, resources.seed
        for stage, group in sorted(groups_of_stages(self._program, "average_weights").items()):
            # By the samples of a cycle.
            share = share_of(self._program, stage) * taken_share(self._program, stage)
            replicas = resources.groups.collective[group]
            self.stages[stage] = averaged_parts(resources, stage, share, replicas)
        self.rebase()

    def rebase(self) -> None:
        self._due.clear()
        for one in self.parts:
            one.rates.zero_()
            self._synchroniser.begin(one.name, one.flat(one.weights), one.group, one.lengths)

    def rank_tensors(self) -> Mapping[str, torch.Tensor]:
        rates = {f"learning_rates/{one.name}": one.rates for one in self.parts}
        return {**rates, **self._synchroniser.tensors()}

    def gate(self, workspace: Workspace, stage: int) -> StepGate | None:
        return _LocalStep(self, workspace, stage) if stage in self.stages else None

    def shares(self, workspace: Workspace) -> Mapping[str, PartOfSum]:
        if not workspace.training or not self.meets_after(workspace.step):
            return {}
        return {LEFT_OUT: PartOfSum(tuple(workspace.latest(LEFT_OUT, stage) for stage in self.stages))}

    def meets_after(self, step: int) -> bool:
        """Return True if replicas average their weights after this step."""
        return (step + 1) % self._every == 0

    def begin_step(self, stage: int, step: int) -> None:
        """Note the learning rate of a stage's step.

        Raises:
            RunError: if the averaging of an earlier step was left out.
        """
        due = self._due.setdefault(stage, step + self._every - 1 - step % self._every)
        if step > due:
            raise RunError(f"stage {stage}: the average after step {due} was missed; now it is step {step}")
        for one in self.stages[stage]:
            if self._rests:
                # Replicas agree on the rate of the last step, which all of them take.
                one.rates.zero_()
            one.note_rate()

    def end_step(self, stage: int, step: int) -> None:
        """Note whether a replica's weights are finite, after the last step before a meeting."""
        for one in self.stages[stage] if self.meets_after(step) else ():
            one.finite = one.all_finite(one.weights)

    def average(self, stage: int, step: int) -> torch.Tensor:
        """Average a stage over its replicas; return 1 if any of this one are left out, else 0; shape ()."""
        self._due.pop(stage, None)
        for one in self.stages[stage]:
            flat, done = one.flat(one.weights), one.end_round(step // self._every, self._seed)
            self._synchroniser.average(flat, done, one.group)
            one.give(one.parts(flat, one.weights))
            one.clear_states(~done.finite)
        finite = torch.stack([one.finite for one in self.stages[stage]]).all()
        return (~finite).float()


class _LocalStep:
    """The gate that tells of a replica's own steps, and leaves none out."""

    def __init__(self, state: LocalAveraging, workspace: Workspace, stage: int) -> None:
        self._state, self._workspace, self._stage = state, workspace, stage
        self._step = 0

    def reads(self) -> tuple[Value[int], ...]:
        return (Value.of(self._workspace.step),)

    def votes(self, *values: Value[Any]) -> None:
        """Admit every step, and note its number."""
        self._step = values[0].content
        self._state.begin_step(self._stage, self._step)

    def stepped(self) -> None:
        self._state.end_step(self._stage, self._step)


def average_weights(workspace: Workspace, instruction: Instruction) -> Issue:
    """Average a stage's weights over all its replicas, after its step."""
    stage, label = instruction.stage, str(instruction)
    state = workspace.resources.methods[NAME]
    assert isinstance(state, LocalAveraging)

    def issue(stream: Stream) -> Completion:
        step, left_out = workspace.step, Value[torch.Tensor]()

        def work() -> None:
            left_out.content = state.average(stage, step)

        averaged = stream.run(label, work, workspace.latest(WEIGHTS, stage))
        left_out.completion = averaged
        workspace.values[LEFT_OUT, stage, NONE] = left_out
        workspace.values[WEIGHTS, stage, NONE] = Value.of(None, averaged)
        return averaged

    return issue
