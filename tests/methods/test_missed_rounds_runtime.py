"""Law: a rank that goes on without a meeting of its replicas ends the run, and names the meeting."""

from __future__ import annotations

import pytest
from equality_table import Row
from methods.test_cser_ranks_runtime import train, with_sync
from pool import WorkerPool
from small_plans import tiny

from weft.describe.model import ModelConfig
from weft.describe.plan import Plan
from weft.errors import RunError

pytestmark = pytest.mark.processes


def skip(rank: int, ranks: int, config: ModelConfig, plan: Plan) -> str:
    """What a rank says that goes on behind the step of a meeting."""
    try:
        train(rank, ranks, config, plan, range(0, 3, 2))
    except RunError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("method", "options", "what"),
    [
        ("cser", {"reset_ratio": 2.0}, "reset"),
        ("local-averaging", {}, "average"),
    ],
)
def test_a_missed_meeting_is_named(
    worker_pool: WorkerPool, method: str, options: dict[str, float], what: str
) -> None:
    config = tiny(layers=2)
    plan = with_sync(Row(config, dp=2).plan, method, every=2, **options)
    for said in worker_pool.run(skip, config, plan, ranks=2):
        assert f"stage 0: the {what} after step 1 was missed; now it is step 2" in said
