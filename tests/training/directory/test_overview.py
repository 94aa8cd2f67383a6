"""Runs at a glance: their states follow from the lock and the events, and nothing is written."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from growing_runs import planned_job

from weft.errors import InputError
from weft.training.directory.overview import NEWEST_STEPS, RunState, look_at, runs_in
from weft.training.directory.run_directory import RunDirectory
from weft.training.directory.run_lock import is_running, only_run

HOLD = "import sys; from pathlib import Path; from weft.training.directory.run_lock import only_run\n"
HOLD += "with only_run(Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory(tmp_path / "runs" / "first")
    directory.path.mkdir(parents=True)
    directory.prepare(planned_job())
    return directory


def lines(run: RunDirectory, name: str, *records: dict[str, object]) -> None:
    text = "".join(json.dumps({"time_s": 100.0, **record}) + "\n" for record in records)
    (run.path / name).write_text(text)


def steps(count: int) -> list[dict[str, object]]:
    return [
        {"step": step, "loss": 5.0 - 0.1 * step, "step_s": 1.0 + step, "tokens_per_s": 10.0 * step}
        for step in range(count)
    ]


def test_a_prepared_run_has_a_plan_and_no_figures(run: RunDirectory) -> None:
    one = look_at(run.path)
    assert (one.state, one.done, one.steps) == (RunState.PREPARED, 0, 50)
    assert one.loss is one.held_out_loss is one.step_s is one.tokens_per_s is None
    assert one.predicted_step_s == run.prediction().step_s
    assert (one.model, one.plan) == ("gpt-1m", run.plan().words)


def test_the_speed_is_that_of_steps_under_the_present_plan(run: RunDirectory) -> None:
    lines(run, "metrics.jsonl", *steps(4))
    assert look_at(run.path).step_s == 2.5
    change = {"event": "plan changed", "former": "a", "now": "b"}
    lines(run, "events.jsonl", {**change, "step": 3})
    one = look_at(run.path)
    assert (one.done, one.step_s, one.tokens_per_s) == (4, 4.0, 30.0)
    lines(run, "events.jsonl", {**change, "step": 3}, {**change, "step": 4})
    one = look_at(run.path)
    assert (one.done, one.step_s, one.tokens_per_s) == (4, None, None)


@pytest.mark.parametrize(
    ("events", "state"),
    [
        (["started"], RunState.BROKEN_OFF),
        (["started", "data", "stopped"], RunState.STOPPED),
        (["started", "stopped", "resumed", "checkpoint"], RunState.BROKEN_OFF),
        (["started", "stopped", "resumed", "finished", "logger"], RunState.FINISHED),
    ],
)
def test_the_last_start_or_end_decides_the_state(
    run: RunDirectory, events: list[str], state: RunState
) -> None:
    lines(run, "events.jsonl", *({"event": event, "step": 0} for event in events))
    assert look_at(run.path).state is state


def test_a_rank_that_failed_before_the_first_event_has_broken_the_run_off(run: RunDirectory) -> None:
    (run.path / "logs").mkdir()
    (run.path / "logs" / "rank-1.log").touch()
    assert look_at(run.path).state is RunState.BROKEN_OFF


def test_lines_that_are_no_events_are_passed_over(run: RunDirectory) -> None:
    (run.path / "events.jsonl").write_text('{"event": "started"}\n{"more": 1}\n{"event": "sto')
    one = look_at(run.path)
    assert (one.state, one.newest_s) == (RunState.BROKEN_OFF, 0.0)


def test_figures_are_those_of_the_newest_steps(run: RunDirectory) -> None:
    lines(run, "metrics.jsonl", *steps(41))
    lines(run, "events.jsonl", {"event": "started", "step": 0, "held_out_loss": 5.5})
    one = look_at(run.path)
    assert one.done == 41
    assert one.loss == pytest.approx(1.0)
    assert one.held_out_loss == 5.5
    # The median of the last steps, whose times rise by one.
    assert one.step_s == pytest.approx(41 - (NEWEST_STEPS - 1) / 2)


def test_a_locked_run_is_running_until_its_holder_ends(run: RunDirectory) -> None:
    assert not is_running(run.path)
    lines(run, "events.jsonl", {"event": "started", "step": 0})
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(run.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        assert look_at(run.path).state is RunState.RUNNING
        # The look has not taken or broken the lock.
        with pytest.raises(InputError, match="is being trained"), only_run(run.path):
            pass
        assert holder.stdin is not None
        holder.stdin.close()
        holder.wait(timeout=30)
    assert look_at(run.path).state is RunState.BROKEN_OFF


def test_folders_of_runs_and_runs_are_told_apart(run: RunDirectory, tmp_path: Path) -> None:
    (run.path.parent / "no run").mkdir()
    assert runs_in(run.path.parent) == (run.path,) == runs_in(run.path)
    assert runs_in(tmp_path / "runs" / "no run") == ()


def test_a_broken_run_file_is_one_line(run: RunDirectory) -> None:
    (run.path / "run.toml").write_text("[train]\nsteps = soon\n")
    with pytest.raises(InputError) as refused:
        look_at(run.path)
    (line,) = refused.value.violations
    assert "run.toml" in str(line)
