"""The handlers of micro-batch clipping: take a gradient, clip it, and bound the sum."""

from __future__ import annotations

import torch

from weft.methods.micro_batch_clipping.options import NAME
from weft.methods.micro_batch_clipping.report import BOUND, BOUNDS, CLIPPED, DROPPED, NORMS
from weft.methods.micro_batch_clipping.runtime.clipped_norm import TakenGradient
from weft.methods.micro_batch_clipping.runtime.state import TAKEN, MicroBatchClipping
from weft.program.program import NONE, Instruction
from weft.run.handlers.base import GRADIENT, Issue
from weft.run.parallel.tensor_stage import counted_once
from weft.run.streams import Completion, Stream, Value
from weft.run.workspace import Workspace


def _state(workspace: Workspace) -> MicroBatchClipping:
    state = workspace.resources.methods[NAME]
    assert isinstance(state, MicroBatchClipping)
    return state


def take_gradient(workspace: Workspace, instruction: Instruction) -> Issue:
    """Move the gradient of a clipped micro-batch out of the way of the next one's."""
    stage, part, label = instruction.stage, instruction.part, str(instruction)
    resources = workspace.resources
    bucket, module = resources.buckets[stage], resources.stages[stage]
    # The last backward pass of a step has made its gradient whole already.
    summed = () if part == _state(workspace).last_part else resources.summed.get(stage, ())
    flat = bucket.flat
    counted = counted_once(module, bucket.layout, flat, 0)

    def issue(stream: Stream) -> Completion:
        taken: Value[TakenGradient] = Value()
        workspace.values[TAKEN, stage, part] = taken

        def work() -> None:
            for one in summed:
                one.add_up()
            squares = torch.zeros((), dtype=torch.float64, device=flat.device)
            for own in counted:
                squares += torch.dot(own, own)
            taken.content = TakenGradient(flat.clone(), squares)
            flat.zero_()

        taken.completion = stream.run(label, work)
        return taken.completion

    return issue


def clip_gradient(workspace: Workspace, instruction: Instruction) -> Issue:
    """Add a clipped micro-batch to the sum of the step, when all ranks of its replica have its squares."""
    part, label = instruction.part, str(instruction)
    state, group = _state(workspace), workspace.resources.groups.collective[instruction.group]
    norm = state.norm_of(instruction.stage)

    def issue(stream: Stream) -> Completion:
        taken = [workspace.values.pop((TAKEN, stage, part)) for stage in norm.stages]
        step = workspace.step

        def work() -> None:
            contents = [one.content for one in taken]
            norm.add(state.sources_of(step), part, contents, group, workspace.loss_factor())

        return stream.run(label, work, *taken)

    return issue


def bound_gradient(workspace: Workspace, instruction: Instruction) -> Issue:
    """Put the sums of clipped gradients in the place of the gradients of the stages with one norm."""
    label, values = str(instruction), workspace.values
    state, group = _state(workspace), workspace.resources.groups.collective[instruction.group]
    norm = state.norm_of(instruction.stage)

    def issue(stream: Stream) -> Completion:
        names, step = (NORMS, BOUNDS, BOUND, CLIPPED, DROPPED), workspace.step
        made: dict[str, Value[torch.Tensor]] = {name: Value() for name in names}

        def work() -> None:
            for name, number in norm.finish(state.sources_of(step), group).items():
                made[name].content = number

        ended = stream.run(label, work, *(workspace.latest(GRADIENT, stage) for stage in norm.stages))
        for stage in norm.stages:
            values[GRADIENT, stage, NONE] = Value.of(None, ended)
        for name, value in made.items():
            value.completion = ended
            values[name, norm.stages[0], NONE] = value
        return ended

    return issue
