"""What the holders of the same weights do together, and the optimizer's step that follows it."""

from __future__ import annotations

from weft.program.program import NONE, Instruction
from weft.run.handlers.base import GRADIENT, NORM, WEIGHTS, Issue
from weft.run.streams import Completion, Stream, Value
from weft.run.workspace import Workspace


def gather(workspace: Workspace, instruction: Instruction) -> Issue:
    """Bring a stage's weights up to date from all shares, once there is room for them."""
    stage, label = instruction.stage, str(instruction)
    shard = workspace.resources.shards[stage]

    def issue(stream: Stream) -> Completion:
        gathered = stream.run(label, shard.gather, workspace.latest(WEIGHTS, stage), shard.weights.room)
        workspace.values[WEIGHTS, stage, NONE] = Value.of(None, gathered)
        return gathered

    return issue


def free(workspace: Workspace, instruction: Instruction) -> Issue:
    """Give the room of a stage's weights to the next one; the computations that read them came before."""
    stage, label = instruction.stage, str(instruction)
    weights = workspace.resources.shards[stage].weights

    def issue(stream: Stream) -> Completion:
        freed = stream.run(label, weights.free, workspace.latest(WEIGHTS, stage))
        weights.room = Value.of(None, freed)
        return freed

    return issue


def reduce(workspace: Workspace, instruction: Instruction) -> Issue:
    """Make the replicas of a stage agree on its gradient.

    Where they share out what they step, each gets its share of the sum, and the gradient's buffer is free
    for another stage.
    """
    stage, part, label, resources = instruction.stage, instruction.part, str(instruction), workspace.resources
    bucket, shard = resources.buckets[stage], resources.shards.get(stage)
    synchroniser, group = resources.synchroniser, resources.groups.collective[instruction.group]

    def work() -> None:
        if shard is None:
            synchroniser.reduce(bucket.flat, group)
        else:
            shard.take_in(synchroniser.reduce_scatter(bucket.flat, group), part)
            bucket.hand_back()

    def issue(stream: Stream) -> Completion:
        reduced = stream.run(label, work, workspace.latest(GRADIENT, stage))
        value = workspace.values[GRADIENT, stage, NONE] = Value.of(None, reduced)
        if shard is not None:
            bucket.buffer.emptied = value
        return reduced

    return issue


def reduce_across(workspace: Workspace, instruction: Instruction) -> Issue:
    """Add up a stage's own share of the gradient with those of other islands."""
    stage, label, resources = instruction.stage, str(instruction), workspace.resources
    shard, group = resources.shards[stage], resources.groups.collective[instruction.group]

    def work() -> None:
        resources.synchroniser.reduce(shard.own_gradient, group)

    def issue(stream: Stream) -> Completion:
        reduced = stream.run(label, work, workspace.latest(GRADIENT, stage))
        workspace.values[GRADIENT, stage, NONE] = Value.of(None, reduced)
        return reduced

    return issue


def reduce_tied(workspace: Workspace, instruction: Instruction) -> Issue:
    """Add up the gradients of all copies of a weight."""
    label, resources = str(instruction), workspace.resources
    tied, group = resources.tied[instruction.part], resources.groups.collective[instruction.group]

    def work() -> None:
        tied.reduce(resources.synchroniser, group)

    def issue(stream: Stream) -> Completion:
        reduced = stream.run(label, work, *(workspace.latest(GRADIENT, stage) for stage in tied.stages))
        for stage in tied.stages:
            workspace.values[GRADIENT, stage, NONE] = Value.of(None, reduced)
        return reduced

    return issue


def norm(workspace: Workspace, instruction: Instruction) -> Issue:
    """Take the norm of the whole gradient."""
    label, resources = str(instruction), workspace.resources
    gradient_norm, group = resources.gradient_norm, resources.groups.collective[instruction.group]
    assert gradient_norm is not None, "a program with norms has something to take them of"

    def issue(stream: Stream) -> Completion:
        value = workspace.values[NORM, NONE, NONE] = Value()

        def work() -> None:
            value.content = gradient_norm.take(group)

        gradients = (workspace.latest(GRADIENT, stage) for stage in resources.stages)
        value.completion = stream.run(label, work, *gradients)
        return value.completion

    return issue


def step(workspace: Workspace, instruction: Instruction) -> Issue:
    """Step a stage's optimizer once its gradient is reduced, then clear the gradient.

    Where the norm of the whole gradient is taken, the gradient is clipped to it; all ranks leave the step out
    where the norm is not finite. A gradient that was handed back is cleared by the next stage to claim its
    buffer.
    """
    stage, label, resources = instruction.stage, str(instruction), workspace.resources
    optimizer, statistics = resources.optimizers[stage], resources.statistics[stage]
    bucket, shared = resources.buckets[stage], stage in resources.shards
    gradient_norm = resources.gradient_norm
    tied = [one for one in resources.tied.values() if stage in one.stages]

    def issue(stream: Stream) -> Completion:
        norm = workspace.latest(NORM, NONE)

        def work() -> None:
            if gradient_norm is None or gradient_norm.clip(stage, norm.content.item()):
                optimizer.step()
                statistics.end_step()
            else:
                statistics.forget()
            for one in tied:
                one.clear(stage)
            if not shared:
                bucket.clear()

        stepped = stream.run(label, work, workspace.latest(GRADIENT, stage), norm)
        workspace.values[WEIGHTS, stage, NONE] = Value.of(None, stepped)
        return stepped

    return issue
