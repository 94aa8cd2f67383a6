"""Law: experts that move to other ranks, with their states, change no bit of what a run computes."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from equality_table import Row, together, train
from late_accelerator import late_device
from methods.rows.expert_balance import MIXTRAL, MOVES, Balances
from one_process import Outcome
from pool import WorkerPool

from weft.describe.plan import Plan
from weft.methods.expert_balance.report import RANK_LOAD

MOVING = Balances(ranks=2, moves=MOVES)
BASE = Row(MIXTRAL, "gpipe", ep=2, optimizer="adamw", steps=3, methods=(MOVING,))

# Further ways to divide a run, which `make tables` tests.
LATER = partial(pytest.param, marks=pytest.mark.tables)


@pytest.mark.processes
@pytest.mark.parametrize(
    "changes",
    [
        {},
        LATER({"dp": 2, "sharding": "zero-1"}),
        LATER({"dp": 2, "sharding": "zero-2", "precision": "bf16"}),
        {"schedule": "breadth-first", "loops": 2, "dp": 2, "sharding": "zero-3", "precision": "bf16"},
        LATER({"pp": 2, "precision": "fp32", "recompute": "full"}),
        {"tp": 2, "dp": 2, "sharding": "zero-2"},
        LATER({"cp": 2}),
    ],
    ids=str,
)
def test_moved_experts_train_to_the_same_bits(worker_pool: WorkerPool, changes: dict[str, Any]) -> None:
    moving = replace(BASE, **changes)
    staying = replace(moving, methods=(Balances(ranks=2),))
    (told, tensors), (expected, unmoved) = (
        together(worker_pool.run(train, row, row.plan, ranks=row.plan.ranks)) for row in (moving, staying)
    )
    # Only what a rank computes differs.
    loads = [[step.pop(RANK_LOAD) for step in one] for one in (told, expected)]
    assert loads[0][0] == loads[1][0]
    assert loads[0][1:] != loads[1][1:]
    assert told == expected
    assert tensors.keys() == unmoved.keys()
    assert [name for name in tensors if not torch.equal(tensors[name], unmoved[name])] == []


def train_late(rank: int, ranks: int, row: Row, plan: Plan) -> Outcome:
    with late_device(11 + rank, kernels=True):
        return train(rank, ranks, row, plan)


@pytest.mark.processes
def test_experts_move_after_all_work_of_a_late_device(worker_pool: WorkerPool) -> None:
    row = replace(BASE, dp=2, sharding="zero-2", transport="device")
    outcomes = [
        together(worker_pool.run(function, row, row.plan, ranks=row.plan.ranks))
        for function in (train, train_late)
    ]
    (told, tensors), (expected, others) = outcomes
    assert told == expected
    assert [name for name in tensors if not torch.equal(tensors[name], others[name])] == []
