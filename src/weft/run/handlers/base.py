"""The type of handlers, and the names of the values that handlers hand to each other.

The executor calls a handler once per instruction. The returned function issues the instruction in every step.
It takes the instruction's stream and returns the end of its work; see `weft.run.streams`. Handlers know each
other by the names of their values only. The work may run after the host has gone on. So the issue takes the
host's values of the step: its number and its batch.
"""

from __future__ import annotations

from collections.abc import Callable

from weft.program.program import Instruction
from weft.run.streams import Completion, Stream
from weft.run.workspace import Workspace
from weft.sync.base import Meeting

Issue = Callable[[Stream], Completion]
Handler = Callable[[Workspace, Instruction], Issue]

# Values of a stage and a micro-batch. Values for other ranks have the names of the first line. Values that
# arrive, or stay in the rank, have the names of messages' payloads (`weft.run.transport.channels`).
OUTPUT, INPUT_GRADIENT = "output", "input_gradient"
SAVED, WEIGHT_PART = "saved", "saved_for_weight"

# Values that cross borders between segments of a pass, before and after ranks exchange them; and the weight
# part of a segment after its input part. A pass is at one border at a time.
SEGMENT_OUTPUT, SEGMENT_INPUT = "segment_output", "segment_input"
SEGMENT_GRADIENT, BORDER_GRADIENT = "segment_gradient", "border_gradient"
SEGMENT_WEIGHT = "segment_for_weight"

# The last work on a stage's weights, and on its gradient, in this step. New work on either waits for this
# value and replaces it, so that the last work stands for all.
WEIGHTS, GRADIENT = "weights", "gradient"

# A stage's step whose first parts an instruction before it has run.
BEGUN = "begun_step"

# The last copy of weights and optimizer states, which steps of all stages follow.
COPIED = "copied"


def meeting_of(workspace: Workspace, instruction: Instruction) -> Meeting:
    """Return the meeting of a collective of replicas in the current step; call it when issuing."""
    resources = workspace.resources
    return Meeting(
        group=resources.groups.collective[instruction.group],
        stage=instruction.stage,
        step=workspace.step,
        part=instruction.part,
        replica=instruction.replica,
        seed=resources.seed,
    )
