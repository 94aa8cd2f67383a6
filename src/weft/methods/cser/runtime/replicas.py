"""A rank's replicas of stages that average parts of their updates and errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from weft.describe.synchronisation import options_in
from weft.errors import InputError, RunError, Violation
from weft.methods.cser.absences import Absence
from weft.methods.cser.kinds import ResetsErrors
from weft.methods.cser.options import ABSENCES, DISAGREEMENT, NAME, RETURNED, STALEST, CserOptions
from weft.methods.cser.runtime.meeting import Assembly, require_alike
from weft.methods.cser.runtime.synced_part import SyncedPart
from weft.methods.local_averaging.options import LEFT_OUT
from weft.methods.local_averaging.runtime.averaged_part import AveragedPart, averaged_parts
from weft.methods.local_averaging.runtime.replica_means import ReplicaMeans
from weft.program.program import NONE, Instruction
from weft.run.handlers.base import WEIGHTS, Issue
from weft.run.methods import Making, PartOfSum, StepGate
from weft.run.resources import Resources, groups_of_stages, replica_of, share_of
from weft.run.stage.statistics import StageStatistics
from weft.run.streams import Completion, Stream, Value
from weft.run.workspace import Workspace
from weft.sync.base import Group

if TYPE_CHECKING:
    from weft.planning.planned_job import PlannedJob


class CserReplicas(ReplicaMeans):
    """The meetings of one rank, and its errors."""

    def __init__(self, making: Making) -> None:
        super().__init__()
        options, owed = options_in(making.plan, NAME, CserOptions), making.program.obligations.methods[NAME]
        assert options is not None, "programs have meetings for this method only"
        assert isinstance(owed, ResetsErrors), "its own pass owes them"
        self._program, self._options, self._owed = making.program, options, owed
        self._ranks, self._away = making.plan.ranks, owed.absences
        self._micro_batches = [one.micro_batches for one in making.plan.stages[0].replicas]
        # Of each part with weights that are checked together, those that share blocks.
        self._synced: dict[str, tuple[SyncedPart, ...]] = {}
        self._alike: dict[int, torch.Tensor] = {}
        # By stage, the step after which the next reset is due; -1 before the first step.
        self._due: dict[int, torch.Tensor] = {}
        self._replica: dict[int, int] = {}
        self._statistics: Mapping[int, StageStatistics] = {}

    def begin(self, resources: Resources) -> None:
        self._statistics = resources.statistics
        groups = groups_of_stages(self._program, "synchronise_update", "reset_error")
        for stage, group in sorted(groups.items()):
            share, replicas = share_of(self._program, stage), resources.groups.collective[group]
            self.stages[stage] = averaged_parts(resources, stage, share, replicas)
            self._due[stage] = torch.full((), -1, dtype=torch.int64)
            self._replica[stage] = replica_of(self._program, stage)
            for part in self.stages[stage]:
                self._synced[part.name] = self._parts_of(part, str(stage), resources.seed)

    def _parts_of(self, part: AveragedPart, stage: str, seed: int) -> tuple[SyncedPart, ...]:
        """Return a stage's own weights as one part, and each weight that it shares with others as one."""
        names = list(part.lengths)
        if part.name == stage:
            return (SyncedPart(names[0], part.weights, self._options, seed),)
        pairs = zip(names, part.weights, strict=True)
        return tuple(SyncedPart(name, [weight], self._options, seed) for name, weight in pairs)

    def resume(self) -> None:
        for stage, due in self._due.items():
            self._await(stage, int(due))

    def rebase(self) -> None:
        for stage in self._due:
            self._await(stage, -1)
        for parts in self._synced.values():
            for one in parts:
                one.restart()

    def rank_tensors(self) -> Mapping[str, torch.Tensor]:
        found = {f"reset_due/{stage}": due for stage, due in self._due.items()}
        for part, parts in self._synced.items():
            for one in parts:
                found |= {f"{part}/{name}": value for name, value in one.tensors().items()}
        return found

    def gate(self, workspace: Workspace, stage: int) -> StepGate | None:
        return _MeetingStep(self, workspace, stage) if stage in self.stages else None

    def shares(self, workspace: Workspace) -> Mapping[str, PartOfSum]:
        resets = self._owed.resets_after(workspace.step)
        if not workspace.training or not (resets or self._owed.updates_after(workspace.step)):
            return {}

        def of(name: str, weight: float = 1.0) -> PartOfSum:
            return PartOfSum(tuple(workspace.latest(name, stage) for stage in self.stages), weight)

        found = {LEFT_OUT: of(LEFT_OUT)}
        if resets and self._options.compressor == "blocks":
            found[DISAGREEMENT] = of(DISAGREEMENT)
            meeting = self._ranks * len(self._present(workspace.step)) / len(self._micro_batches)
            found[STALEST] = of(STALEST, 1.0 / (meeting * max(len(self.stages), 1)))
        return found

    def _present(self, step: int) -> list[int]:
        """Return the replicas that take part in the reset of a step's round."""
        return [one for one in range(len(self._micro_batches)) if self._away.meets(one, step)]

    def _await(self, stage: int, due: int) -> None:
        """Note the step after which a stage is reset next; -1 before the first step."""
        self._due[stage].fill_(due)
        for part in self.stages[stage]:
            part.present = due < 0 or not self._away.returns(self._replica[stage], due)

    def moves_after(self, done: int) -> bool:
        return bool(self._away.ended_by(done - 1) or self._away.begun_after(done - 1))

    def move(self, done: int, job: PlannedJob) -> Mapping[str, Any]:
        """Return the event of the replicas that the last reset has brought back, or that leave behind it."""
        return _absences(done, self._away.ended_by(done - 1), self._away.begun_after(done - 1))

    def begin_step(self, stage: int, step: int) -> None:
        """Keep what the meetings need; set gradients of a part that are not all finite to 0.

        Else a lost replica would spoil the blocks that a reset has brought back. Copies of a weight have one
        gradient in all stages, so they step alike.

        Raises:
            RunError: if replicas chose different blocks in the last step, or a reset was left out.
        """
        if stage in self._alike:
            require_alike(self._alike[stage])
        self._require_reset(stage, step)
        for part in self.stages[stage]:
            gradients = [one.grad for one in part.weights if one.grad is not None]
            lost = ~part.all_finite(gradients)
            for gradient in gradients:
                gradient.masked_fill_(lost, 0.0)
            for one in self._synced[part.name]:
                one.begin_step(step)

    def _require_reset(self, stage: int, step: int) -> None:
        due, every = int(self._due[stage]), self._owed.every
        if 0 <= due < step:
            raise RunError(f"stage {stage}: the reset after step {due} was missed; now it is step {step}")
        if every and due < 0:
            self._await(stage, self._away.next_reset(self._replica[stage], step))

    def end_step(self, stage: int) -> None:
        """Take a stage's local step in, and note whether its weights are finite."""
        for part in self.stages[stage]:
            part.finite = part.all_finite(part.weights)
            for one in self._synced[part.name]:
                one.form.after(one.flat, part.finite)
            part.publish()
            part.clear_states(~part.finite)

    def synced_parts(self, stage: int) -> list[SyncedPart]:
        """Return the parts of a stage that share blocks, its own weights first."""
        return [one for part in self.stages[stage] for one in self._synced[part.name]]

    def take_in(self, *, away: bool) -> None:
        """Let in a replica that was `away`; every replica calls it between two steps.

        The replica takes the common weights of the others, plus its own error. That of a new process is 0. It
        takes their means of running statistics, too.

        Raises:
            InputError: if the plan's replicas keep no errors.
        """
        if self._options.variant != "paper" or not self._options.explicit:
            raise InputError(Violation("plan: sync.options", "replicas keep no errors", "keep_errors = true"))
        for stage, parts in self.stages.items():
            for part in parts:
                part.present = not away
            self.rejoin(stage, 0, parts[0].group)
            present = torch.tensor(not away, device=parts[0].finite.device)
            assembly = Assembly.of(parts[0].group, parts[0].share, present)
            for one in self._statistics[stage].tensors:
                mean = assembly.mean(one.double().flatten(), 0)
                one.copy_(torch.where(present, one, mean.view_as(one)))
            for part in parts:
                part.present = True

    def returned(self, away_since: Mapping[int, int], step: int) -> Mapping[str, Any]:
        every = self._owed.every
        back = [Absence(replica, since // every, step // every - 1) for replica, since in away_since.items()]
        return _absences(step, back, [])

    def rejoin(self, stage: int, step: int, group: Group) -> None:
        """Bring the replica back if it was absent; those that are present give it their common weights."""
        for part in self.stages[stage]:
            for one in self._synced[part.name]:
                assembly = Assembly.of(group, part.share, torch.full_like(part.finite, part.present))
                one.form.rejoin(one.flat, step // self._owed.every, assembly)
                self._compare(stage, assembly)
            if not part.present:
                part.finite = part.all_finite(part.weights)
                part.publish()

    def meet(self, stage: int, step: int, group: Group, *, reset: bool) -> Mapping[str, torch.Tensor]:
        """Average a part of a stage's updates, or of its errors; return numbers of the meeting, shape ()."""
        squares, stalest = torch.zeros((), dtype=torch.float64), 0
        met_share = sum(self._micro_batches[one] for one in self._present(step)) / sum(self._micro_batches)
        for part in self.stages[stage]:
            for one in self._synced[part.name]:
                finite = torch.ones_like(part.finite) if one.form.restores else part.finite
                assembly = Assembly.of(group, part.share, finite)
                if reset:
                    met = one.form.reset(one.flat, step // self._owed.every, assembly)
                else:
                    met = one.form.update(one.flat, step, assembly)
                one.note(met, step, reset=reset)
                self._compare(stage, assembly)
                scale = len(one.flat) / len(met.own) * part.share / met_share
                squares = squares.to(met.own.device) + scale * torch.where(finite, met.squares, 0.0)
                stalest = max(stalest, one.stalest(step))
            part.publish()
        if reset:
            self._await(stage, self._away.next_reset(self._replica[stage], step + 1))
        finite = torch.stack([part.finite for part in self.stages[stage]]).all()
        return {LEFT_OUT: (~finite).float(), DISAGREEMENT: squares, STALEST: torch.tensor(float(stalest))}

    def _compare(self, stage: int, assembly: Assembly) -> None:
        self._alike[stage] = self._alike.get(stage, assembly.alike) & assembly.alike


def _absences(step: int, back: Sequence[Absence], left: Sequence[Absence]) -> Mapping[str, Any]:
    """Return the event of absences that end or begin before a step."""
    told = [f"replica {one.replica} {one}" for one in back]
    told += [f"replica {one.replica} is away until reset {one.back}" for one in left]
    named = {RETURNED: [one._asdict() for one in back], "left": [one._asdict() for one in left]}
    return {"event": ABSENCES, "step": step, **named, "told": "; ".join(told)}


class _MeetingStep:
    """The gate around a replica's own step."""

    def __init__(self, state: CserReplicas, workspace: Workspace, stage: int) -> None:
        self._state, self._workspace, self._stage = state, workspace, stage

    def reads(self) -> tuple[Value[int], ...]:
        return (Value.of(self._workspace.step),)

    def votes(self, *values: Value[Any]) -> None:
        """Admit every step."""
        self._state.begin_step(self._stage, values[0].content)

    def stepped(self) -> None:
        self._state.end_step(self._stage)


def meet(workspace: Workspace, instruction: Instruction) -> Issue:
    """Run one collective of a stage's replicas after its step."""
    stage, label, reset = instruction.stage, str(instruction), instruction.kind.name == "reset_error"
    state, group = _state_and_group(workspace, instruction)

    def issue(stream: Stream) -> Completion:
        step = workspace.step
        told = {name: Value[torch.Tensor]() for name in (LEFT_OUT, DISAGREEMENT, STALEST)}

        def work() -> None:
            for name, number in state.meet(stage, step, group, reset=reset).items():
                told[name].content = number

        done = stream.run(label, work, workspace.latest(WEIGHTS, stage))
        for name, value in told.items():
            value.completion = done
            workspace.values[name, stage, NONE] = value
        workspace.values[WEIGHTS, stage, NONE] = Value.of(None, done)
        return done

    return issue


def rejoin(workspace: Workspace, instruction: Instruction) -> Issue:
    """Bring a stage's absent replica back before a reset; all replicas of the reset run it."""
    stage, label = instruction.stage, str(instruction)
    state, group = _state_and_group(workspace, instruction)

    def issue(stream: Stream) -> Completion:
        work = partial(state.rejoin, stage, workspace.step, group)
        done = stream.run(label, work, workspace.latest(WEIGHTS, stage))
        workspace.values[WEIGHTS, stage, NONE] = Value.of(None, done)
        return done

    return issue


def _state_and_group(workspace: Workspace, instruction: Instruction) -> tuple[CserReplicas, Group]:
    resources = workspace.resources
    state = resources.methods[NAME]
    assert isinstance(state, CserReplicas)
    return state, resources.groups.collective[instruction.group]
