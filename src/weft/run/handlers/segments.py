"""Segments of a stage's passes on one micro-batch; collectives between them are instructions of methods."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from weft.program.program import NONE, Instruction
from weft.run.channels import ACTIVATION, OUTPUT_GRADIENT
from weft.run.handlers.base import (
    BORDER_GRADIENT,
    GRADIENT,
    INPUT_GRADIENT,
    OUTPUT,
    SAVED,
    SEGMENT_GRADIENT,
    SEGMENT_INPUT,
    SEGMENT_OUTPUT,
    SEGMENT_WEIGHT,
    WEIGHTS,
    Handler,
    Issue,
)
from weft.run.handlers.passes import added_up, seen, weights_required
from weft.run.loss_input import loss_input
from weft.run.pieces import Tape
from weft.run.streams import THERE, Completion, Stream, Value
from weft.run.tensor_stage import leads_replica
from weft.run.workspace import Workspace

if TYPE_CHECKING:
    from weft.run.segments import Crossed, Finish


def whole_or_cut(whole: Handler, cut: Handler) -> Handler:
    """A handler of whole passes, and of the last segments of those that are cut."""

    def handle(workspace: Workspace, instruction: Instruction) -> Issue:
        handler = cut if instruction.stage in workspace.segments else whole
        return handler(workspace, instruction)

    return handle


def forward_segment(workspace: Workspace, instruction: Instruction) -> Issue:
    """Run a segment of a stage forward, and leave what crosses the border behind it."""
    return _forward(workspace, instruction, instruction.part)


def last_forward_segment(workspace: Workspace, instruction: Instruction) -> Issue:
    """Run what completes a forward pass; the last stage also computes the weighted loss."""
    return _forward(workspace, instruction, workspace.segments[instruction.stage].last_forward)


def _forward(workspace: Workspace, instruction: Instruction, segment: int) -> Issue:
    stage, number, label = instruction.stage, instruction.micro_batch, str(instruction)
    route, values, resources = workspace.route, workspace.values, workspace.resources
    cut = workspace.segments[stage]
    begins, completes = segment == 0, segment == cut.last_forward
    reads_batch = begins and stage not in route.before
    ends = completes and stage not in route.after
    made_as = _output_key(workspace, instruction) if completes else (SEGMENT_OUTPUT, stage, number)
    counts = ends and leads_replica(resources.stages[stage])
    saved, weights = (SAVED, stage, number), (WEIGHTS, stage, NONE)
    require_weights = weights_required(workspace, stage)
    statistics, device, dtype = resources.statistics[stage], resources.device, resources.dtype

    def issue(stream: Stream) -> Completion:
        loaded = workspace.micro_batch(number) if reads_batch or ends else None
        given = _taken(workspace, instruction, begins) if not reads_batch else Value.of(loaded.inputs)
        # Each segment follows the one before, and leaves the tape to the next one.
        left = Value.of(Tape()) if begins else values[saved]
        tape, made = left.content, Value()

        def work() -> None:
            require_weights()
            entered = given.content
            if reads_batch:
                entered = entered.to(device, dtype if entered.is_floating_point() else entered.dtype)
            else:
                entered = entered.detach().requires_grad_()
            if begins:
                cut.begin(tape, entered)
            finish = _finish(workspace, stage, loaded.targets.to(device)) if ends else None
            made.content = cut.run(tape, segment, entered, finish)
            if completes:
                statistics.count()

        made.completion = ended = stream.run(label, work, given, values.get(weights, THERE), left)
        values[saved] = Value.of(tape, ended)
        if counts:
            workspace.losses.append(made)
        elif not ends:
            values[made_as] = made
        return ended

    return issue


def _taken(workspace: Workspace, instruction: Instruction, begins: bool) -> Value:
    name = ACTIVATION if begins else SEGMENT_INPUT
    return workspace.values.pop((name, instruction.stage, instruction.micro_batch))


def _output_key(workspace: Workspace, instruction: Instruction) -> tuple[str, int, int]:
    """As what a stage's output is handed on: by a message, or within the rank."""
    stage, number, route = instruction.stage, instruction.micro_batch, workspace.route
    if (stage, number) in route.activations_sent:
        return (OUTPUT, stage, number)
    return (ACTIVATION, route.after.get(stage, NONE), number)


