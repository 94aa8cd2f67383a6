"""Snapshots in a program: each stage copies weights and optimizer states before its next optimizer step.

Rows of a step copy the tensors of the step before, if a checkpoint keeps them; else they do nothing. They
read the weights, so a stage's step must wait for them. A prediction counts them in every step.
"""

from __future__ import annotations

from weft.describe.layer_graph import LayerGraph
from weft.describe.plan import Plan
from weft.methods.bubble_filling.options import BubbleOptions
from weft.methods.bubble_filling.step_program import step_pass
from weft.methods.bubble_filling.step_works import StepRows, StepWork
from weft.program.kinds import computation

NAME = "snapshot"
SNAPSHOT = computation("snapshot", "SN", ("weights",), ())
# Small pieces fit into small bubbles, and each one starts a few copies.
PIECES = 8


def rows(plan: Plan, graph: LayerGraph, asked: BubbleOptions) -> tuple[StepRows, ...]:
    """Return the rows of each stage in a step."""
    return (StepRows(kind=SNAPSHOT, pieces=PIECES, before_step=True),)


WORK = StepWork(method=NAME, rows=rows)
PASS = step_pass(WORK)
