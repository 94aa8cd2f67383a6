"""The rules of evaluation in bubbles: whole weights, and a run that asks for held-out losses."""

from __future__ import annotations

from collections.abc import Iterator

from weft.errors import Violation
from weft.methods.bubble_filling.options import options_of
from weft.methods.bubble_filling.whole_weights import whole_weights
from weft.methods.evaluate.sizes import NAME, most_steps_of
from weft.planning.job_rules import JobRule
from weft.planning.planned_job import PlannedJob


def _no_evaluations(planned: PlannedJob) -> Iterator[Violation]:
    """Yield a violation for a run that asks for no held-out losses, for too many, or compiles its stages."""
    asked, train = options_of(planned.plan), planned.run.train
    if asked is None or NAME not in asked.works:
        return
    steps, every = most_steps_of(planned.plan, asked), train.evaluate_every
    if 2 * steps > planned.last_step:
        problem = (
            f"{planned.last_step}; an evaluation in bubbles takes {steps} of them, behind as many others"
        )
        yield Violation("train.steps", problem, str(2 * steps))
    elif every is None:
        problem = "is left out, so no held-out losses fill bubbles"
        yield Violation("train.evaluate_every", problem, str(max(steps, min(100, planned.last_step - steps))))
    elif every < steps:
        problem = f"{every}; an evaluation in bubbles takes {steps} steps"
        yield Violation("train.evaluate_every", problem, str(steps))
    elif every + steps > planned.last_step:
        problem = (
            f"{every}; an evaluation of {steps} steps behind it ends after the last of {planned.last_step}"
        )
        yield Violation("train.evaluate_every", problem, str(planned.last_step - steps))
    if train.compile:
        problem = f"compiled stages are not copied, as {NAME} in bubbles needs"
        yield Violation("train.compile", problem, "false")


RULES = (*whole_weights(NAME), JobRule(refuse=_no_evaluations))