def _finish(workspace: Workspace, stage: int, targets: torch.Tensor) -> Finish:
    """What makes the weighted loss of the last stage's output."""
    module, loss_function = workspace.resources.stages[stage], workspace.resources.loss_function

    def finish(output: torch.Tensor) -> torch.Tensor:
        taken = loss_input(module, loss_function, output)
        return loss_function(taken, targets) * workspace.micro_batch_weight

    return finish


def backward_segment(workspace: Workspace, instruction: Instruction) -> Issue:
    """Accumulate the gradients of a segment's weights, and leave what crosses the border before it."""
    return _backward(workspace, instruction, instruction.part)


def input_segment(workspace: Workspace, instruction: Instruction) -> Issue:
    """Leave what crosses the border before a segment, and what the gradients of its weights need."""
    return _backward(workspace, instruction, instruction.part)


def first_backward_segment(workspace: Workspace, instruction: Instruction) -> Issue:
    """Run what completes a backward pass, and hand on the gradient of the stage's input."""
    return _backward(workspace, instruction, 0)


def _backward(workspace: Workspace, instruction: Instruction, segment: int) -> Issue:
    stage, number, label = instruction.stage, instruction.micro_batch, str(instruction)
    route, values, resources = workspace.route, workspace.values, workspace.resources
    cut, bucket = workspace.segments[stage], resources.buckets[stage]
    begins, completes = segment == cut.last_backward, segment == 0
    first, differentiates = stage not in route.before, begins and stage not in route.after
    splits = cut.split[segment]
    if (stage, number) in route.gradients_sent:
        handed_as = (INPUT_GRADIENT, stage, number)
    else:
        handed_as = (OUTPUT_GRADIENT, route.before.get(stage, NONE), number)
    made_as = handed_as if completes else (SEGMENT_GRADIENT, stage, number)
    last = instruction.position in workspace.last_gradients
    require_weights, weights = weights_required(workspace, stage), (WEIGHTS, stage, NONE)
    add_up = added_up(workspace, instruction)

    def go_back(tape: Tape, gradient: torch.Tensor | None, *, step: int) -> Crossed:
        bucket.claim()
        crossed = cut.go_back(tape, segment, gradient)
        add_up()
        return crossed

    run = seen(workspace, instruction, go_back, ends=completes)

    def issue(stream: Stream) -> Completion:
        saved = values.pop((SAVED, stage, number))
        tape = saved.content
        given = _given_back(workspace, instruction, begins, differentiates)
        made, left, step = Value(), Value(), workspace.step

        def work() -> None:
            require_weights()
            gradient = given.content
            if differentiates and workspace.gradient_weight != 1.0:
                gradient = torch.full_like(tape.output, workspace.gradient_weight)
            made.content, left.content = run(tape, gradient, step=step)

        ended = stream.run(label, work, saved, given, values.get(weights, THERE), bucket.buffer.emptied)
        made.completion = left.completion = ended
        if not completes:
            values[SAVED, stage, number] = Value.of(tape, ended)
        if not completes or not first:
            values[made_as] = made
        if splits:
            values[SEGMENT_WEIGHT, stage, number] = left
        if last:
            values[GRADIENT, stage, NONE] = Value.of(None, ended)
        return ended

    return issue


def _given_back(workspace: Workspace, instruction: Instruction, begins: bool, differentiates: bool) -> Value:
    if differentiates:
        return THERE
    name = OUTPUT_GRADIENT if begins else BORDER_GRADIENT
    return workspace.values.pop((name, instruction.stage, instruction.micro_batch))


def weight_segment(workspace: Workspace, instruction: Instruction) -> Issue:
    """Accumulate the gradients of a segment's weights, whose input part has run."""
    stage, number, label = instruction.stage, instruction.micro_batch, str(instruction)
    bucket = workspace.resources.buckets[stage]

    def accumulate(left: Value, *, step: int) -> None:
        bucket.claim()
        for part in left.content:
            part.run()

    run = seen(workspace, instruction, accumulate, ends=False)

    def issue(stream: Stream) -> Completion:
        left, step = workspace.values.pop((SEGMENT_WEIGHT, stage, number)), workspace.step

        def work() -> None:
            run(left, step=step)

        return stream.run(label, work, left, bucket.buffer.emptied)

    return issue
