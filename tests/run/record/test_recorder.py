"""Slots: what is written is read back, whatever happens to the process; broken files are refused."""

from __future__ import annotations

import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import MagicMock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_plans import make_plan, make_program, tiny

from weft.errors import RunError
from weft.methods.sharding.kinds import REDUCE
from weft.methods.tying.kinds import REDUCE_TIED
from weft.program.kinds import BACKWARD, FORWARD, STEP
from weft.program.program import Instruction, Program
from weft.program.rank_program import part_of
from weft.run.executor import Executor
from weft.run.handlers.base import Issue
from weft.run.record.recorder import Recorder, collect_timeline
from weft.run.record.slots import (
    HEADER_BYTES,
    Pulse,
    read_ended,
    read_last_ended,
    read_pulse,
    read_slots,
    slots_path,
)
from weft.run.streams import Completion, Ended, Stream
from weft.run.workspace import Workspace

PLAN_ID = "0123456789abcdef"
RECORD_BYTES = 40


@pytest.fixture(scope="module")
def program() -> Program:
    config = tiny()
    return make_program(config, make_plan(config, pp=2, micro_batches=2))


def record_steps(run_dir: Path, program: Program, rank: int, steps: range, room: int | None = None) -> None:
    recorder = Recorder(run_dir, program=part_of(program, rank), plan_id=PLAN_ID, steps=room or len(steps))
    for step in steps:
        for position in range(*program.rank_starts[rank : rank + 2].tolist()):
            begin = 1_000_000 * step + 100 * position
            recorder.record(step, position, begin, begin + 10, begin + 20 + rank)
    recorder.close()


def test_ranks_are_merged_in_order(tmp_path: Path, program: Program) -> None:
    for rank in range(2):
        record_steps(tmp_path, program, rank, range(3, 6))
    timeline = collect_timeline(tmp_path, program, PLAN_ID, "name")
    assert (timeline.run, timeline.plan_id, timeline.clock) == ("name", PLAN_ID, "monotonic")
    assert timeline.step.tolist() == [step for step in range(3, 6) for _ in range(len(program))]
    assert timeline.position.tolist() == list(range(len(program))) * 3
    assert np.array_equal(timeline.id[: len(program)], program.ids)
    assert np.array_equal(timeline.rank[: len(program)], program.columns.rank)
    assert timeline.posted_ns[0] == 0
    alone = np.isin(timeline.kind, (FORWARD, BACKWARD, STEP))
    assert np.array_equal((timeline.end_ns - timeline.start_ns)[alone], 10 + timeline.rank[alone])


@pytest.mark.parametrize("kind", [REDUCE, REDUCE_TIED])
def test_a_collective_begins_when_its_last_member_is_ready(tmp_path: Path, kind: int) -> None:
    config = tiny(tied=True)
    shared = make_program(config, make_plan(config, pp=2, dp=2, micro_batches=2))
    for rank in range(shared.ranks):
        recorder = Recorder(tmp_path, program=part_of(shared, rank), plan_id=PLAN_ID, steps=1)
        for position in range(*shared.rank_starts[rank : rank + 2].tolist()):
            recorder.record(0, position, 0, 100 * position, 10**9)
        recorder.close()
    timeline = collect_timeline(tmp_path, shared, PLAN_ID, "name")
    rows = np.flatnonzero(timeline.kind == kind)
    groups = np.unique(timeline.group[rows])
    assert len(groups)
    for group in groups:
        members = rows[timeline.group[rows] == group]
        assert len(members) == len(shared.groups[group])
        assert set(timeline.start_ns[members].tolist()) == {100 * int(timeline.position[members].max())}


@settings(max_examples=25)
@given(steps=st.integers(1, 9), room=st.integers(1, 9))
def test_a_full_ring_keeps_the_last_steps(
    tmp_path_factory: pytest.TempPathFactory, steps: int, room: int
) -> None:
    config = tiny()
    program = make_program(config, make_plan(config, micro_batches=1))
    run_dir = tmp_path_factory.mktemp("ring")
    record_steps(run_dir, program, 0, range(steps), room=room)
    timeline = collect_timeline(run_dir, program, PLAN_ID, "ring")
    assert sorted(set(timeline.step.tolist())) == list(range(max(0, steps - room), steps))


