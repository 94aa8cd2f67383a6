"""Law: a pipeline of two paths, whose devices hold two stages each, trains like one process."""

from __future__ import annotations

import pytest
from pool import WorkerPool
from run.test_equality import require_equal
from small_jobs import make_plan, tiny

pytestmark = pytest.mark.processes


@pytest.mark.parametrize(
    ("family", "pp", "dp", "micro_batches"), [("gpt", 2, 1, 6), ("gpt", 4, 1, 4), ("llama", 2, 2, 2)]
)
def test_two_paths_train_like_one_process(
    worker_pool: WorkerPool, family: str, pp: int, dp: int, micro_batches: int
) -> None:
    config = tiny(family)
    plan = make_plan(config, pp=pp, dp=dp, schedule="chimera", micro_batches=micro_batches)
    require_equal(worker_pool, config, plan, bitwise=False)
