"""Evaluation in bubbles as work of every step: a copy of weights, then forward passes through all stages.

An evaluation takes several steps. Its copies act in the first one, and its passes read them in all. In other
steps the rows do nothing. A prediction counts all of them in every step.
"""

from __future__ import annotations

from weft.describe.layer_graph import LayerGraph
from weft.describe.plan import Plan
from weft.methods.bubble_filling.options import BubbleOptions
from weft.methods.bubble_filling.step_program import step_pass
from weft.methods.bubble_filling.step_works import StepRows, StepWork, ThroughStages
from weft.methods.evaluate.kinds import (
    COPY_WEIGHTS,
    HELD_OUT_FORWARD,
    RECEIVE_HELD_OUT,
    SEND_HELD_OUT,
)
from weft.methods.evaluate.sizes import NAME, pieces_of


def rows(plan: Plan, graph: LayerGraph, asked: BubbleOptions) -> tuple[StepRows, ...]:
    """Return the rows of each stage in a step."""
    through = ThroughStages(SEND_HELD_OUT, RECEIVE_HELD_OUT)
    return (
        StepRows(kind=COPY_WEIGHTS, pieces=1, before_step=True),
        StepRows(kind=HELD_OUT_FORWARD, pieces=pieces_of(plan, asked), messages=through),
    )


WORK = StepWork(method=NAME, rows=rows)
PASS = step_pass(WORK)
