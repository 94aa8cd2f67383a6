"""The rules of snapshots: whole weights, and a checkpoint with steps behind it."""

from __future__ import annotations

from collections.abc import Iterator

from weft.errors import Violation
from weft.methods.bubble_filling.options import options_of
from weft.methods.bubble_filling.whole_weights import whole_weights
from weft.methods.snapshot.program import NAME
from weft.planning.job_rules import JobRule
from weft.planning.planned_job import PlannedJob


def _no_checkpoints(planned: PlannedJob) -> Iterator[Violation]:
    """Yield a violation for a run whose only checkpoint is the last one."""
    asked, every = options_of(planned.plan), planned.run.checkpoint.every
    if asked is None or NAME not in asked.works or every < planned.last_step:
        return
    problem = f"{every}; no step follows the only checkpoint, so {NAME} in bubbles has nothing to copy"
    yield Violation("checkpoint.every", problem, str(max(1, planned.last_step - 1)))


RULES = (*whole_weights(NAME), JobRule(refuse=_no_checkpoints))
