"""What a handler is, and the names of the values that handlers hand to each other.

A handler is called once per instruction when the executor is made and returns what to do in every step:
`Compute` runs on the main thread, `Transfer` is posted and goes on by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from weft.program.program import Instruction
from weft.run.work_queue import Handle, Stamp
from weft.run.workspace import Workspace


@dataclass(frozen=True, slots=True)
class Compute:
    """`ready` waits for what the instruction reads; `execute` computes."""

    ready: Callable[[], None]
    execute: Callable[[], None]


@dataclass(frozen=True, slots=True)
class Transfer:
    """`post` starts the transfer and returns; its handle is done when the transfer is."""

    post: Callable[[Stamp], Handle]


Handler = Callable[[Workspace, Instruction], Compute | Transfer]

OUTPUT, INPUT_GRADIENT = "output", "input_gradient"
SAVED, MICRO_BATCH, REDUCED, GATHERED = "saved", "micro_batch", "reduced_gradient", "gathered_weights"
WEIGHT_PART, REDUCED_TIED, NORM = "saved_for_weight", "reduced_tied_gradient", "gradient_norm"
