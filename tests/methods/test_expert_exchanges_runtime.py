"""Laws: mixtures whose rows are exchanged between segments train like those inside of passes, to the bit.

Rows of the equality table hold them against one process.
"""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import pytest
from equality_table import Outcome, Row, train
from methods.rows.expert_balance import Balances
from methods.rows.expert_exchanges import LEVELS, MIXTRAL, ODD, SHARED_EXPERTS, Exchanges
from methods.rows.gradient_norm import Clips
from pool import WorkerPool

from weft.describe.plan import Plan
from weft.methods.expert_exchanges.program import WAYS, Way
from weft.run.parallel import expert_ranks, row_exchange
from weft.run.parallel.expert_ranks import Dispatch
from weft.run.stage import expert_pieces

KEPT = ("none", "full", "selective")


def train_all(rank: int, ranks: int, rows: list[Row], plans: list[Plan]) -> list[Outcome]:
    return [train(rank, ranks, row, plan) for row, plan in zip(rows, plans, strict=True)]


@pytest.mark.processes
@pytest.mark.parametrize(
    "row",
    [
        Row(MIXTRAL, "1f1b", ep=2, steps=2),
        Row(SHARED_EXPERTS, "1f1b", ep=2, precision="fp32", methods=(Clips(0.2),)),
        Row(SHARED_EXPERTS, ep=2, steps=2, methods=(Balances(samples=1, micro_weight=0.5, ranks=2),)),
        Row(MIXTRAL, "1f1b", ep=2, steps=2, recompute="full"),
        Row(SHARED_EXPERTS, "1f1b", ep=2, precision="fp32", recompute="selective"),
        # Ranks divide the columns of experts, or the tokens, and exchange inside of segments.
        Row(SHARED_EXPERTS, "1f1b", tp=2, ep=2, steps=2, methods=(Clips(0.2),)),
        Row(SHARED_EXPERTS, tp=2, ep=2, precision="fp32", recompute="selective"),
        Row(SHARED_EXPERTS, cp=2, ep=2, precision="fp32", recompute="full", masks=True),
        Row(MIXTRAL, "zb-h1", pp=2, tp=2, ep=2),
        Row(ODD, tp=2, ep=2, recompute="full"),
        Row(
            SHARED_EXPERTS,
            ep=2,
            steps=2,
            recompute="full",
            methods=(Balances(samples=1, micro_weight=0.5, ranks=2),),
        ),
    ],
    ids=str,
)
def test_segments_train_like_whole_passes_to_the_bit(worker_pool: WorkerPool, row: Row) -> None:
    rows = [replace(row, methods=(*row.methods, Exchanges(way))) for way in WAYS]
    ranks = rows[0].plan.ranks
    for inside, *others in worker_pool.run(train_all, rows, [one.plan for one in rows], ranks=ranks):
        for told, tensors in others:
            assert told == inside[0]
            assert tensors.keys() == inside[1].keys()
            for name, value in tensors.items():
                assert value.equal(inside[1][name]), name


def told_levels(rank: int, ranks: int, rows: list[Row], plans: list[Plan]) -> list[tuple[Outcome, int, int]]:
    """How each run ends, how often it exchanges rows, and how often among some of the ranks."""
    found = []
    for row, plan in zip(rows, plans, strict=True):
        with (
            patch.object(expert_ranks, "exchanged", wraps=expert_ranks.exchanged) as exchanges,
            patch.object(row_exchange, "_from_some", wraps=row_exchange._from_some) as parts,
        ):
            outcome = train(rank, ranks, row, plan)
        found.append((outcome, exchanges.call_count, parts.call_count))
    return found


@pytest.mark.processes
@pytest.mark.parametrize("way", WAYS)
def test_exchanges_in_two_levels_train_like_those_at_once_to_the_bit(
    worker_pool: WorkerPool, way: Way
) -> None:
    rows = [
        LEVELS("1f1b", precision="fp32", recompute="full", methods=(Exchanges(way, per_node),))
        for per_node in (1, 2)
    ]
    for at_once, in_levels in worker_pool.run(told_levels, rows, [one.plan for one in rows], ranks=4):
        (told, tensors), exchanges, parts = in_levels
        assert told == at_once[0][0]
        assert all(value.equal(at_once[0][1][name]) for name, value in tensors.items())
        assert (exchanges, parts) == (at_once[1], 2 * at_once[1])
        assert exchanges > at_once[2] == 0


def counted(rank: int, ranks: int, rows: list[Row], plans: list[Plan]) -> list[tuple[int, int]]:
    """How often experts compute in each run, and rows are sent."""
    found = []
    for row, plan in zip(rows, plans, strict=True):
        with (
            patch.object(expert_pieces, "compute_rows", wraps=expert_pieces.compute_rows) as computed,
            patch.object(Dispatch, "send", autospec=True, side_effect=Dispatch.send) as sent,
        ):
            train(rank, ranks, row, plan)
        found.append((computed.call_count, sent.call_count))
    return found


@pytest.mark.processes
def test_a_recomputed_segment_computes_its_experts_again_and_exchanges_nothing_again(
    worker_pool: WorkerPool,
) -> None:
    rows = [Row(MIXTRAL, "1f1b", ep=2, recompute=one, methods=(Exchanges("instructions"),)) for one in KEPT]
    for found in worker_pool.run(counted, rows, [one.plan for one in rows], ranks=2):
        (computed, sent), *others = found
        assert computed
        # Under either word a segment runs again; `selective` takes its products from the first run.
        assert others == [(2 * computed, sent)] * 2
