"""Law: telling the norms of micro-batches changes no bit of a weight."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from equality_table import Row, train
from methods.rows.micro_batch_norms import GPT, TellsNorms
from pool import WorkerPool


@pytest.mark.processes
@pytest.mark.parametrize(
    "row",
    [Row(GPT, "1f1b", pp=2, dp=2, precision="fp32"), Row(GPT, "zb-h1", pp=2, precision="bf16")],
    ids=str,
)
def test_no_bit_of_a_weight_changes(worker_pool: WorkerPool, row: Row) -> None:
    telling = replace(row, methods=(TellsNorms(),))
    told, plain = (worker_pool.run(train, one, one.plan, ranks=one.plan.ranks) for one in (telling, row))
    for (steps, found), (nothing, expected) in zip(told, plain, strict=True):
        norms = [step["micro_batch_norms"] for step in steps]
        assert all(len(one) == row.plan.micro_batches and min(one) > 0.0 for one in norms)
        assert not any("micro_batch_norms" in step for step in nothing)
        assert all(torch.equal(found[name], expected[name]) for name in expected)