@given(chosen=st.sets(st.integers(0, 9)), room=st.integers(2, 10))
@settings(max_examples=20)
def test_chosen_steps_are_those_of_the_whole_file(program: Program, chosen: set[int], room: int) -> None:
    with TemporaryDirectory() as folder:
        record_steps(Path(folder), program, 1, range(8), room)
        path = slots_path(Path(folder), 1)
        whole, some = read_slots(path), read_slots(path, chosen)
    wanted = whole.records[np.isin(whole.records["step"], sorted(chosen))]
    assert np.array_equal(np.sort(some.records, order="step"), np.sort(wanted, order="step"))
    assert (some.plan_id, some.capacity_steps) == (whole.plan_id, whole.capacity_steps)


def test_a_step_that_the_ring_begins_to_overwrite_is_left_out(tmp_path: Path, program: Program) -> None:
    record_steps(tmp_path, program, 0, range(6), room=3)
    record_steps(tmp_path, program, 1, range(5), room=3)
    timeline = collect_timeline(tmp_path, program, PLAN_ID, "name")
    assert sorted(set(timeline.step[timeline.rank == 1].tolist())) == [3, 4]
    assert sorted(set(timeline.step[timeline.rank == 0].tolist())) == [3, 4, 5]


@given(row=st.integers(0, 5), written=st.integers(0, RECORD_BYTES - 1), over_older=st.booleans())
def test_a_record_cut_off_while_it_is_written_is_dropped(
    tmp_path_factory: pytest.TempPathFactory, row: int, written: int, over_older: bool
) -> None:
    config = tiny()
    program = make_program(config, make_plan(config, micro_batches=3))
    run_dir = tmp_path_factory.mktemp("torn")
    record_steps(run_dir, program, 0, range(1 if over_older else 0), room=1)
    path = slots_path(run_dir, 0)
    content = bytearray(path.read_bytes())
    begin = HEADER_BYTES + row * RECORD_BYTES
    whole = struct.pack("<iiqqqq", 1, row, 11, 12, 13, 2)
    content[begin : begin + written] = whole[:written]
    path.write_bytes(content)
    found = read_slots(path).records
    # Either nothing of the new record shows, or it is not there.
    assert not ((found["step"] == 1) & (found["position"] == row)).any() or written > 32
    assert all(record["posted_ns"] % 100 == 0 for record in found) or written > 32


def test_a_pulse_and_what_has_ended_are_read_while_the_rank_runs(tmp_path: Path, program: Program) -> None:
    path = slots_path(tmp_path, 1)
    assert read_pulse(path) is None
    recorder = Recorder(tmp_path, program=part_of(program, 1), plan_id=PLAN_ID, steps=2)
    first, end = program.rank_starts[1:].tolist()
    assert read_pulse(path) == Pulse(beats=0, steps_begun=0, step=0)
    for step in (7, 8, 9):
        recorder.beat()
        recorder.begin(step)
        for position in range(first, end):
            recorder.issue(position, step)
            recorder.record(step, position, 1, 2, 3)
    assert read_pulse(path) == Pulse(beats=3, steps_begun=3, step=9, issued=end - 1, issued_ns=9)
    recorder.begin(10)
    recorder.issue(first + 2, 10)
    assert read_last_ended(path, 10) is None
    for position, end_ns in ((first, 3), (first + 2, 5), (first + 1, 4)):
        recorder.record(10, position, 1, 2, end_ns)
    found = Pulse(beats=3, steps_begun=4, step=10, issued=first + 2, issued_ns=10)
    assert read_pulse(path) == found
    assert read_last_ended(path, 10) == first + 2
    assert read_ended(path, 9).all()
    assert len(read_ended(path, 9)) == end - first
    assert np.flatnonzero(read_ended(path, 10)).tolist() == [0, 1, 2]
    # The ring holds two steps: 7 has been overwritten, so that it has ended.
    assert read_ended(path, 7).all()
    assert not read_ended(path, 11).any()
    recorder.rest()
    assert read_pulse(path) == replace(found, beats=None)
    assert len(read_slots(path).records) == 2 * (end - first)
    recorder.close()
    path.write_bytes(b"")
    assert read_pulse(path) is None
    with pytest.raises(RunError, match="not a slot file"):
        read_ended(path, 0)


