"""What a handler is, and the names of the values that handlers hand to each other.

A handler is called once per instruction when the executor is made, and returns what issues the instruction in
every step: it takes the stream of the instruction and returns the end of its work; see `weft.run.streams`.
A handler knows what others do by the names of their values only. Its work may be called after the host has
gone on: what the host changes from step to step (the step, the batch) is taken when an instruction is issued.
"""

from __future__ import annotations

from collections.abc import Callable

from weft.program.program import Instruction
from weft.run.streams import Completion, Stream
from weft.run.workspace import Workspace

Issue = Callable[[Stream], Completion]
Handler = Callable[[Workspace, Instruction], Issue]

# Of a stage and a micro-batch. What is sent to another rank has the names of the first line; what arrives, or
# is handed over within the rank, has the names of what messages carry (`weft.run.transport.channels`).
OUTPUT, INPUT_GRADIENT = "output", "input_gradient"
SAVED, WEIGHT_PART = "saved", "saved_for_weight"

# What crosses borders between segments of a pass, before and after ranks have exchanged it; and what is left
# of a segment whose input part has run. A pass is at one border at a time.
SEGMENT_OUTPUT, SEGMENT_INPUT = "segment_output", "segment_input"
SEGMENT_GRADIENT, BORDER_GRADIENT = "segment_gradient", "border_gradient"
SEGMENT_WEIGHT = "segment_for_weight"

# Of a stage: what has been done last to its weights and to its gradient in this step. Whoever changes either
# follows it and puts itself in its place, so that the last one speaks for all.
WEIGHTS, GRADIENT = "weights", "gradient"
