"""What a search found, as figures and tables."""

from __future__ import annotations

from dataclasses import replace

import pytest
from web.plans import searched

from weft.cli.tables.search import trial_record, trials_table
from weft.training.trials import Trial, TrialOutcome


def test_trials_as_figures() -> None:
    ranking = searched().ranking
    assert ranking is not None
    best = ranking.fitting[0]
    failed = Trial(candidate=best, outcome=TrialOutcome.FAILED, steps=10, reason="it fell over")
    record = trial_record(failed)
    assert (record["measured_step_s"], record["spread"], record["reason"]) == (None, None, "it fell over")
    ran = trial_record(replace(failed, outcome=TrialOutcome.MEASURED, seconds=(2.0, 4.0, 3.0), reason=""))
    assert (ran["measured_step_s"], ran["spread"]) == (3.0, pytest.approx(1 / 3))
    assert trials_table([failed]).row_count == 1