def test_the_host_notes_an_instruction_before_it_issues_it(tmp_path: Path, program: Program) -> None:
    part, noted = part_of(program, 1), []
    recorder = Recorder(tmp_path, program=part, plan_id=PLAN_ID, steps=1)

    def handler(workspace: Workspace, instruction: Instruction) -> Issue:
        def issue(stream: Stream) -> Completion:
            pulse = read_pulse(recorder.path)
            noted.append(pulse is not None and pulse.issued == instruction.position)
            return Ended.now()

        return issue

    handlers = dict.fromkeys((one.kind.name for one in part.instructions()), handler)
    workspace = MagicMock(step=0, step_share=1.0)
    # Streams of a host put nothing in order.
    workspace.resources.streams.order.return_value = None
    executor = Executor(part, workspace, recorder=recorder, handlers=handlers)
    executor.run_step(0, MagicMock())
    recorder.close()
    assert noted == [True] * len(part)


def test_records_survive_sigkill(tmp_path: Path, program: Program) -> None:
    script = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from small_plans import make_plan, make_program, tiny
from weft.program.rank_program import part_of
from weft.run.record.recorder import Recorder
program = make_program(tiny(), make_plan(tiny(), pp=2, micro_batches=2))
recorder = Recorder(Path(sys.argv[1]), program=part_of(program, 0), plan_id="0123456789abcdef", steps=5)
recorder.record(0, 0, 1, 2, 3)
recorder.record(0, 1, 4, 5, 6)
os.kill(os.getpid(), signal.SIGKILL)
"""
    tests = str(Path(__file__).parents[2])
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path), tests], timeout=60)
    assert done.returncode == -9
    slots = read_slots(slots_path(tmp_path, 0))
    assert slots.records[["position", "posted_ns", "end_ns"]].tolist() == [(0, 1, 3), (1, 4, 6)]


def test_broken_files_are_refused_by_name(tmp_path: Path, program: Program) -> None:
    record_steps(tmp_path, program, 0, range(1))
    path = slots_path(tmp_path, 0)
    content = path.read_bytes()
    broken = {
        "0 bytes": b"",
        "not a slot file": b"x" * len(content),
        "version 9": content[:8] + b"\x09" + content[9:],
        "cut short": content[:-1],
    }
    for message, damaged in broken.items():
        path.write_bytes(damaged)
        with pytest.raises(RunError, match=message) as caught:
            read_slots(path)
        assert str(path) in str(caught.value)
    path.unlink()
    with pytest.raises(RunError, match="No such file"):
        read_slots(path)


def test_slots_of_another_plan_or_program_are_refused(tmp_path: Path, program: Program) -> None:
    for rank in range(2):
        record_steps(tmp_path, program, rank, range(1))
    with pytest.raises(RunError, match="recorded for plan 0123456789abcdef, not for other"):
        collect_timeline(tmp_path, program, "other", "name")
    config = tiny()
    other = make_program(config, make_plan(config, pp=2, micro_batches=3))
    with pytest.raises(RunError, match="recorded for another program"):
        collect_timeline(tmp_path, other, PLAN_ID, "name")


def test_nothing_recorded_is_an_error(tmp_path: Path, program: Program) -> None:
    for rank in range(2):
        record_steps(tmp_path, program, rank, range(0), room=1)
    with pytest.raises(RunError, match="no rank has recorded"):
        collect_timeline(tmp_path, program, PLAN_ID, "name")


def test_reading_needs_no_torch() -> None:
    modules = "weft.run.record.recorder, weft.run.launch.workers, weft.run.launch.failures"
    script = f"import sys, {modules}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=60)
    assert done.stdout.strip() == b"False", done.stderr
