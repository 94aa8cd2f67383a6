"""Forward and backward passes of a stage on one micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from weft.program.program import NONE, Instruction
from weft.run.handlers.base import GRADIENT, SAVED, WEIGHT_PART, WEIGHTS, Issue
from weft.run.handlers.crossing import (
    fill,
    gradients_left,
    gradients_taken,
    inputs_taken,
    leave,
    messages_of,
    outputs_left,
)
from weft.run.parallel.tensor_stage import leads_replica
from weft.run.stage.borders import received
from weft.run.stage.documents import tell_documents
from weft.run.stage.stage_pass import Outputs, roots_of, stage_pass
from weft.run.streams import THERE, Completion, Stream, Value
from weft.run.workspace import Workspace

# Takes a stage's inputs, its outputs and other roots, their gradients (None for a loss), and the step.
Differentiate = Callable[..., Any]


def forward(workspace: Workspace, instruction: Instruction) -> Issue:
    """Run a stage on one micro-batch; the last stage also computes the weighted loss."""
    stage, number, label = instruction.stage, instruction.micro_batch, str(instruction)
    values, resources = workspace.values, workspace.resources
    borders, training = resources.borders[stage], workspace.training
    last = not borders.after
    roots, crossed = roots_of(workspace, stage), workspace.crossed
    reads_targets = last or (roots is not None and roots.reads_targets)
    taken, left = inputs_taken(workspace, stage, number), outputs_left(workspace, stage, number)
    weights = (WEIGHTS, stage, NONE)
    # The ranks of a replica all have the same loss.
    counts = last and leads_replica(resources.stages[stage])
    run_stage, require_weights = stage_pass(workspace, instruction), weights_required(workspace, stage)
    statistics, module = resources.statistics[stage], resources.stages[stage]

    def issue(stream: Stream) -> Completion:
        loaded = workspace.micro_batch(number, borders.splits, inputs=borders.samples, targets=reads_targets)
        given = [crossed.pop(key) for key in taken]
        step = workspace.step
        saved: Value[tuple[Sequence[torch.Tensor], Outputs]] = Value()
        loss: Value[torch.Tensor] = Value()
        made = messages_of(left)
        rooted = None if roots is None else roots.empty()

        def work() -> None:
            require_weights()
            # A stage of a few microseconds pays for each call that does nothing.
            arrived = received(borders.before.values(), [one.content for one in given]) if given else {}
            if training:
                # New leaves, as several stages may read the same value.
                arrived = {place: one.detach().requires_grad_() for place, one in arrived.items()}
            samples, targets, documents = loaded.content
            tell_documents(module, documents)
            arrived.update(enumerate(samples))
            inputs = [arrived[place] for place in range(borders.inputs)]
            outputs = run_stage(inputs, targets, step)
            if training:
                statistics.count()
                saved.content = (inputs, outputs)
            if last:
                loss.content = outputs[0].detach()
            if rooted:
                for place, value in rooted.items():
                    value.content = outputs[borders.outputs + place].detach()
            if left:
                fill(left, made, [output.detach() for output in outputs])

        ended = stream.run(label, work, loaded, *given, values.get(weights, THERE))
        saved.completion = loss.completion = ended
        if training:
            values[SAVED, stage, number] = saved
        if rooted and roots is not None:
            roots.leave(values, number, rooted, ended)
        if counts:
            workspace.losses.append(loss)
        if left:
            leave(workspace, left, made, ended)
        return ended

    return issue


def backward(workspace: Workspace, instruction: Instruction) -> Issue:
    """Accumulate a stage's weight gradients for one micro-batch and hand on the gradients of its inputs."""
    add_up = added_up(workspace, instruction)
    bucket = workspace.resources.buckets[instruction.stage]
    # A first stage of frozen layers has outputs without a graph.
    trains = bool(bucket.parameters)

    def differentiate(
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor | None],
        *,
        step: int,
    ) -> None:
        bucket.claim()
        if trains or any(output.requires_grad for output in outputs):
            torch.autograd.backward(outputs, gradients)
        add_up()

    return _going_back(workspace, instruction, differentiate)


def backward_input(workspace: Workspace, instruction: Instruction) -> Issue:
    """Hand on the gradients of a stage's inputs for one micro-batch and keep what the weight part needs."""
    # The part of torch that splits autograd takes seconds to import; whole passes do not need it.
    from weft.run.stage.split_backward import WeightPart, run_input_part

    module, resources = workspace.resources.stages[instruction.stage], workspace.resources
    # The input part of a stage that reads samples makes a gradient, too: see `run_input_part`.
    makes_gradients = bool(resources.borders[instruction.stage].samples)
    claim = resources.buckets[instruction.stage].claim

    def differentiate(
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor | None],
        *,
        step: int,
    ) -> list[WeightPart]:
        if makes_gradients:
            claim()
        return [run_input_part(module, inputs, outputs, gradients)]

    return _going_back(workspace, instruction, differentiate, leaves=WEIGHT_PART)


