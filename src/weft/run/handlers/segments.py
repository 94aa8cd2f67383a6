"""Segments of a stage's passes on one micro-batch, and the exchanges at the borders between them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from weft.program.program import NONE, Instruction
from weft.run.handlers.base import (
    BORDER_GRADIENT,
    GRADIENT,
    SAVED,
    SEGMENT_GRADIENT,
    SEGMENT_INPUT,
    SEGMENT_OUTPUT,
    SEGMENT_WEIGHT,
    WEIGHT_PART,
    WEIGHTS,
    Handler,
    Issue,
)
from weft.run.handlers.crossing import (
    fill,
    gradients_left,
    gradients_taken,
    inputs_taken,
    leave,
    messages_of,
    outputs_left,
)
from weft.run.handlers.passes import added_up, seen, weights_required
from weft.run.parallel.tensor_stage import leads_replica
from weft.run.stage.borders import received
from weft.run.stage.documents import tell_documents
from weft.run.stage.pieces import Tape
from weft.run.stage.roots import root_gradient
from weft.run.stage.stage_pass import roots_of, weighted_loss
from weft.run.streams import THERE, Completion, Stream, Value
from weft.run.workspace import Workspace

if TYPE_CHECKING:
    from weft.run.stage.segments import Crossed
    from weft.run.stage.split_backward import WeightPart


def whole_or_cut(whole: Handler, cut: Handler) -> Handler:
    """Return a handler of whole passes, and of the last segments of cut passes."""

    def handle(workspace: Workspace, instruction: Instruction) -> Issue:
        handler = cut if instruction.stage in workspace.segments else whole
        return handler(workspace, instruction)

    return handle


def forward_segment(workspace: Workspace, instruction: Instruction) -> Issue:
    """Run a segment of a stage forward, and leave the value that crosses the border behind it."""
    return _forward(workspace, instruction, instruction.part)


def last_forward_segment(workspace: Workspace, instruction: Instruction) -> Issue:
    """Run the last segment of a forward pass; the last stage also computes the weighted loss."""
    return _forward(workspace, instruction, workspace.segments[instruction.stage].last_forward)


def _forward(workspace: Workspace, instruction: Instruction, segment: int) -> Issue:
    stage, number, label = instruction.stage, instruction.micro_batch, str(instruction)
    values, resources = workspace.values, workspace.resources
    cut, borders = workspace.segments[stage], resources.borders[stage]
    begins, completes = segment == 0, segment == cut.last_forward
    read = borders.samples if begins else ()
    ends = completes and not borders.after
    taken = inputs_taken(workspace, stage, number) if begins else ()
    left = outputs_left(workspace, stage, number) if completes else ()
    counts, loss = ends and leads_replica(resources.stages[stage]), weighted_loss(workspace, stage)
    saved, weights = (SAVED, stage, number), (WEIGHTS, stage, NONE)
    require_weights, statistics = weights_required(workspace, stage), resources.statistics[stage]
    roots = roots_of(workspace, stage)
    asked = ends or (begins and roots is not None and roots.reads_targets)

    def issue(stream: Stream) -> Completion:
        loaded = workspace.micro_batch(number, borders.splits, inputs=read, targets=asked, begins=begins)
        given = [workspace.crossed.pop(key) for key in taken]
        if not begins:
            given = [values.pop((SEGMENT_INPUT, stage, number))]
        # Each segment follows the one before, and leaves the tape to the next one.
        before = Value.of(Tape()) if begins else values[saved]
        tape = before.content
        made: Value[torch.Tensor] = Value()
        messages, step = messages_of(left), workspace.step
        rooted = None if roots is None or not completes else roots.empty()

        def work() -> None:
            require_weights()
            samples, targets, documents = loaded.content
            if samples:
                (entered,) = samples
            else:
                contents = [one.content for one in given]
                entered = received(borders.before.values(), contents)[0] if begins else contents[0]
                entered = entered.detach().requires_grad_()
            if begins:
                tell_documents(resources.stages[stage], documents)
                growth = None if roots is None else roots.growth(step, number, targets)
                cut.begin(tape, entered, growth)
            finish = partial(loss, targets=targets) if ends and targets is not None else None
            made.content = cut.run(tape, segment, entered, finish)
            if rooted is not None and tape.growth is not None:
                grown = tape.growth.take()
                for place, value in rooted.items():
                    value.content = grown[place].detach()
            if completes:
                statistics.count()
            fill(left, messages, [made.content])

        made.completion = ended = stream.run(label, work, loaded, *given, values.get(weights, THERE), before)
        values[saved] = Value.of(tape, ended)
        if rooted is not None and roots is not None:
            roots.leave(values, number, rooted, ended)
        if counts:
            workspace.losses.append(made)
        if not completes:
            values[SEGMENT_OUTPUT, stage, number] = made
        leave(workspace, left, messages, ended)
        return ended

    return issue


def backward_segment(workspace: Workspace, instruction: Instruction) -> Issue:
    """Accumulate the gradients of a segment's weights, and leave the gradient for the border before it."""
    return _backward(workspace, instruction, instruction.part)


def input_segment(workspace: Workspace, instruction: Instruction) -> Issue:
    """Leave the gradient for the border before a segment, and the weight parts of its regions."""
    return _backward(workspace, instruction, instruction.part, splits=True)


