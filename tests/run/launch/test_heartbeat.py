"""The heartbeat: beats while the process gets to run, and says when no more come."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
from small_plans import make_plan, make_program, tiny

from weft.program.rank_program import part_of
from weft.run.launch.heartbeat import beating
from weft.run.record.recorder import Recorder
from weft.run.record.slots import read_pulse, read_slots


def beats(recorder: Recorder) -> int | None:
    pulse = read_pulse(recorder.path)
    assert pulse is not None
    return pulse.beats


def test_it_beats_within_its_block_and_not_after_it(tmp_path: Path) -> None:
    config = tiny()
    program = make_program(config, make_plan(config))
    recorder = Recorder(tmp_path, program=part_of(program, 0), plan_id="0" * 16, steps=1)
    threads, noticed = threading.active_count(), []

    def notice() -> int:
        noticed.append(True)
        return 7 if len(noticed) == 1 else 3

    def fail() -> None:
        with beating(recorder, notice):
            before, deadline = beats(recorder) or 0, time.monotonic() + 60
            while (beats(recorder) or 0) < before + 2:
                assert time.monotonic() < deadline, "it did not beat"
                time.sleep(0.05)
            raise OSError("the run fails")

    with pytest.raises(OSError, match="the run fails"):
        fail()
    assert beats(recorder) is None
    assert len(noticed) >= 2
    # The largest error of all beats.
    assert read_slots(recorder.path).clock_error_ns == 7
    assert threading.active_count() == threads
    recorder.close()


def test_without_a_recorder_there_is_nothing_to_beat() -> None:
    threads = threading.active_count()
    with beating(None, lambda: 0):
        assert threading.active_count() == threads
