"""Another package's work fills bubbles: its kind, costs and items are all that it brings."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from installing import ROOT, install_method, register
from pool import WorkerPool
from pooled_runs import trained
from stopped_runs import saved, text_run

from weft.describe.run_file import parse_run
from weft.errors import InputError
from weft.methods.bubble_filling.options import options_of, read_windows
from weft.planning.planned import plan_run
from weft.program.kinds import KINDS
from weft.program.verify import verify

METHOD = """
import numpy as np
from weft.bundles import Bundle
from weft.describe.plan import Plan
from weft.describe.run_tables.methods import RunTable
from weft.describe.toml_table import Count, TomlTable
from weft.methods.bubble_filling.works import BubbleWork, WorkRows
from weft.predict.cost.hooks import CostOf, Taken
from weft.program.kinds import KINDS, Kind

class Table(TomlTable):
    "How often weights are looked at."
    every: Count = 4

LOOK = KINDS.register(Kind(name="look_at_weights", symbol="LW", stream="compute", reads=("weights",)))

def every(plan):
    choice = plan.method("looks")
    return None if choice is None else choice.options["every"]

def items(plan, graph, stage):
    return [WorkRows(kind=LOOK, part=layer) for layer in plan.stages[stage].layers]

def seconds(pricing, rows):
    taken = np.full(len(rows), 2e-4)
    return Taken(taken, 0 * taken, 0 * taken)

BUNDLE = Bundle(name="looks", parts=(
    RunTable(method="looks", table=Table, options=lambda table: table.model_dump()),
    BubbleWork(method="looks", every=every, items=items),
    CostOf(kind="look_at_weights", hook=seconds),
))
"""
RUN = {
    "model": {"preset": "gpt-1m"},
    "cluster": {"use": "4xa100-80gb"},
    "train": {"global_batch": 16},
    "goal": {"contract": "empirical"},
    "plan": {"pp": 4, "schedule": "1f1b", "micro_batch_size": 2},
    "looks": {},
}


@pytest.fixture
def looks(packages: Path) -> None:
    (packages / "weft_looks.py").write_text(METHOD)
    register(packages, "weft-looks", {"weft.methods": {"looks": "weft_looks:BUNDLE"}})


@pytest.mark.usefixtures("looks")
def test_work_of_another_package_is_placed_and_proved_beside_wefts_own() -> None:
    planned = plan_run(parse_run({**RUN, "kfac": {}, "bubble": {"work": ["looks", "kfac"]}}))
    windows, columns = read_windows(options_of(planned.plan).windows), planned.program.columns
    assert not verify(planned.program)
    looks = KINDS.code("look_at_weights")
    for stage, window in enumerate(windows):
        layers = planned.plan.stages[stage].layers
        own = (columns.stage == stage) & (columns.kind == looks)
        repeats = planned.program.steps_per_cycle // window.steps
        assert np.bincount(columns.part[own])[list(layers)].tolist() == [repeats] * len(layers)


@pytest.mark.usefixtures("looks")
def test_without_bubbles_the_work_is_done_behind_the_passes() -> None:
    planned = plan_run(parse_run(RUN))
    assert planned.program.steps_per_cycle == 4
    assert set(
        planned.program.columns.iteration[planned.program.columns.kind == KINDS.code("look_at_weights")]
    ) == {0}


@pytest.mark.usefixtures("looks")
def test_work_that_bubbles_leave_out_is_named() -> None:
    with pytest.raises(InputError, match="lacks 'looks', which the job has"):
        plan_run(parse_run({**RUN, "kfac": {}, "bubble": {"work": ["kfac"]}}))


@pytest.fixture
def weft_peak(packages: Path) -> Path:
    """The package that the page about work in bubbles prints."""
    text = (ROOT / "docs" / "bubble-work.md").read_text(encoding="utf-8")
    pure, runtime = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    install_method(packages, "weft_peak", "weight-peak", pure, runtime)
    return packages


def test_the_work_of_every_step_that_the_page_prints_is_trained(
    tmp_path: Path, weft_peak: Path, worker_pool: WorkerPool
) -> None:
    more = "[goal]\ncontract = 'empirical'\n[bubble]\nwork = ['weight-peak']\n"
    source = tmp_path / "run.toml"
    source.write_text(text_run(tmp_path, more, steps=3))
    run = trained(worker_pool, source, directory=tmp_path / "run", packages=weft_peak)
    peaks = [
        json.loads(line)["mean_weight_peak"] for line in (run / "metrics.jsonl").read_text().splitlines()
    ]
    assert len(peaks) == 3
    # Of the weights before each step: the last step has no part in it.
    assert 0.0 < peaks[0] < peaks[2] < max(float(one.abs().max()) for one in saved(run).values())
    assert "weight-peak" in (run / "report.html").read_text()
