"""Runs of real processes that are killed: the others go on, and new processes take their places."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import lossy_runs
import psutil
import pytest
import torch
from lossy_replay import replayed
from lossy_runs import EVERY, lives, write_run_file
from pool import WorkerPool
from pooled_runs import trained
from stopped_runs import saved

from weft.describe.run_file import load_run
from weft.errors import InputError
from weft.methods.cser.absences import Absence
from weft.methods.cser.options import ABSENCES, RETURNED
from weft.planning.lost_replicas import DIED, WENT_ON
from weft.planning.planned import plan_run
from weft.run.launch.worker_main import AGENT_PID
from weft.run.stage.build import build_stages
from weft.training.directory.run_directory import PLAN_OF_ALL, RunDirectory
from weft.training.rolls import train_rolls
from weft.training.session import reopen

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("warm_starts")]


def events(directory: RunDirectory, name: str) -> list[dict[str, Any]]:
    return [one for one in directory.events() if one["event"] == name]


def returns(directory: RunDirectory) -> list[Absence]:
    return [Absence(**one) for event in events(directory, ABSENCES) for one in event[RETURNED]]


def losses(directory: Path) -> list[float]:
    return [row["loss"] for row in RunDirectory(directory).metrics()]


@pytest.mark.parametrize(
    ("pp", "tp", "killed"),
    [
        (1, 1, 2),
        pytest.param(2, 1, 5, marks=pytest.mark.tables),
        pytest.param(1, 2, 4, marks=pytest.mark.tables),
    ],
)
def test_the_others_go_on_as_if_the_absence_had_been_stated(
    worker_pool: WorkerPool, tmp_path: Path, pp: int, tp: int, killed: int
) -> None:
    """The stated absence equals one process (`tests/methods/rows/cser.py`)."""
    steps = 5 * EVERY
    layout = {"steps": steps, "checkpoint_every": steps, "pp": pp, "tp": tp}
    source = write_run_file(tmp_path, **layout)
    ended = lossy_runs.train(source, tmp_path / "killed", f"{killed} 0 met 12")
    assert ended.returncode == 0, ended.stderr
    directory = RunDirectory(tmp_path / "killed")
    (died,) = events(directory, DIED)
    # All resets since the one after eight steps lack its part, so the others begin there again.
    assert (died["replicas"], died["step"]) == ([2], 2 * EVERY)
    assert f"warning: replica 2 died in step {died['reached']}; the others go on from" in ended.stderr
    assert [len(lives(directory.path, rank)) for rank in (0, 1)] == [1, 1]
    sync = 'absent = "2: 2-8"\nrounds = 10'
    stated = trained(
        worker_pool,
        write_run_file(tmp_path, **layout, on_death="stop", sync=sync),
        directory=tmp_path / "stated",
    )
    found, expected = saved(directory.path), saved(stated)
    # One replica's count of steps stands for those of all, and the absent one has counted fewer.
    same = [name for name in expected if not (name.startswith("optimizer/") and name.endswith("/step"))]
    if pp * tp == 1:
        of_lost = [name for name in expected if name.startswith("rank/2/")]
        assert expected.keys() - found.keys() == set(of_lost)
    else:
        # The ranks behind have other numbers.
        of_lost = [name for name in expected if name.startswith("rank/")]
    for name in [one for one in same if one not in of_lost]:
        assert torch.allclose(found[name], expected[name], rtol=0.0, atol=1e-9), name
    assert losses(directory.path) == pytest.approx(losses(stated), rel=1e-9)
    assert losses(directory.path)[: 2 * EVERY] == losses(stated)[: 2 * EVERY]


def test_a_new_process_takes_the_place_of_rank_0_behind_a_later_reset(tmp_path: Path) -> None:
    steps = 5 * EVERY
    source = write_run_file(tmp_path, steps=steps, checkpoint_every=steps)
    ended = lossy_runs.train(source, tmp_path / "run", "0 0 met 12", join_at=2 * EVERY)
    assert ended.returncode == 0, ended.stderr
    directory = RunDirectory(tmp_path / "run")
    assert [one["replicas"] for one in events(directory, DIED)] == [[0]]
    assert returns(directory) == [Absence(replica=0, first=2, last=2)]
    assert [len(lives(directory.path, rank)) for rank in range(3)] == [2, 1, 1]
    assert not [pid for rank in range(3) for pid in lives(directory.path, rank) if psutil.pid_exists(pid)]
    assert directory.plan().ranks == 3
    assert not (directory.path / PLAN_OF_ALL).exists()
    assert [row["step"] for row in directory.metrics()] == list(range(steps))
    require_common_weights(directory.path)
    found = saved(directory.path)
    for rank, one in enumerate(replayed(directory.path, {range(2 * EVERY, 3 * EVERY): [0]}, steps=steps)):
        for name, weight in one.model.named_parameters():
            mine = found[f"rank/{rank}/{name}"]
            assert torch.allclose(mine, weight.detach(), rtol=0.0, atol=1e-9), (rank, name)
    assert "missed reset 2, rejoined at 3" in (directory.path / "report.html").read_text()


def test_only_an_agent_that_replaces_processes_trains_such_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(AGENT_PID, raising=False)
    job = plan_run(load_run(write_run_file(tmp_path, steps=8)))
    with pytest.raises(InputError, match=r"run\.on_death: 'go-on' needs an agent that replaces processes"):
        train_rolls(job, tmp_path)


def require_common_weights(directory: Path) -> None:
    """All ranks of a stage have the same weights minus errors, though they differ."""
    job, found = reopen(directory), saved(directory)
    common: dict[tuple[str, ...], list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for rank in range(job.plan.ranks):
        for index, stage in build_stages(job.plan, job.problem.model, rank, 0, torch.float64).items():
            names = [name for name, _ in stage.named_parameters()]
            own = torch.cat([found[f"rank/{rank}/{name}"].flatten() for name in names])
            error = found[f"rank/{rank}/method/cser/{index}/errors/{names[0]}"]
            common.setdefault(tuple(names), []).append((own, error))
    for replicas in common.values():
        for (own, error), (other, others) in pairwise(replicas):
            assert torch.allclose(own - error, other - others, rtol=0.0, atol=1e-12)
            assert not torch.allclose(own, other, rtol=0.0, atol=1e-6)


# Deaths, options of the run, the replicas that died in turn, and those that came back.
SURVIVED: list[tuple[str, dict[str, Any], list[list[int]], list[int]]] = [
    ("1 0 read 9", {"join_at": 8}, [[1]], [1]),
    ("2 0 meeting 10", {"join_at": 8}, [[2]], [2]),
    ("0 0 met 10", {"join_at": 8}, [[0]], [0]),
    ("2 0 kept 3", {"join_at": 8}, [[2]], [2]),
    ("1 0 write 1", {"checkpoint_every": 8}, [[1]], []),
    ("0 0 plan-to-write 1", {"checkpoint_every": 8}, [[0]], []),
    ("2 0 collect 1", {"checkpoint_every": 8}, [[2]], []),
    ("2 0 collect 1", {}, [[2]], []),
    ("2 0 finish 1", {}, [[2]], []),
    ("2 0 read 9,2 1 enter 1", {"join_at": 8}, [[2]], [2]),
    ("2 0 read 9,2 1 rejoin 1", {"join_at": 8}, [[2], [2]], [2]),
    ("2 0 read 9,2 1 rejoined 1", {"join_at": 8}, [[2], [2]], [2, 2]),
    ("2 0 read 9,2 1 read 5", {"join_at": 8}, [[2], [2]], [2, 2]),
    ("2 0 read 9,1 0 rejoin 1", {"join_at": 8}, [[2], [1]], [2, 1]),
    ("2 0 read 9,1 0 enter 1", {"join_at": 8, "replicas": 4}, [[1, 2]], [1, 2]),
    ("2 0 read 9,1 0 read 14", {"replicas": 4}, [[2], [1]], []),
    ("3 0 met 12", {"join_at": 8, "pp": 2}, [[0]], [0]),
    ("3 0 met 12", {"join_at": 8, "tp": 2}, [[1]], [1]),
]


@pytest.mark.tables
@pytest.mark.parametrize(("deaths", "options", "died", "back"), SURVIVED)
def test_deaths_at_any_place_are_survived(
    tmp_path: Path, deaths: str, options: dict[str, Any], died: list[list[int]], back: list[int]
) -> None:
    join_at, steps = options.pop("join_at", None), 6 * EVERY
    source = write_run_file(tmp_path, steps=steps, **{"checkpoint_every": steps, **options})
    ended = lossy_runs.train(source, tmp_path / "run", deaths, join_at=join_at)
    assert ended.returncode == 0, ended.stderr
    directory = RunDirectory(tmp_path / "run")
    assert sorted(one["replicas"] for one in events(directory, DIED)) == sorted(died)
    assert [one.replica for one in returns(directory)] == back
    assert [row["step"] for row in directory.metrics()] == list(range(steps))
    every = options.get("checkpoint_every", steps)
    checkpoints = sorted(int(one["step"]) for one in events(directory, "checkpoint"))
    # The others may have come to a later reset before rank 0 dies in the thread that saves.
    given_up = {every * ((int(one["step"]) - 1) // every) for one in events(directory, WENT_ON)}
    due = set(range(every, steps + 1, every))
    assert due - given_up <= set(checkpoints) <= due
    # Shares of tensor ranks have other places in a checkpoint.
    if "tp" not in options:
        require_common_weights(directory.path)


@pytest.mark.tables
def test_a_run_that_cannot_go_on_says_why_and_resumes_with_all(tmp_path: Path) -> None:
    source = write_run_file(tmp_path, steps=10 * EVERY, checkpoint_every=2, replicas=4)
    run = tmp_path / "run"
    ended = lossy_runs.train(source, run, "2 0 read 11,1 0 entered 1")
    assert ended.returncode == 1
    line = "weft: rank 1 was killed by signal 9 (SIGKILL); the ranks had not begun to step together (log: "
    assert ended.stderr.splitlines()[-1].startswith(line)
    # Another one ends with too few.
    ended = lossy_runs.train(run, run, "2 1 read 3,1 1 read 15,0 1 read 27")
    assert ended.returncode == 1
    assert "; fewer than 2 replicas are left (log: " in ended.stderr.splitlines()[-1]
    assert RunDirectory(run).plan().ranks == 2
    # It resumes with all replicas, which begin from the means of those that were left at the last checkpoint.
    ended = lossy_runs.train(run, run)
    assert ended.returncode == 0, ended.stderr
    directory = RunDirectory(run)
    assert directory.plan().ranks == 4
    assert events(directory, "began anew")
    assert [row["step"] for row in directory.metrics()] == list(range(10 * EVERY))
    require_common_weights(run)
