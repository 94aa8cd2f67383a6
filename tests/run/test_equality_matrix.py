"""Law: every plan trains like one process; every two choices of a plan meet here once.

All of them: `python benchmarks/equality_matrix.py`.
"""

from __future__ import annotations

from functools import cache

import pytest
from equality_matrix import Case, Outcome, alone, cases, covering, difference, model, train
from pool import WorkerPool
from small_jobs import make_program

from weft.program.verify import require_valid

MOST_RANKS = 4
COVERING = covering(list(cases(MOST_RANKS)))


def test_the_subset_has_every_choice() -> None:
    everything = list(cases(MOST_RANKS))
    assert len(COVERING) < len(everything) / 5
    for choice in ("pp", "dp", "tp", "order", "sharding", "recompute", "clips", "headed"):
        assert {getattr(case, choice) for case in COVERING} == {getattr(case, choice) for case in everything}


@pytest.fixture(scope="module")
def reference(worker_pool: WorkerPool):
    """What one process computes; it depends on the global batch, on clipping and on a head alone."""

    @cache
    def compute(dp: int, clips: bool, headed: bool) -> Outcome:
        case = Case(1, dp, 1, ("gpipe", 1), "zero-0", "none", clips, headed)
        return worker_pool.run(alone, case, ranks=1)[0]

    return compute


@pytest.mark.processes
@pytest.mark.parametrize("case", COVERING, ids=str)
def test_a_plan_trains_like_one_process(worker_pool: WorkerPool, reference, case: Case) -> None:
    require_valid(make_program(model(), case.plan()))
    found = worker_pool.run(train, case, ranks=case.ranks)
    assert difference(found, reference(case.dp, case.clips, case.headed)) <= 1e-9
