"""The handlers of evaluation in bubbles; they do nothing in steps without an evaluation."""

from __future__ import annotations

from collections.abc import Callable

from weft.methods.evaluate.runtime.state import BubbleEvaluation
from weft.methods.evaluate.sizes import NAME
from weft.program.program import Instruction
from weft.run.handlers.base import OUTPUT, WEIGHTS, Issue
from weft.run.handlers.messages import crossing_of, receive, send
from weft.run.handlers.passes import forward
from weft.run.streams import Completion, Ended, Stream
from weft.run.transport.channels import ACTIVATION
from weft.run.workspace import Workspace

PAYLOAD = "held_out"


def _state(workspace: Workspace) -> BubbleEvaluation:
    state = workspace.resources.methods[NAME]
    assert isinstance(state, BubbleEvaluation)
    return state


def copy_weights(workspace: Workspace, instruction: Instruction) -> Issue:
    """Copy the weights of a stage when an evaluation begins."""
    state, stage, label = _state(workspace), instruction.stage, str(instruction)

    def issue(stream: Stream) -> Completion:
        if not state.copies_weights(workspace.step):
            return Ended.now()
        return stream.run(label, lambda: state.copy(stage), workspace.latest(WEIGHTS, stage))

    return issue


def _in_evaluations(
    workspace: Workspace, instruction: Instruction, make: Callable[[Workspace, Instruction], Issue]
) -> Issue:
    """Let an instruction act on the values of held-out passes, while an evaluation needs it."""
    state = _state(workspace)
    inner = state.inner(workspace)
    act = make(inner, instruction)

    def issue(stream: Stream) -> Completion:
        batch = state.batch_of(workspace.step, instruction.micro_batch)
        if batch is None:
            return Ended.now()
        inner.begin(workspace.step, batch)
        ended = act(stream)
        state.keep(inner.losses)
        return ended

    return issue


def held_out_forward(workspace: Workspace, instruction: Instruction) -> Issue:
    """Run the copy of a stage on a held-out micro-batch; the last stage also computes the weighted loss."""
    return _in_evaluations(workspace, instruction, forward)


def send_held_out(workspace: Workspace, instruction: Instruction) -> Issue:
    def sending(inner: Workspace, one: Instruction) -> Issue:
        return send(
            inner, one, OUTPUT, PAYLOAD, (one.stage, one.part), crossing_of(inner, one, after=True).sent_shape
        )

    return _in_evaluations(workspace, instruction, sending)


def receive_held_out(workspace: Workspace, instruction: Instruction) -> Issue:
    def receiving(inner: Workspace, one: Instruction) -> Issue:
        edge, shape = (one.part, one.stage), crossing_of(inner, one, after=False).shape
        return receive(inner, one, ACTIVATION, PAYLOAD, edge, shape)

    return _in_evaluations(workspace, instruction, receiving)
