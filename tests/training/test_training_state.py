"""Which run may go on from a checkpoint."""

from __future__ import annotations

from dataclasses import replace

import pytest

from weft.errors import InputError
from weft.training.training_state import TrainingState, require_same_job, require_steps_left

SAVED = TrainingState(
    step=7,
    samples=56,
    plan_id="f00d",
    seed=3,
    model="cafe",
    precision="fp32",
    data="beef",
    first_loss=5.5,
)


def test_another_job_is_refused_with_every_difference() -> None:
    other = replace(SAVED, seed=4, model="d00d", precision="fp64", data="bead")
    with pytest.raises(InputError) as refused:
        require_same_job(other, SAVED, "here")
    assert {violation.nearest for violation in refused.value.violations} == {"cafe", "fp32", "3", "beef"}
    assert all(violation.where == "here" for violation in refused.value.violations)


def test_another_plan_of_the_same_job_may_go_on_while_steps_are_left() -> None:
    begin = replace(SAVED, step=0, samples=0, plan_id="feed", first_loss=0.0)
    require_same_job(begin, SAVED, "here")
    require_steps_left(begin, SAVED, 8)
    require_steps_left(SAVED, SAVED, 7)
    with pytest.raises(InputError, match=r"train\.steps: 7; 7 are done, .* \(nearest valid: 8\)"):
        require_steps_left(begin, SAVED, 7)
