"""Loggers of whole runs: what is logged is what the run says of itself, through kills and failures."""

from __future__ import annotations

import csv
import json
import os
import signal
import socket
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from pool import RankError, WorkerPool
from small_plans import make_plan, tiny

from weft.describe.catalogue import catalogue
from weft.describe.cluster import Cluster, Link, NodeGroup
from weft.describe.families import layer_graph
from weft.describe.job import Job
from weft.describe.run_file import parse_run
from weft.errors import InputError
from weft.planning.planned_job import PlannedJob
from weft.planning.problem import Problem
from weft.run.launch.worker_start import WorkerContext
from weft.training.directory.run_directory import RunDirectory
from weft.training.loggers import config_of, require_loggers
from weft.training.tasks.text import CausalLanguageModelling

CONFIG = replace(tiny(layers=1), vocabulary=256)
STEPS, EVERY = 6, 2


class Killed(CausalLanguageModelling):
    """Kills its process at the fourth step, when the checkpoint of the second one is there."""

    def batch(self, samples: np.ndarray, *, held_out: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        if not held_out and (run_dir := os.environ.get("TEST_KILL")):
            rows = RunDirectory(Path(run_dir)).metrics()
            saved = Path(run_dir, "checkpoints", f"step-{EVERY:08d}").exists()
            if saved and len(rows) > EVERY:
                os.kill(os.getpid(), signal.SIGKILL)
        return super().batch(samples, held_out=held_out)


def job_of(text: Path, log: list[str], *, steps: int = STEPS) -> PlannedJob:
    plan = make_plan(CONFIG, micro_batches=2, schedule="1f1b", precision="fp32")
    record = {
        "model": {"preset": "unused"},
        "task": {"kind": f"{__name__}:Killed", "data": str(text)},
        "train": {"steps": steps},
        "checkpoint": {"every": EVERY},
        "report": {"log": log},
    }
    graph = layer_graph(CONFIG)
    group = NodeGroup(name="all", count=1, device=catalogue()["t4"].device, devices=1, link=Link(1e9, 1e-5))
    cluster = Cluster(name="test", groups=(group,))
    job = Job(graph=graph, cluster=cluster, global_batch=plan.global_batch, sequence=plan.sequence)
    return PlannedJob(run=parse_run(record), problem=Problem(job=job, model=CONFIG), plan=plan)


def run_training(rank: int, ranks: int, run_dir: Path, log: list[str], killed: bool = False) -> int:
    from weft.training.loop import train

    os.environ["WEFT_HOME"] = str(run_dir.parent / "home")
    os.environ["TEST_KILL"] = str(run_dir) if killed else ""
    # 60 steps leave time for the checkpoint of the second one to be written in the background.
    job = job_of(run_dir.parent / "text.txt", log, steps=60 if killed else STEPS)
    return train(job, run_dir, WorkerContext(rank, ranks, rank, "cpu", 1))


def run_collected(rank: int, ranks: int, run_dir: Path, endpoint: str) -> int:
    os.environ.update(OTEL_EXPORTER_OTLP_ENDPOINT=endpoint, OTEL_EXPORTER_OTLP_TIMEOUT="1")
    return run_training(rank, ranks, run_dir, ["opentelemetry"])


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_bytes(b"warp weft loom\n" * 200)
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def csv_rows(run_dir: Path, name: str = "metrics.csv") -> list[dict[str, str]]:
    with open(run_dir / name, newline="") as file:
        return list(csv.DictReader(file))


def problems(run_dir: Path) -> list[str]:
    return RunDirectory(run_dir).logger_problems()


@pytest.mark.processes
def test_a_killed_and_resumed_run_has_every_step_once(worker_pool: WorkerPool, run_dir: Path) -> None:
    with pytest.raises(RankError):
        worker_pool.run(run_training, run_dir, ["csv"], True, ranks=1)
    assert len(csv_rows(run_dir)) >= EVERY
    worker_pool.run(run_training, run_dir, ["csv"], ranks=1)
    rows = csv_rows(run_dir)
    assert [int(row["step"]) for row in rows] == list(range(STEPS))
    for key in ("loss", "learning_rate", "step_s", "epoch", "time_s"):
        assert [float(row[key]) for row in rows] == [row[key] for row in RunDirectory(run_dir).metrics()]
    held_out = csv_rows(run_dir, "held_out.csv")
    result = json.loads((run_dir / "result.json").read_text())
    assert [int(row["step"]) for row in held_out] == [0, STEPS]
    assert [float(row["held_out_loss"]) for row in held_out] == [result["first_loss"], result["final_loss"]]
    assert problems(run_dir) == []


@pytest.mark.processes
def test_a_run_tells_a_collector_its_newest_figures(worker_pool: WorkerPool, run_dir: Path) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the extra is not installed")
    from otlp_receiver import otlp_receiver

    with otlp_receiver() as receiver:
        worker_pool.run(run_collected, run_dir, receiver.endpoint, ranks=1)
    newest, (_, held_out) = RunDirectory(run_dir).metrics()[-1], RunDirectory(run_dir).held_out()
    assert receiver.values["weft.train.finished_steps"] == STEPS
    assert receiver.values["weft.train.loss"] == newest["loss"]
    assert receiver.values["weft.train.step.duration"] == newest["step_s"]
    assert receiver.values["weft.held_out.loss"] == held_out["held_out_loss"]
    assert receiver.resource["weft.run.name"] == run_dir.name
    assert receiver.resource["weft.plan.id"] == job_of(run_dir, []).plan.plan_id
    assert problems(run_dir) == []


@pytest.mark.processes
def test_a_run_without_its_collector_ends_well(worker_pool: WorkerPool, run_dir: Path) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the extra is not installed")
    with socket.create_server(("127.0.0.1", 0)) as free:
        endpoint = f"http://127.0.0.1:{free.getsockname()[1]}"
    assert worker_pool.run(run_collected, run_dir, endpoint, ranks=1) == [0]
    (problem,) = problems(run_dir)
    assert problem.startswith("logger opentelemetry: failed and is off: RunError: 1 of 1 exports failed")
    assert (run_dir / "result.json").exists()


@pytest.mark.processes
def test_a_logger_that_cannot_start_does_not_stop_the_run(worker_pool: WorkerPool, run_dir: Path) -> None:
    (run_dir / "metrics.csv").mkdir()
    assert worker_pool.run(run_training, run_dir, ["csv", "wandb:wandb_like"], ranks=1) == [0]
    (problem,) = problems(run_dir)
    assert problem.startswith("logger csv: failed and is off: IsADirectoryError: ")
    assert (run_dir / "result.json").exists()


def test_the_config_is_the_run_file_and_the_plan_in_short(tmp_path: Path) -> None:
    job = job_of(tmp_path, ["csv"])
    config = json.loads(json.dumps(config_of(job)))
    assert config["run"]["checkpoint"] == {
        "every": EVERY,
        "keep": 2,
        "load_timeout_s": 30.0,
        "weight_log": False,
    }
    assert config["run"]["report"]["log"] == ["csv"]
    assert config["plan"]["plan_id"] == job.plan.plan_id
    assert config["plan"]["mesh"] == {"dp": 1, "pp": 1}


def test_missing_packages_are_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    require_loggers(["csv"])
    with pytest.raises(InputError) as refusal:
        require_loggers(["csv", "tensorboard", "wandb", "trackio", "opentelemetry", "wandb:looms.log"])
    assert str(refusal.value).splitlines() == [
        "report.log: 'tensorboard' needs the package tensorboard or tensorboardX, which is not installed: "
        'pip install ".[loggers]" in the folder of weft',
        "report.log: 'wandb' needs the package wandb, which is not installed: pip install \".[loggers]\" "
        "in the folder of weft",
        "report.log: 'trackio' needs the package trackio, which is not installed: "
        'pip install ".[loggers]" in the folder of weft',
        "report.log: 'opentelemetry' needs the package opentelemetry.exporter.otlp.proto.http, "
        'which is not installed: pip install ".[opentelemetry]" in the folder of weft',
        "report.log: 'wandb:looms.log' needs the package looms.log, which is not installed: "
        "install looms.log",
    ]


def test_a_module_in_a_missing_package_is_missing() -> None:
    with pytest.raises(InputError, match=r"needs the package no_such_package\.log"):
        require_loggers(["wandb:no_such_package.log"])
