"""Stages that are not trained: what their programs leave out, and that nothing else changes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from program.layouts import asked, pipelines, schedule_layout
from program.mutations import with_value, without_row
from program.rendezvous import stuck_rows

from weft.describe.plan import Sharding
from weft.errors import InputError
from weft.methods.sharding.kinds import REDUCE
from weft.program.build import build_evaluation_program, build_training_program, program_orders
from weft.program.kinds import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    KINDS,
    RECEIVE_GRADIENT,
    SEND_GRADIENT,
    STEP,
)
from weft.program.program import Program
from weft.program.schedules import get_schedule
from weft.program.verify import verify
from weft.timeline.figures import peak_in_flight

Case = tuple[str, int, int, tuple[int, ...], int]

LEVELS: tuple[Sharding, ...] = ("zero-0", "zero-1", "zero-2", "zero-3")


def program_of(case: Case, frozen_stages: int, sharding: Sharding = "zero-0") -> Program:
    layout = schedule_layout(*case, frozen_stages=frozen_stages)
    return build_training_program(layout, get_schedule(case[0]), {}, methods=asked(sharding))


@st.composite
def frozen(draw: st.DrawFn) -> tuple[Case, int]:
    case = draw(pipelines())
    return case, draw(st.integers(0, case[2] - 1))


@given(frozen())
def test_what_is_computed_is_the_trained_program_less_the_backwards_of_frozen_stages(
    frozen: tuple[Case, int],
) -> None:
    case, count = frozen
    program = program_of(case, count)
    assert verify(program) == []
    assert stuck_rows(program) == set()
    for whole, less in zip(program_orders(program_of(case, 0)), program_orders(program), strict=True):
        kept = (whole.kind == FORWARD) | (whole.stage >= count)
        for column, left in zip(whole, less, strict=True):
            assert np.array_equal(column[kept], left)


@given(frozen(), st.sampled_from(LEVELS))
def test_no_gradient_reaches_a_frozen_stage(frozen: tuple[Case, int], sharding: Sharding) -> None:
    (*sizes, micro_batches, lanes), count = frozen
    equal = (*sizes, micro_batches[:1] * len(micro_batches), lanes)
    program = program_of(equal, count, sharding)
    assert verify(program) == []
    columns = program.columns
    here = set(columns.kind[columns.stage < count].tolist())
    assert not here & {BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, RECEIVE_GRADIENT, REDUCE, STEP}
    back = columns.kind == SEND_GRADIENT
    assert (columns.part[back] >= count).all()
    assert (program.obligations.backward[:, 0] >= count).all()
    assert (program.obligations.step[:, 0] >= count).all()


@given(frozen())
def test_a_frozen_stage_keeps_nothing_in_flight(frozen: tuple[Case, int]) -> None:
    case, count = frozen
    program = program_of(case, count)
    columns = program.columns
    for rank, peak in enumerate(peak_in_flight(program)):
        mine = columns.rank == rank
        trained = mine & (columns.kind == FORWARD) & (columns.stage >= count)
        assert (peak == 0) == (not trained.any())
    before = peak_in_flight(program_of(case, 0))
    assert all(less <= whole for less, whole in zip(peak_in_flight(program), before, strict=True))


@pytest.mark.parametrize("kind", [BACKWARD, REDUCE, STEP])
def test_a_program_that_trains_a_frozen_stage_is_refused(kind: int) -> None:
    program = program_of(("1f1b", 3, 3, (2, 2), 1), 1)
    columns = program.columns
    row = int(np.flatnonzero((columns.kind == kind) & (columns.stage == 1))[0])
    assert verify(with_value(program, "stage", row, 0)), KINDS[kind].name


def test_what_is_sent_or_reduced_for_a_frozen_stage_is_refused() -> None:
    """Backwards and steps of stage 0 are gone, the messages and reductions for them are still there."""
    case = ("1f1b", 2, 2, (1, 1), 1)
    program = replace(program_of(case, 0), obligations=program_of(case, 1).obligations)
    columns = program.columns
    gone = np.flatnonzero(np.isin(columns.kind, (BACKWARD, STEP)) & (columns.stage == 0))
    for row in gone[::-1].tolist():
        program = without_row(program, row)
    assert {str(violation) for violation in verify(program)} == {
        "values: nothing reads the 'output_gradient' that rank 0 RB0.0 from rank 2 makes",
        "values: nothing reads the 'output_gradient' that rank 1 RB0.1 from rank 3 makes",
        "values: rank 0 R0 reads 'weight_gradient', which nothing makes on rank 0",
        "values: rank 1 R0 reads 'weight_gradient', which nothing makes on rank 1",
        "values: nothing consumes the 'reduced_gradient' that rank 0 R0 makes",
        "values: nothing consumes the 'reduced_gradient' that rank 1 R0 makes",
    }


def test_gradients_end_at_the_first_trained_stage() -> None:
    program = program_of(("1f1b", 2, 2, (2, 2), 1), 1)
    words = [" ".join(str(entry) for entry in program.of_rank(rank)) for rank in (0, 2)]
    assert words == ["F0.0 SF0.0 F0.1 SF0.1", "RF1.0 RF1.1 F1.0 B1.0 F1.1 B1.1 R1 O1"]


def test_evaluation_runs_frozen_stages_like_others() -> None:
    case = ("breadth-first", 2, 4, (2,), 1)
    one = build_evaluation_program(schedule_layout(*case, frozen_stages=2))
    two = build_evaluation_program(schedule_layout(*case))
    assert np.array_equal(one.ids, two.ids)


@pytest.mark.parametrize(("count", "nearest"), [(-1, 0), (3, 2), (9, 2)])
def test_one_stage_must_train(count: int, nearest: int) -> None:
    with pytest.raises(InputError) as caught:
        program_of(("gpipe", 3, 3, (1,), 1), count)
    assert [str(violation) for violation in caught.value.violations] == [
        f"frozen stages: {count} is not one of 0..2; one stage must train (nearest valid: {nearest})"
    ]
