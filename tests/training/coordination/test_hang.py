"""The watch over a run: what it calls a hang, whom it names, and what it leaves alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from program.rendezvous import stuck_rows
from small_plans import make_plan, make_program, tiny

from weft.describe.plan import Choice
from weft.describe.run_tables.training import ReportTable
from weft.errors import RunError
from weft.program.kinds import FORWARD, STEP
from weft.program.program import Program
from weft.program.rank_program import part_of
from weft.run.record.recorder import Recorder
from weft.training.coordination.hang import STEPS, HangWatch
from weft.training.directory.event_words import warnings
from weft.training.directory.run_directory import RunDirectory

PLAN_ID = "0123456789abcdef"
AFTER_S = 30.0


@pytest.fixture(scope="module")
def program() -> Program:
    config = tiny()
    return make_program(config, make_plan(config, pp=4, micro_batches=6, schedule="1f1b"))


class Ranks:
    """All ranks of a run as a launcher sees them, in their slots."""

    def __init__(self, run_dir: Path, program: Program, *, hang: str = "warn", step_s: float = 0.1) -> None:
        self.directory, self.program = RunDirectory(run_dir), program
        report = ReportTable(hang=hang, hang_after_s=AFTER_S)
        self.watch = HangWatch(self.directory, program, step_s=step_s, report=report)
        self.recorders: list[Recorder] = []

    def open(self, steps: int = 3) -> None:
        self.recorders = [
            Recorder(self.directory.path, program=part_of(self.program, rank), plan_id=PLAN_ID, steps=steps)
            for rank in range(self.program.ranks)
        ]
        self.pass_time(1)

    def begin(self, step: int, without: int | None = None) -> None:
        for rank, recorder in enumerate(self.recorders):
            if rank != without:
                recorder.begin(step)

    def end(self, step: int, left: set[int] | frozenset[int] = frozenset()) -> None:
        """All instructions of a step but those of `left`."""
        for row, rank in enumerate(self.program.columns.rank.tolist()):
            if row not in left:
                self.recorders[rank].record(step, row, 1, 2, 3)

    def step(self, step: int) -> None:
        self.begin(step)
        self.end(step)
        self.pass_time(1)

    def pass_time(self, seconds: float, stopped: int | None = None) -> None:
        """Look every second, while all ranks but `stopped` get to run."""
        for _ in range(round(seconds)):
            for rank, recorder in enumerate(self.recorders):
                if rank != stopped:
                    recorder.beat()
            self.watch.advance(1.0)

    @property
    def told(self) -> list[str]:
        return warnings(self.directory.events(), 0.0)


@pytest.fixture
def ranks(tmp_path: Path, program: Program) -> Ranks:
    return Ranks(tmp_path, program)


def forward(program: Program, stage: int, micro_batch: int) -> int:
    columns = program.columns
    rows = (columns.kind == FORWARD) & (columns.stage == stage) & (columns.micro_batch == micro_batch)
    return int(np.flatnonzero(rows)[0])


def stuck(program: Program, row: int) -> set[int]:
    return stuck_rows(program, never={row}, eager=True)


def test_the_rank_that_others_wait_for_is_named_once_and_its_going_on_too(ranks: Ranks) -> None:
    ranks.open()
    for step in range(12):
        ranks.step(step)
    ranks.begin(12)
    ranks.end(12, stuck(ranks.program, forward(ranks.program, 2, 5)))
    ranks.pass_time(AFTER_S)
    assert ranks.told == []
    ranks.pass_time(3 * AFTER_S)
    line = (
        "step 12: no instruction ended for 30 s: ranks 0, 1 and 3 wait for rank 2, which has not ended "
        "forward of stage 2, micro-batch 5"
    )
    assert ranks.told == [line]
    event = ranks.directory.events()[-1]
    assert (event["event"], event["step"], event["ranks"]) == ("hang", 12, [2])
    ranks.end(12)
    ranks.pass_time(1)
    assert ranks.told == [line, "goes on after 119 s"]


def test_the_line_names_what_was_issued_last_and_what_ended_last(ranks: Ranks) -> None:
    program = ranks.program
    ranks.open()
    ranks.step(0)
    ranks.begin(1)
    never = forward(program, 2, 5)
    left = stuck(program, never)
    ranks.end(1, left)
    own = np.flatnonzero(program.columns.rank == 2)
    # The device stands still in a forward pass, and its host has issued the whole step.
    done = [row for row in own.tolist() if row not in left]
    ranks.recorders[2].record(1, done[-1], 1, 2, 4)
    ranks.recorders[2].issue(int(own[-1]), 5)
    ranks.pass_time(2 * AFTER_S)
    (line,) = ranks.told
    ended = program.instruction(done[-1])
    assert line.endswith(
        "which has not ended forward of stage 2, micro-batch 5; rank 2 issued last step of stage 2, "
        f"and ended last {ended.kind.words} of stage 2, micro-batch {ended.micro_batch}"
    )


def test_a_hang_ends_the_run_where_the_run_file_says_so(tmp_path: Path, program: Program) -> None:
    ranks = Ranks(tmp_path, program, hang="stop")
    ranks.open()
    ranks.step(0)
    ranks.begin(1)
    ranks.end(1, stuck(program, forward(program, 0, 0)))
    with pytest.raises(RunError) as caught:
        ranks.pass_time(2 * AFTER_S)
    text = str(caught.value)
    assert text.startswith(
        "step 1: no instruction ended for 30 s: ranks 1, 2 and 3 wait for rank 0, which has "
    )
    assert text.endswith(f"micro-batch 0 (log: {tmp_path / 'logs' / 'rank-0.log'})")
    assert [event["event"] for event in ranks.directory.events()] == ["hang"]


def test_a_step_may_be_longer_than_the_least_time(tmp_path: Path, program: Program) -> None:
    for name, predicted_s, measured_s in (("predicted", 20, 1), ("measured", 1, 20)):
        ranks = Ranks(tmp_path / name, program, step_s=predicted_s)
        ranks.open()
        for step in range(3):
            ranks.begin(step)
            ranks.pass_time(measured_s)
            ranks.end(step)
        ranks.begin(3)
        ranks.pass_time(STEPS * 20 - 10)
        assert ranks.told == [], name
        ranks.pass_time(20)
        assert len(ranks.told) == 1, name


def test_the_first_step_of_a_start_may_take_long(ranks: Ranks) -> None:
    ranks.open()
    ranks.begin(7)
    ranks.pass_time(20 * AFTER_S)
    assert ranks.told == []
    # Unless a process does not get to run.
    ranks.pass_time(AFTER_S, stopped=3)
    assert ranks.told == ["rank 3 gave no sign of life for 30 s, in step 7"]
    ranks.pass_time(2)
    ranks.pass_time(AFTER_S, stopped=0)
    assert ranks.told[-1].endswith(
        "ranks 1, 2 and 3 wait for rank 0, which has not ended forward of stage 0, micro-batch 0 and gives "
        "no sign of life"
    )


def test_a_rank_between_two_steps_is_left_alone(ranks: Ranks) -> None:
    ranks.open()
    for step in range(2):
        ranks.step(step)
    ranks.begin(2, without=1)
    mine = set(np.flatnonzero(ranks.program.columns.rank == 1).tolist())
    ranks.end(2, stuck_rows(ranks.program, never=mine, eager=True))
    ranks.pass_time(10 * AFTER_S)  # it saves
    assert ranks.told == []
    ranks.pass_time(AFTER_S, stopped=1)
    (line,) = ranks.told
    assert line.endswith(
        "ranks 0, 2 and 3 wait for rank 1, which has not begun the step and gives no sign of life"
    )


@pytest.mark.parametrize(("steps", "where"), [(0, "before the first step"), (4, "after step 3")])
def test_a_stopped_rank_outside_all_steps_is_named_and_so_is_its_return(
    ranks: Ranks, steps: int, where: str
) -> None:
    ranks.open()
    for step in range(steps):
        ranks.step(step)
    ranks.pass_time(10 * AFTER_S)  # an evaluation
    assert ranks.told == []
    ranks.pass_time(2 * AFTER_S, stopped=2)
    line = f"rank 2 gave no sign of life for 30 s, {where}"
    assert ranks.told == [line]
    ranks.pass_time(2)
    assert ranks.told[0] == line
    assert ranks.told[1].startswith("goes on after ")


def test_a_rank_that_has_finished_gives_no_sign_of_life(ranks: Ranks) -> None:
    ranks.open()
    ranks.step(0)
    ranks.recorders[1].rest()
    ranks.pass_time(10 * AFTER_S, stopped=1)
    assert ranks.told == []


def test_slots_of_an_earlier_start_are_not_watched(tmp_path: Path, program: Program) -> None:
    former = Ranks(tmp_path, program)
    former.open()
    former.step(0)
    former.begin(1)
    ranks = Ranks(tmp_path, program)
    ranks.pass_time(20 * AFTER_S)  # data are prepared, weights read
    assert ranks.told == []
    ranks.open(steps=1)
    ranks.step(1)
    ranks.begin(2)
    ranks.pass_time(2 * AFTER_S)
    assert [line.partition(":")[0] for line in ranks.told] == ["step 2"]


def test_ranks_that_are_a_step_ahead_wait_too(tmp_path: Path, program: Program) -> None:
    ranks = Ranks(tmp_path, program)
    ranks.open()
    ranks.step(0)
    ranks.begin(1)
    columns = program.columns
    (row,) = np.flatnonzero((columns.kind == STEP) & (columns.rank == 3)).tolist()
    ranks.end(1, {row})
    for recorder in ranks.recorders[:3]:
        recorder.begin(2)
    ranks.pass_time(2 * AFTER_S)
    assert ranks.told == [
        "step 1: no instruction ended for 30 s: ranks 0, 1 and 2 wait for rank 3, which has not ended "
        "step of stage 3"
    ]


def test_instructions_of_other_steps_of_a_cycle_are_not_waited_for(tmp_path: Path) -> None:
    config = tiny(layers=2)
    plan = make_plan(config, dp=2)
    sync = Choice(name="local-averaging", options={"every": 2})
    program = make_program(config, plan.model_copy(update={"sync": sync}))
    ranks = Ranks(tmp_path, program)
    ranks.open()
    for step in range(3):
        ranks.begin(step)
        ranks.end(step, left=set(np.flatnonzero(program.columns.iteration != step % 2).tolist()))
        ranks.pass_time(1)
    ranks.pass_time(2 * AFTER_S)
    assert warnings(ranks.directory.events(), 0.0) == []
