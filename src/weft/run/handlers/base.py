"""What a handler is, and the names of the values that handlers hand to each other.

A handler is called once per instruction when the executor is made, and returns what issues the instruction in
every step: it takes the stream of the instruction and returns the end of its work; see `weft.run.streams`.
A handler knows what others do by the names of their values only.
"""

from __future__ import annotations

from collections.abc import Callable

from weft.program.program import Instruction
from weft.run.streams import Completion, Stream
from weft.run.workspace import Workspace

Issue = Callable[[Stream], Completion]
Handler = Callable[[Workspace, Instruction], Issue]

# Of a stage and a micro-batch. The first two and the last two of the first line are messages' contents, too:
# an output is sent as the next stage's activation, an input gradient as the stage before's output gradient.
ACTIVATION, OUTPUT, INPUT_GRADIENT, OUTPUT_GRADIENT = (
    "activation",
    "output",
    "input_gradient",
    "output_gradient",
)
SAVED, WEIGHT_PART = "saved", "saved_for_weight"

# Of a stage: what has been done last to its weights and to its gradient in this step. Whoever changes either
# follows it and puts itself in its place, so that the last one speaks for all.
WEIGHTS, GRADIENT = "weights", "gradient"
