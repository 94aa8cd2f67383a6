"""The number of held-out micro-batches of an evaluation, and of those in a step."""

from __future__ import annotations

from weft.describe.plan import Plan
from weft.describe.run_tables.training import HELD_OUT_SAMPLES
from weft.methods.bubble_filling.options import BubbleOptions

NAME = "evaluate"


def most_micro_batches(plan: Plan) -> int:
    """Return the most held-out micro-batches that each replica evaluates at a time."""
    batches = -(-HELD_OUT_SAMPLES // plan.global_batch)
    return batches * plan.stages[0].replicas[0].micro_batches


def pieces_of(plan: Plan, asked: BubbleOptions) -> int:
    """Return the held-out micro-batches of a replica in a step, the fewest that end in `most_steps`."""
    return -(-most_micro_batches(plan) // asked.most_steps)


def most_steps_of(plan: Plan, asked: BubbleOptions) -> int:
    """Return the most steps of an evaluation."""
    return -(-most_micro_batches(plan) // pieces_of(plan, asked))