def last_input_segment(workspace: Workspace, instruction: Instruction) -> Issue:
    """Run the last segment of an input part, and leave the weight parts of all segments."""
    return _backward(workspace, instruction, 0, splits=True)


def first_backward_segment(workspace: Workspace, instruction: Instruction) -> Issue:
    """Run the last segment of a backward pass, and hand on the gradient of the stage's input."""
    return _backward(workspace, instruction, 0)


def _backward(workspace: Workspace, instruction: Instruction, segment: int, *, splits: bool = False) -> Issue:
    stage, number, label = instruction.stage, instruction.micro_batch, str(instruction)
    values, resources = workspace.values, workspace.resources
    cut, bucket, borders = workspace.segments[stage], resources.buckets[stage], resources.borders[stage]
    begins, completes = segment == cut.last_backward, segment == 0
    differentiates = begins and not borders.after
    taken = gradients_taken(workspace, stage, number) if begins else ()
    messages_left = gradients_left(workspace, stage, number) if completes else ()
    last = instruction.position in workspace.last_gradients
    require_weights, weights = weights_required(workspace, stage), (WEIGHTS, stage, NONE)
    add_up, roots = added_up(workspace, instruction), roots_of(workspace, stage)

    def go_back(tape: Tape, gradient: torch.Tensor | None, *, step: int) -> Crossed:
        bucket.claim()
        crossed = cut.go_back(tape, segment, gradient, splits=splits)
        add_up()
        return crossed

    run = seen(workspace, instruction, go_back, ends=completes and not splits)

    def issue(stream: Stream) -> Completion:
        saved = values.pop((SAVED, stage, number))
        tape = saved.content
        given = [workspace.crossed.pop(key) for key in taken]
        if not begins:
            given = [values.pop((BORDER_GRADIENT, stage, number))]
        step = workspace.step
        coefficients = roots.coefficients(workspace, number) if begins and roots is not None else ()
        made: Value[torch.Tensor | None] = Value()
        left: Value[list[WeightPart]] = Value()
        # Of an input part, those of the segments before; of a split segment alone, none are there.
        before = values.pop((SEGMENT_WEIGHT, stage, number), Value.of([])) if splits else Value.of([])
        messages = messages_of(messages_left)

        def work() -> None:
            require_weights()
            contents = [one.content for one in given]
            gradient: torch.Tensor | None
            if not begins:
                [gradient] = contents
            elif not differentiates:
                gradient = received(borders.after.values(), contents)[0]
            else:
                gradient = workspace.loss_gradient(tape.output)
            if coefficients:
                tape.of_root = partial(_gradient_of_root, coefficients, workspace.loss_factor())
            made.content, own = run(tape, gradient, step=step)
            left.content = [*before.content, *own]
            fill(messages_left, messages, [made.content])

        there = values.get(weights, THERE), bucket.buffer.emptied
        ended = stream.run(label, work, saved, *given, *there, *coefficients, before)
        made.completion = left.completion = ended
        if not completes:
            values[SAVED, stage, number] = Value.of(tape, ended)
            values[SEGMENT_GRADIENT, stage, number] = made
        leave(workspace, messages_left, messages, ended)
        if splits:
            values[WEIGHT_PART if completes else SEGMENT_WEIGHT, stage, number] = left
        if last:
            values[GRADIENT, stage, NONE] = Value.of(None, ended)
        return ended

    return issue


def _gradient_of_root(
    coefficients: Sequence[Value[torch.Tensor]],
    factor: float | torch.Tensor,
    place: int,
    root: torch.Tensor,
) -> torch.Tensor:
    return root_gradient(root, coefficients[place], factor)


def weight_segment(workspace: Workspace, instruction: Instruction) -> Issue:
    """Accumulate the gradients of a segment's weights after its input part."""
    stage, number, label = instruction.stage, instruction.micro_batch, str(instruction)
    bucket = workspace.resources.buckets[stage]

    def accumulate(left: Value[list[WeightPart]], *, step: int) -> None:
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


def cross_forward(workspace: Workspace, instruction: Instruction) -> Issue:
    """Exchange the value that a forward segment leaves for the next one."""
    return _cross(workspace, instruction, SEGMENT_OUTPUT, SEGMENT_INPUT, backward=False)


def cross_backward(workspace: Workspace, instruction: Instruction) -> Issue:
    """Exchange the gradient that a backward segment leaves for the one before it."""
    return _cross(workspace, instruction, SEGMENT_GRADIENT, BORDER_GRADIENT, backward=True)


def _cross(
    workspace: Workspace, instruction: Instruction, left_as: str, made_as: str, *, backward: bool
) -> Issue:
    stage, number, label = instruction.stage, instruction.micro_batch, str(instruction)
    group, values = workspace.resources.groups.collective[instruction.group], workspace.values
    cut, part = workspace.segments[stage], instruction.part

    def issue(stream: Stream) -> Completion:
        left: Value[torch.Tensor] = values.pop((left_as, stage, number))
        tape: Tape = values[SAVED, stage, number].content
        made: Value[torch.Tensor] = Value()
        values[made_as, stage, number] = made

        def work() -> None:
            made.content = cut.cross(tape, part, left.content, group, backward=backward)

        made.completion = stream.run(label, work, left)
        return made.completion

    return issue
