"""Runs that change the codec of a piece by themselves: told, kept through a kill, with nothing lost."""

from __future__ import annotations

import json
from pathlib import Path
from shutil import copytree, rmtree
from typing import Any

import pytest
import torch
from pool import WorkerPool
from pooled_runs import prepared, trained
from stopped_runs import saved

from weft.errors import InputError
from weft.planning.exposed_codecs import codec_change, exposed_codecs
from weft.planning.planned import changed_to
from weft.program.program import Program
from weft.training import session
from weft.training.directory.event_words import event_words
from weft.training.directory.run_directory import RunDirectory
from weft.training.session import reopen

pytestmark = pytest.mark.usefixtures("own_home")

RUN = """
[model]
preset = "gpt-1m"
[task]
data = "{text}"
sequence = 32
[train]
global_batch = 4
steps = 7
[checkpoint]
every = 100
[goal]
contract = "empirical"
[plan]
dp = 2
pp = 1
micro_batch_size = 2
{plan}
[sync]
method = "clan"
codec = "top-k"
ratio = 2.0
minimum_bytes = 4096
piece_bytes = 8000000
{sync}
"""


def run_file(tmp_path: Path, name: str, *, sync: str, plan: str = "") -> Path:
    text = tmp_path / "text.txt"
    text.write_text("warp weft loom " * 2000)
    path = tmp_path / f"{name}.toml"
    path.write_text(RUN.format(text=text, plan=plan, sync=sync))
    return path


def told(run: Path, name: str, *events: str) -> list[dict[str, Any]]:
    rows = map(json.loads, (run / name).read_text().splitlines())
    return [row for row in rows if not events or row["event"] in events]


def losses(run: Path) -> list[float]:
    return list({row["step"]: row["loss"] for row in told(run, "metrics.jsonl")}.values())


@pytest.mark.processes
def test_a_run_changes_the_exposed_codec_at_a_border_and_loses_nothing(
    tmp_path: Path, worker_pool: WorkerPool
) -> None:
    source = run_file(tmp_path, "changing", sync="change_codec_every = 4")
    run = trained(worker_pool, source, directory=tmp_path / "changing")
    (changed,) = told(run, "events.jsonl", "codec changed")
    assert (changed["step"], changed["stage"], changed["piece"]) == (4, 0, 0)
    assert changed["seconds"] > 0.0
    words = event_words(changed)
    assert words is not None
    assert '[sync] piece_codecs = "0.0 fp32"' in words[0]
    plan = reopen(run).plan
    assert plan.plan_id == changed["now"]
    assert plan.sync.options["piece_codecs"] == "0.0 fp32"
    assert not told(run, "events.jsonl", "began anew", "resume differs")
    assert (run / "report.html").read_text().count("codec of stage 0, piece 0") == 1
    assert not (run / "then").exists()

    # The same change by hand gives what is unsent to the owners of shares. In fp32 all of it is sent at once.
    by_hand = trained(
        worker_pool, run_file(tmp_path, "coarse", sync=""), directory=tmp_path / "by-hand", steps=4
    )
    without = tmp_path / "without"
    copytree(by_hand, without)
    fine = run_file(tmp_path, "fine", sync='piece_codecs = "0.0 fp32"')
    trained(worker_pool, fine, resume=by_hand, steps=7)
    assert losses(run) == pytest.approx(losses(by_hand), rel=1e-5)
    assert losses(run)[:4] == losses(by_hand)[:4]
    # Ranks have kept their own errors, which gives other sums of the same.
    changed_by_hand = saved(by_hand)
    assert not all(torch.equal(value, changed_by_hand[name]) for name, value in saved(run).items())
    forgets = run_file(tmp_path, "forgets", sync='piece_codecs = "0.0 fp32"\nerrors = "dropped"')
    trained(worker_pool, forgets, resume=without, steps=7)
    assert losses(run) != pytest.approx(losses(without), rel=1e-4)

    # A kill after the border, before the next checkpoint: the ranks' own errors are those of the former plan.
    killed = tmp_path / "killed"
    copytree(run, killed)
    rmtree(killed / "checkpoints" / "step-00000007")
    trained(worker_pool, killed)
    assert told(killed, "events.jsonl", "resumed")[-1]["checkpoint"] == "step-00000004"
    assert losses(killed) == losses(run)
    expected, found = saved(run), saved(killed)
    assert expected.keys() == found.keys()
    assert all(torch.equal(value, found[name]) for name, value in expected.items())
    assert not told(killed, "events.jsonl", "began anew", "resume differs")


def test_the_launcher_watches_by_the_plan_that_the_run_has_changed_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched: list[float] = []

    class Watch:
        def __init__(self, directory: RunDirectory, program: Program, *, step_s: float, report: Any) -> None:
            watched.append(step_s)

        def look(self) -> None:
            pass

    source = run_file(tmp_path, "changing", sync="change_codec_every = 4")
    planned, directory = prepared(source, directory=tmp_path / "run")
    monkeypatch.setattr(session, "HangWatch", Watch)
    poll = session._watching(planned, directory, None)
    poll()
    change = codec_change(planned, exposed_codecs(planned))
    assert change is not None
    later = changed_to(planned, change.plan, None)
    directory.prepare_turn(later)
    poll()
    directory.turn()
    poll()
    poll()
    assert watched == [planned.prediction.step_s, later.prediction.step_s]
    assert session.last_job(planned, directory).plan == later.plan


@pytest.mark.parametrize(
    ("sync", "plan", "problem"),
    [
        ("change_codec_every = 3", "", "sync: change_codec_every: 3 steps are too few to measure codecs in"),
        (
            "change_codec_every = 4",
            "then = { at_step = 5, pp = 1, dp = 2 }",
            "plan.then: the run may change its plan by itself after every 4 steps",
        ),
        ('piece_codecs = "0.7 fp32"', "", "sync.piece_codecs: stage 0, piece 7 is none of the 1 pieces"),
    ],
)
def test_a_run_that_cannot_change_codecs_is_refused_in_one_line(
    tmp_path: Path, sync: str, plan: str, problem: str
) -> None:
    with pytest.raises(InputError) as refused:
        prepared(run_file(tmp_path, "refused", sync=sync, plan=plan), directory=tmp_path / "run")
    (violation,) = refused.value.violations
    assert problem in str(violation)
    assert not (tmp_path / "run").exists()
