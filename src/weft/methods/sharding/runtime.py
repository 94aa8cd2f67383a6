"""The gathers and frees of weights on a rank, and the reductions of gradients or of their shards."""

from __future__ import annotations

from weft.program.program import NONE, Instruction
from weft.run.handlers.base import GRADIENT, WEIGHTS, Issue, meeting_of
from weft.run.methods import HandlerOf
from weft.run.streams import Completion, Stream, Value
from weft.run.workspace import Workspace


def gather(workspace: Workspace, instruction: Instruction) -> Issue:
    """Bring a stage's weights up to date from all shards, once there is room for them."""
    stage, label = instruction.stage, str(instruction)
    shard = workspace.resources.shards[stage]

    def issue(stream: Stream) -> Completion:
        gathered = stream.run(label, shard.gather, workspace.latest(WEIGHTS, stage), shard.weights.room)
        workspace.values[WEIGHTS, stage, NONE] = Value.of(None, gathered)
        return gathered

    return issue


def free(workspace: Workspace, instruction: Instruction) -> Issue:
    """Free the room of a stage's weights for the next gather; computations that read them came before."""
    stage, label = instruction.stage, str(instruction)
    weights = workspace.resources.shards[stage].weights

    def issue(stream: Stream) -> Completion:
        freed = stream.run(label, weights.free, workspace.latest(WEIGHTS, stage))
        weights.room = Value.of(None, freed)
        return freed

    return issue


def reduce(workspace: Workspace, instruction: Instruction) -> Issue:
    """Reduce a stage's gradient over its replicas.

    If they shard their optimizer states, each gets its shard of the sum. The gradient's buffer is then free
    for another stage.
    """
    stage, part, label, resources = instruction.stage, instruction.part, str(instruction), workspace.resources
    bucket, shard = resources.buckets[stage], resources.shards.get(stage)
    synchroniser, held = resources.synchroniser, resources.held_shards.get(stage)

    def issue(stream: Stream) -> Completion:
        meeting = meeting_of(workspace, instruction)

        def work() -> None:
            if held is not None:
                held.reduce(part, lambda flat: synchroniser.reduce(flat, meeting))
            elif shard is None:
                synchroniser.reduce(bucket.flat, meeting)
            else:
                shard.take_in(synchroniser.reduce_scatter(bucket.flat, meeting), part)
                shard.weights.outdate(meeting.step)
                bucket.hand_back()

        reduced = stream.run(label, work, workspace.latest(GRADIENT, stage))
        value = workspace.values[GRADIENT, stage, NONE] = Value.of(None, reduced)
        if shard is not None:
            bucket.buffer.emptied = value
        return reduced

    return issue


def reduce_across(workspace: Workspace, instruction: Instruction) -> Issue:
    """Add up the rank's shard of a stage's gradient with the same shard in other islands."""
    stage, label, resources = instruction.stage, str(instruction), workspace.resources
    shard = resources.shards[stage]

    def issue(stream: Stream) -> Completion:
        meeting = meeting_of(workspace, instruction)

        def work() -> None:
            resources.synchroniser.reduce(shard.own_gradient, meeting)

        reduced = stream.run(label, work, workspace.latest(GRADIENT, stage))
        workspace.values[GRADIENT, stage, NONE] = Value.of(None, reduced)
        return reduced

    return issue


PARTS = (
    HandlerOf(kind="gather", handler=gather),
    HandlerOf(kind="free", handler=free),
    HandlerOf(kind="reduce", handler=reduce),
    HandlerOf(kind="reduce_across", handler=reduce_across),
)