def backward_weight(workspace: Workspace, instruction: Instruction) -> Issue:
    """Accumulate a stage's weight gradients for one micro-batch after its input part."""
    stage, number, label = instruction.stage, instruction.micro_batch, str(instruction)
    bucket, add_up = workspace.resources.buckets[stage], added_up(workspace, instruction)
    completes = instruction.position in workspace.last_gradients

    def differentiate(parts: Any, *, step: int) -> None:
        bucket.claim()
        for one in parts:
            one.run()
        add_up()

    shown = seen(workspace, instruction, differentiate, ends=True)

    def issue(stream: Stream) -> Completion:
        part, step = workspace.values.pop((WEIGHT_PART, stage, number)), workspace.step

        def work() -> None:
            shown(part.content, step=step)

        ended = stream.run(label, work, part, bucket.buffer.emptied)
        if completes:
            workspace.values[GRADIENT, stage, NONE] = Value.of(None, ended)
        return ended

    return issue


def _going_back(
    workspace: Workspace, instruction: Instruction, differentiate: Differentiate, *, leaves: str | None = None
) -> Issue:
    """Let `differentiate` set the gradients of the inputs and hand them on.

    Its result is left for the stage and micro-batch under the name `leaves`.
    """
    stage, number, label = instruction.stage, instruction.micro_batch, str(instruction)
    values, crossed = workspace.values, workspace.crossed
    buffer, borders = workspace.resources.buckets[stage].buffer, workspace.resources.borders[stage]
    last = not borders.after
    taken, left = gradients_taken(workspace, stage, number), gradients_left(workspace, stage, number)
    completes = instruction.position in workspace.last_gradients
    require_weights, weights = weights_required(workspace, stage), (WEIGHTS, stage, NONE)
    roots = roots_of(workspace, stage)
    start = differentiate if roots is None else roots.starting(differentiate, workspace.loss_factor)
    shown = seen(workspace, instruction, start, ends=leaves is None)

    def issue(stream: Stream, *coefficients: Value[torch.Tensor]) -> Completion:
        saved = values.pop((SAVED, stage, number))
        given = [crossed.pop(key) for key in taken]
        step = workspace.step
        kept: Value[Any] = Value()
        made = messages_of(left)

        def work() -> None:
            require_weights()
            inputs, outputs = saved.content
            gradients: list[Any]
            if not last:
                summed = received(borders.after.values(), [one.content for one in given])
                gradients = [summed[place] for place in range(borders.outputs)]
            else:
                gradients = [workspace.loss_gradient(outputs[0])]
            kept.content = shown(inputs, outputs, (*gradients, *coefficients), step=step)
            if left:
                fill(left, made, [one.grad for one in inputs])

        there = values.get(weights, THERE), buffer.emptied
        ended = stream.run(label, work, saved, *given, *there, *coefficients)
        if left:
            leave(workspace, left, made, ended)
        if leaves is not None:
            kept.completion = ended
            values[leaves, stage, number] = kept
        if completes:
            values[GRADIENT, stage, NONE] = Value.of(None, ended)
        return ended

    if roots is None:
        return issue
    return lambda stream: issue(stream, *roots.coefficients(workspace, number))


def seen(
    workspace: Workspace, instruction: Instruction, differentiate: Differentiate, *, ends: bool
) -> Differentiate:
    """Wrap `differentiate` for the stage's taps, if it has any; `ends`: it makes the last gradients."""
    taps = workspace.resources.taps.get(instruction.stage)
    return differentiate if taps is None else taps.around(instruction.micro_batch, differentiate, ends=ends)


def added_up(workspace: Workspace, instruction: Instruction) -> Callable[[], None]:
    """Return the end of a gradient computation: after a stage's last one, the replica's ranks add up."""
    summed = workspace.resources.summed.get(instruction.stage, ())
    if instruction.position not in workspace.last_gradients:
        summed = ()

    def add_up() -> None:
        for one in summed:
            one.add_up()

    return add_up


def weights_required(workspace: Workspace, stage: int) -> Callable[[], None]:
    """Return a check that the weights of a stage are where its parameters look for them."""
    shard = workspace.resources.shards.get(stage)
    return _nothing if shard is None else shard.weights.require


def _nothing() -> None:
    """Do nothing: weights that never leave are always there."""
