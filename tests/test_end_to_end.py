"""The whole way on real text and two processes: plan, train, compare, resume, report."""

from __future__ import annotations

import errno
import json
import re
import socket
from pathlib import Path

import pytest

import weft
from weft.cli.files import Summary
from weft.cli.main import run
from weft.timeline.store import read_timeline
from weft.training.directory.run_directory import RunDirectory

RUN = """
[model]
preset = "gpt-1m"
[task]
data = "{data}"
sequence = 32
[train]
global_batch = 4
steps = {steps}
[cluster]
use = "this-machine"
[plan]
pp = 2
dp = 1
loops = 2
schedule = "breadth-first"
micro_batch_size = 1
[checkpoint]
every = 100
"""


@pytest.fixture(autouse=True)
def _own_home(tmp_path, monkeypatch):
    monkeypatch.setenv("WEFT_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)


def run_file(tmp_path: Path, steps: int) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir(exist_ok=True)
    for index in range(40):
        text = f"Text {index} tells of {index * index} sheep. " * 40
        (folder / f"{index}.txt").write_text(text)
    path = tmp_path / "small.toml"
    path.write_text(RUN.format(data=folder, steps=steps))
    return path


@pytest.mark.processes
@pytest.mark.usefixtures("warm_starts")
def test_a_run_from_the_command_line_and_its_resumption(tmp_path, capfd, monkeypatch):
    path = run_file(tmp_path, steps=7)
    directory = tmp_path / "run"
    assert run(["train", str(path), "--directory", str(directory)]) == 0
    printed = capfd.readouterr()
    assert re.search(r"step 7/7  loss .* tokens/s  0 s left", printed.out)
    assert f"all 7 steps are done; train on with: weft train {directory} --steps 14" in printed.out
    assert printed.err == ""

    summary = json.loads((directory / "summary.json").read_text())
    Summary.model_validate(summary)
    assert summary["steps"] == 7
    assert summary["final_loss"] < summary["first_loss"]
    predicted, measured = (
        read_timeline(directory / name) for name in ("predicted.parquet", "measured.parquet")
    )
    assert set(predicted.id.tolist()) == set(measured.id.tolist())
    assert sorted(set(measured.step.tolist())) == list(range(7))
    page = (directory / "report.html").read_text()
    assert summary["plan_id"] in page
    assert json.loads((directory / "trace.json").read_text())["traceEvents"]

    assert run(["compare", str(directory), "--json"]) == 0
    record = json.loads(capfd.readouterr().out)
    assert record["only_predicted"] == record["only_measured"] == 0

    # All that is said of the run's prediction is one figure: predicted / measured - 1.
    error = summary["predicted_step_s"] / summary["measured_step_s"] - 1
    assert run(["compare", str(directory)]) == 0
    compared = capfd.readouterr().out
    assert run(["score", "--ledger", "--json"]) == 0
    scored = json.loads(capfd.readouterr().out)["ledger"]["step_s"]
    assert record["error"] == pytest.approx(error)
    assert scored["median_error"] == pytest.approx(error)
    words = f"(error {error:+.1%})"
    prediction = RunDirectory(directory).prediction()
    inside = prediction.step_low_s <= summary["measured_step_s"] <= prediction.step_high_s
    for text in (" ".join(printed.out.split()), " ".join(compared.split())):
        assert words in text
        assert f"{'inside' if inside else 'outside'} the 90 % interval {prediction.interval}" in text
    assert f">{error:+.1%}</span>" in page

    assert run(["runs", str(tmp_path), "--json"]) == 0
    (listed,) = json.loads(capfd.readouterr().out)["runs"]
    assert (listed["state"], listed["done"], listed["steps"]) == ("finished", 7, 7)
    assert listed["held_out_loss"] == summary["final_loss"]
    assert listed["predicted_step_s"] == summary["predicted_step_s"]

    # The plan of a run, wherever it lies, is compared with what the run measured.
    plan = tmp_path / "elsewhere.json"
    plan.write_text((directory / "plan.json").read_text())
    assert run(["compare", str(plan), str(directory), "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["only_measured"] == 0

    # The run teaches predictions once, however often it is named.
    assert run(["corrections", str(directory), str(directory), "--json"]) == 0
    (learned,) = json.loads(capfd.readouterr().out)["corrections"]
    assert (learned["count"], learned["model"]) == (1, "gpt-1m")
    assert learned["error"] == pytest.approx(error)
    assert run(["plan", str(path), "--json"]) == 0
    best = json.loads(capfd.readouterr().out)["candidates"][0]
    assert best["step_s"] != summary["predicted_step_s"]

    with monkeypatch.context() as patch:
        # A finished run starts no process.
        patch.setattr("weft.training.session.launch_workers", None)
        assert run(["train", str(directory)]) == 0
    done = f"all 7 steps are done; train on with: weft train {directory} --steps 14\n"
    assert capfd.readouterr() == (done, "")

    assert run(["train", str(directory), "--steps", "9", "--watch", "--json"]) == 0
    printed = capfd.readouterr()
    resumed = json.loads(printed.out)
    # The page was there, and has ended with the training.
    found = re.fullmatch(r"watch: http://127.0.0.1:(\d+)/\?token=\S+\n", printed.err)
    assert found is not None
    with socket.socket() as page:
        assert page.connect_ex(("127.0.0.1", int(found[1]))) == errno.ECONNREFUSED
    assert resumed["steps"] == 9
    steps = [json.loads(line)["step"] for line in (directory / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(9))

    # Nothing is left to do: no worker starts.
    events = (directory / "events.jsonl").read_text()
    assert run(["train", str(directory), "--json"]) == 0
    assert json.loads(capfd.readouterr().out) == resumed
    assert (directory / "events.jsonl").read_text() == events


@pytest.mark.processes
@pytest.mark.usefixtures("warm_starts")
def test_the_python_way(tmp_path):
    run_file(tmp_path, steps=6)
    plan = weft.plan(model="gpt-1m", on="this-machine", global_batch=4, sequence=32, pp=1, dp=2)
    assert plan.plan.mesh == {"pp": 1, "dp": 2}
    assert len(plan.simulate()) == len(plan.job.program)
    assert plan._repr_html_().startswith('<div class="weft-plan">')
    finished = weft.train(plan, data=str(tmp_path / "texts"), steps=6, directory=tmp_path / "run")
    assert finished.summary["world_size"] == 2
    assert finished.compare().matched == len(plan.job.program)


def test_a_run_without_data_is_refused_before_anything_is_lost(tmp_path, capsys):
    path = run_file(tmp_path, steps=3)
    empty = tmp_path / "empty.txt"
    empty.write_text("")
    assert run(["train", str(path), "--data", str(empty), "--directory", str(tmp_path / "run")]) == 2
    assert "empty" in capsys.readouterr().err
