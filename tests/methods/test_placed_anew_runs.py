"""Runs whose stages become slower: their work is placed anew at a border, and a kill loses nothing."""

from __future__ import annotations

import json
from pathlib import Path
from shutil import copytree, rmtree
from typing import Any

import numpy as np
import pytest
import torch
from installing import install_method
from pool import WorkerPool
from pooled_runs import prepared, trained
from stopped_runs import saved, text_run

from weft.methods.bubble_filling.drift import read_factors
from weft.methods.bubble_filling.options import options_of, read_windows
from weft.planning.planned_job import PlannedJob
from weft.program.kinds import BACKWARD, FORWARD, KINDS, is_any_of
from weft.program.verify import verify
from weft.training.directory.event_words import event_words
from weft.training.session import reopen

pytestmark = pytest.mark.usefixtures("own_home")

# Work that sleeps, in pieces longer than every predicted bubble, and layers that sleep from a step on.
PURE = """
import numpy as np
from weft.bundles import Bundle
from weft.describe.run_tables.methods import RunTable
from weft.describe.toml_table import Count, TomlTable
from weft.methods.bubble_filling.works import BubbleWork, WorkRows
from weft.predict.cost.hooks import CostOf, Taken
from weft.program.kinds import KINDS, Kind
from weft.program.passes import Pass

NAME, NAP_S, SLOW_S = "naps", 0.02, 0.06
NAP = KINDS.register(Kind(name="nap", symbol="NP", stream="compute"))

class Table(TomlTable):
    "Naps of a window, and the step from which each layer is slow."
    count: Count = 3
    slow_from: Count = 1

def every(plan):
    return 1 if plan.method(NAME) else None

def items(plan, graph, stage):
    return [WorkRows(kind=NAP, part=one) for one in range(plan.method(NAME).options["count"])]

def seconds(pricing, rows):
    taken = np.full(len(rows), NAP_S)
    return Taken(taken, 0 * taken, 0 * taken)

BUNDLE = Bundle(name=NAME, runtime="weft_naps.runtime", parts=(
    RunTable(method=NAME, table=Table, options=lambda table: table.model_dump()),
    BubbleWork(method=NAME, every=every, items=items),
    Pass(name=NAME, options=lambda plan, graph: plan.method(NAME)),
    CostOf(kind="nap", hook=seconds),
))
"""
RUNTIME = """
import time
from weft.run.methods import HandlerOf, MethodState, StateOf
from weft.run.stage.taps import Tap
from weft_naps import NAME, NAP_S, SLOW_S

def nap(workspace, instruction):
    return lambda stream: stream.run(str(instruction), lambda: time.sleep(NAP_S))

class Slow(MethodState):
    def __init__(self, making):
        self.slow_from = making.plan.method(NAME).options["slow_from"]

    def taps(self, stage):
        return (Tap(layer_input=lambda now, layer, value: time.sleep(SLOW_S * (now.step >= self.slow_from))),)

PARTS = (HandlerOf(kind="nap", handler=nap), StateOf(method=NAME, make=Slow))
"""
MORE = """
[checkpoint]
every = 100
[goal]
contract = "empirical"
[kfac]
[naps]
slow_from = {slow_from}
[bubble]
work = ["kfac", "naps"]
place_anew_every = {every}
"""


@pytest.fixture
def naps(packages: Path) -> Path:
    install_method(packages, "weft_naps", "naps", PURE, RUNTIME)
    return packages


# So small that K-FAC takes no time beside naps.
MODEL = {"model_type": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16, "vocab_size": 256}


def run_file(tmp_path: Path, *, steps: int, slow_from: int = 1, every: int = 1) -> Path:
    path, model = tmp_path / "run.toml", tmp_path / "config.json"
    model.write_text(json.dumps(MODEL))
    more = MORE.format(slow_from=slow_from, every=every)
    path.write_text(text_run(tmp_path, more, steps=steps, model=f'hf = "{model}"'))
    return path


def rows(run: Path, name: str, *events: str) -> list[dict[str, Any]]:
    found = map(json.loads, (run / name).read_text().splitlines())
    return [row for row in found if not events or row["event"] in events]


def metric(run: Path, name: str) -> list[float]:
    return list({row["step"]: row[name] for row in rows(run, "metrics.jsonl")}.values())


def windows(job: PlannedJob) -> list[int]:
    return [one.steps for one in read_windows(options_of(job.plan).windows)]


def naps_between_passes(job: PlannedJob) -> int:
    """The naps of a cycle that come before the last pass of their step."""
    columns, found = job.program.columns, 0
    passes = is_any_of(columns.kind, [FORWARD, BACKWARD])
    for row in np.flatnonzero(columns.kind == KINDS.code("nap")):
        alike = (columns.rank == columns.rank[row]) & (columns.iteration == columns.iteration[row])
        found += int(row < np.flatnonzero(alike & passes)[-1])
    return found


@pytest.mark.processes
def test_a_run_places_work_anew_when_its_stages_become_slow(
    tmp_path: Path, naps: Path, worker_pool: WorkerPool
) -> None:
    first, _ = prepared(run_file(tmp_path, steps=999, every=0), directory=tmp_path / "planned")
    cycle = first.program.steps_per_cycle
    assert naps_between_passes(first) == 0, "naps find a bubble"
    border = 3 * cycle
    source = run_file(tmp_path, steps=border + 3, slow_from=cycle)
    run = trained(worker_pool, source, directory=tmp_path / "run", packages=naps)
    # Two slow cycles are measured, behind the first one.
    [told] = rows(run, "events.jsonl", "work placed anew", "work stays", "work not measured")
    assert (told["event"], told["step"]) == ("work placed anew", border)
    assert told["step_s"] < told["former_step_s"]
    words, bad = event_words(told) or ("", True)
    assert "forward of stage" in words
    assert not bad
    now = reopen(run)
    assert now.plan.plan_id == told["now"] != told["former"]
    assert windows(now) == told["windows"]
    assert naps_between_passes(now) > 0
    assert not verify(now.program)
    factors = read_factors(options_of(now.plan).measured)
    slow = {(one.stage, one.rank) for one, factor in factors.items() if one.kind == "forward" and factor > 2}
    assert slow == {(0, 0), (1, 1)}
    # Steps go on with the inverses that they have.
    ages = metric(run, "curvature_age_steps")
    assert ages[border] <= ages[border - 1] + 1 < border
    assert ages[-1] < ages[border]
    report = (run / "report.html").read_text()
    assert f"placed anew after {border} steps" in report
    assert "placed for measured times" in report
    assert not (run / "then").exists()

    # A kill behind the border, before the next checkpoint.
    killed = tmp_path / "killed"
    copytree(run, killed)
    rmtree(killed / "checkpoints" / f"step-{border + 3:08}")
    trained(worker_pool, killed, packages=naps)
    assert rows(killed, "events.jsonl", "resumed")[-1]["checkpoint"] == f"step-{border:08}"
    assert reopen(killed).plan == now.plan
    assert metric(killed, "loss") == metric(run, "loss")
    expected, found = saved(run), saved(killed)
    assert expected.keys() == found.keys()
    assert all(torch.equal(value, found[name]) for name, value in expected.items())
    assert not rows(killed, "events.jsonl", "resume differs")
