"""A rank runs its part only if that is the part that was verified; all ranks refuse together."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from pool import WorkerPool
from small_plans import make_plan, make_program, tiny

from weft.errors import InputError
from weft.program.rank_program import digests, part_of
from weft.run.verified import require_verified

pytestmark = pytest.mark.processes

PROGRAM = make_program(tiny(), make_plan(tiny(), pp=2))


def refusal(rank: int, ranks: int, differing: int | None, *, refused: bool = False) -> str:
    """What a rank says when rank `differing` has compiled another program, or rank 0 refuses it."""
    part, told = part_of(PROGRAM, rank), digests(PROGRAM)
    other = replace(part, columns=replace(part.columns, bytes=part.columns.bytes + 1))
    own = [part, other if rank == differing else part]
    try:
        require_verified(own, [told, told] if rank == 0 and not refused else None)
    except InputError as error:
        return str(error)
    return ""


def test_parts_of_the_verified_programs_are_accepted(worker_pool: WorkerPool) -> None:
    assert worker_pool.run(refusal, None, ranks=2) == ["", ""]


@pytest.mark.parametrize("rank", [0, 1])
def test_another_part_is_refused_by_every_rank_in_one_line(worker_pool: WorkerPool, rank: int) -> None:
    line = f"program: rank {rank} has compiled another part of it than was verified"
    for said in worker_pool.run(refusal, rank, ranks=2):
        assert said.startswith(line)
        assert "\n" not in said


def without_rank_0(rank: int, ranks: int) -> str:
    return refusal(rank, ranks, None, refused=True)


def test_what_rank_0_refuses_no_rank_runs(worker_pool: WorkerPool) -> None:
    assert worker_pool.run(without_rank_0, ranks=2) == ["", "program: rank 0 has refused it"]


def test_a_digest_uses_all_bits() -> None:
    # They travel as signed numbers.
    assert (digests(make_program(tiny(), make_plan(tiny(), pp=4, dp=4))) > np.uint64(2**63)).any()
