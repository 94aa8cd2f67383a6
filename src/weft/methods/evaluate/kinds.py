"""The instructions of evaluation in bubbles: copies of weights, held-out forward passes, and their messages.

Each stage copies its weights before its optimizer step. So all copies of one step have the weights of one
model. Passes of later steps may read them.
"""

from __future__ import annotations

from weft.program import places
from weft.program.kinds import computation, message
from weft.program.values import PER_MICRO_BATCH, PER_STAGE, VALUES, Read, ValueKind

VALUES.register(ValueKind(name="held_out_weights", scope=PER_STAGE, until="written"))
VALUES.register(ValueKind(name="held_out_output", scope=PER_MICRO_BATCH, until="step"))
VALUES.register(ValueKind(name="held_out_activation", scope=(*PER_MICRO_BATCH, "part"), until="read"))
VALUES.register(
    ValueKind(name="held_out_message", scope=("peer", "stage", "part", "micro_batch"), until="freed")
)

COPY_WEIGHTS = computation("copy_weights", "CW", ("weights",), ("held_out_weights",))
HELD_OUT_FORWARD = computation(
    "held_out_forward",
    "HF",
    (
        Read(
            "held_out_activation",
            at=places.from_previous,
            otherwise=Read("held_out_output", at=places.of_previous),
        ),
        "held_out_weights",
    ),
    ("held_out_output",),
)
SEND_HELD_OUT, RECEIVE_HELD_OUT = message(
    "held_out", "H", Read("held_out_output"), "held_out_activation", "held_out_message"
)
