"""Runs from plan to accuracy and perplexity: the newest checkpoint is evaluated on the plan's ranks."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pool import RankError, WorkerPool
from pooled_runs import prepared, trained

import weft
from weft.cli.files import Summary
from weft.cli.main import run as command
from weft.errors import InputError
from weft.progress import WorkDone
from weft.run.launch.worker_start import WorkerContext
from weft.training.evaluation.held_out import evaluate
from weft.training.session import reopen
from weft.training.tasks import make_task
from weft.training.tasks.base import Meter, Task, TaskSettings, sources_of_task

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("warm_starts")]

RUN = """
[model]
preset = "{preset}"
[task]
kind = "{kind}"
data = "{data}"
{sequence}
[train]
global_batch = 64
steps = {steps}
precision = "fp32"
[optimizer]
learning_rate = 1e-3
[plan]
pp = {pp}
micro_batch_size = 16
"""


def small_run(
    pool: WorkerPool, folder: Path, steps: int, pp: int, kind: str = "image-classification"
) -> Path:
    images = kind == "image-classification"
    (folder / "text.txt").write_text("the weft goes under and over the warp\n" * 200)
    run_file = folder / "run.toml"
    run_file.write_text(
        RUN.format(
            preset={"image-classification": "vit-digits", "masked-lm": "bert-1m", "causal-lm": "gpt-1m"}[
                kind
            ],
            kind=kind,
            data="digits" if images else "text.txt",
            sequence="" if images else "sequence = 16",
            steps=steps,
            pp=pp,
        )
    )
    return trained(pool, run_file, directory=folder / "run")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WEFT_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def test_digits_are_learned_and_evaluated(tmp_path: Path, worker_pool: WorkerPool) -> None:
    run_dir = small_run(worker_pool, tmp_path, steps=60, pp=2)
    summary = json.loads((run_dir / "summary.json").read_text())
    Summary.model_validate(summary)
    assert summary["final_loss"] < 0.8 * summary["first_loss"]
    events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    assert events[-1]["accuracy"] == summary["final_metrics"]["accuracy"] > 0.2 > events[0]["accuracy"]
    before = (run_dir / "events.jsonl").read_bytes(), (run_dir / "measured.parquet").read_bytes()

    told: list[WorkDone] = []
    result = weft.evaluate(run_dir, report=told.append)
    assert told[-1] == WorkDone("held-out samples", 2, 2, "batches")
    assert json.loads((run_dir / "evaluation.json").read_text()) == result
    assert (result["step"], result["samples"], result["held_out_samples"]) == (60, 128, 179)
    assert "perplexity" not in result
    loss, accuracy = alone(run_dir, range(128))
    assert result["loss"] == pytest.approx(loss, rel=1e-5)
    assert result["accuracy"] == pytest.approx(accuracy, abs=1e-12)
    # An evaluation leaves the run as it was.
    assert before == ((run_dir / "events.jsonl").read_bytes(), (run_dir / "measured.parquet").read_bytes())


def whole_model(run_dir: Path, dtype: torch.dtype) -> Any:
    """The model with a checkpoint's tensors."""
    from safetensors.torch import load_file

    from weft.run.stage.build import build_stage

    job = reopen(run_dir)
    model = build_stage(job.problem.model, range(job.problem.model.layers + 2), 0, dtype)
    [newest] = (run_dir / "checkpoints").glob("step-*")
    saved = {name: value for file in newest.glob("*.safetensors") for name, value in load_file(file).items()}
    for name, parameter in model.named_parameters():
        parameter.data = next(value for key, value in saved.items() if key.endswith(name))
    return model


def alone(run_dir: Path, samples: range) -> tuple[float, float]:
    """Loss and accuracy of the checkpoint's tensors in the whole model of one process."""
    job, model = reopen(run_dir), whole_model(run_dir, torch.float32)
    task = make_task(
        job.run.task.kind,
        TaskSettings(
            data="digits",
            sequence=17,
            vocabulary=10,
            cache=run_dir.parent / "home" / "cache",
            image_size=8,
            channels=1,
        ),
    )
    pixels, labels = task.batch(np.array(samples), held_out=True)
    with torch.no_grad():
        logits = model(pixels)
    return task.loss(logits, labels).item(), task.metrics(logits, labels)["accuracy"]  # type: ignore[attr-defined]


def test_a_language_model_is_told_its_perplexity(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], worker_pool: WorkerPool
) -> None:
    run_dir = small_run(worker_pool, tmp_path, steps=2, pp=1, kind="causal-lm")
    assert command(["eval", str(run_dir)]) == 0
    result = json.loads((run_dir / "evaluation.json").read_text())
    assert f"perplexity {result['perplexity']:.4g}" in " ".join(capsys.readouterr().out.split())
    assert result["perplexity"] == math.exp(result["loss"])
    assert "accuracy" not in result
    # One token per byte, and one more for the end of each document.
    assert result["bits_per_byte"] == pytest.approx(result["loss"] / math.log(2), rel=0.01)
    assert result["bits_per_byte"] > result["loss"] / math.log(2)


MIXTURE = """
[model]
preset = "mixtral-1m"
[task]
data = {"code.txt" = 1, "prose.txt" = 3}
sequence = 16
[train]
global_batch = 8
steps = 1
precision = "fp64"
[experts]
balance = "none"
[plan]
pp = 2
micro_batch_size = 2
"""


def test_sources_are_evaluated_one_by_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], worker_pool: WorkerPool
) -> None:
    (tmp_path / "code.txt").write_text("".join(f"x{number} = {number} + 1\n" for number in range(600)))
    (tmp_path / "prose.txt").write_text("the weft goes under and over the warp\n" * 300)
    (tmp_path / "run.toml").write_text(MIXTURE)
    run_dir = trained(worker_pool, tmp_path / "run.toml", directory=tmp_path / "run")
    assert command(["eval", str(run_dir)]) == 0
    result = json.loads((run_dir / "evaluation.json").read_text())
    printed = capsys.readouterr().out
    names = [str(tmp_path / "code.txt"), str(tmp_path / "prose.txt")]
    assert sorted(result["by_source"]) == names
    for name in names:
        own = result["by_source"][name]
        loss, experts = chosen_alone(run_dir, names.index(name))
        assert own["loss"] == pytest.approx(loss, rel=1e-9)
        assert own["perplexity"] == math.exp(own["loss"])
        assert f"{name}: loss {own['loss']:.4g}, perplexity" in printed
        assert len(own["experts"]) == len(experts)
        for found, (rates, scores) in zip(own["experts"], experts, strict=True):
            assert found["rates"] == pytest.approx(rates, abs=1e-12)
            assert found["chosen_scores"] == pytest.approx(scores, rel=1e-9)
            slack = found["balance_of_samples"] - found["balance"]
            assert found["slack"] == pytest.approx(slack, rel=1e-9)
            assert found["balance"] > 0
    code, prose = (result["by_source"][name]["loss"] for name in names)
    assert result["loss"] == pytest.approx(0.25 * code + 0.75 * prose, rel=1e-12)
    assert result["perplexity"] == math.exp(result["loss"])
    # The blend's numbers would repeat the shorter source.
    counts = [len(one.held_out) for one in sources_of_task(task_of(run_dir))]
    assert result["held_out_samples"] == sum(counts) < task_of(run_dir).held_out_samples
    assert result["samples"] == sum(count // 8 * 8 for count in counts)
    # A run's end has the same figures, over fewer samples; the report shows them.
    summary = json.loads((run_dir / "summary.json").read_text())
    Summary.model_validate(summary)
    assert sorted(summary["by_source"]) == names
    page = (run_dir / "report.html").read_text()
    for name in names:
        loss = summary["by_source"][name]["loss"]
        assert f'<th scope="row">{name}</th><td class="number">{loss:.4g}</td>' in page
        assert f'<th scope="row">experts of {name}</th>' in page
    [row] = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert sorted(set(row["sample_sources"])) == [0, 1]
    assert len(row["sample_sources"]) == 8


def task_of(run_dir: Path) -> Task:
    settings = TaskSettings(
        data=reopen(run_dir).run.task.data,
        sequence=16,
        vocabulary=257,
        cache=run_dir.parent / "home" / "cache",
    )
    return make_task("causal-lm", settings)


def chosen_alone(run_dir: Path, number: int) -> tuple[float, list[tuple[list[float], float]]]:
    """The loss over a source's held-out samples, and of each layer the rates and scores of its experts."""
    task, model = task_of(run_dir), whole_model(run_dir, torch.float64)
    own = sources_of_task(task)[number].held_out
    decided = []
    for router in model.routers().values():
        router.register_forward_hook(lambda _, inputs, outputs: decided.append(outputs))
    inputs, targets = task.batch(np.array(own[: len(own) // 8 * 8]), held_out=True)
    with torch.no_grad():
        loss = task.loss(model(inputs), targets).item()
    layers = []
    for logits, _, chosen in decided:
        rates = [(chosen == one).any(1).double().mean().item() for one in range(logits.shape[1])]
        layers.append((rates, logits.softmax(-1).gather(1, chosen).sum(1).mean().item()))
    return loss, layers


def test_a_masked_language_model_is_told_its_accuracy_too(tmp_path: Path, worker_pool: WorkerPool) -> None:
    run_dir = small_run(worker_pool, tmp_path, steps=2, pp=1, kind="masked-lm")
    results = worker_pool.run(evaluated, run_dir, ranks=reopen(run_dir).plan.ranks)
    assert results == [json.loads((run_dir / "evaluation.json").read_text())] * len(results)
    assert results[0]["perplexity"] == math.exp(results[0]["loss"])
    assert 0.0 <= results[0]["accuracy"] <= 1.0
    assert "bits_per_byte" not in results[0]


def evaluated(rank: int, ranks: int, run_dir: Path) -> dict[str, float]:
    return evaluate(reopen(run_dir), run_dir, WorkerContext(rank, ranks, rank, "cpu", 1))


def test_a_run_without_a_checkpoint_is_refused(tmp_path: Path, worker_pool: WorkerPool) -> None:
    (tmp_path / "run.toml").write_text(
        RUN.format(
            preset="vit-digits", kind="image-classification", data="digits", sequence="", steps=1, pp=1
        )
        + "dp = 1\ntp = 1\n"
    )
    prepared(tmp_path / "run.toml", directory=tmp_path / "run")
    with pytest.raises(RankError, match="it has no checkpoint to evaluate"):
        worker_pool.run(evaluated, tmp_path / "run", ranks=1)


def test_what_is_no_run_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"it has no run\.toml"):
        weft.evaluate(tmp_path)


def metered(rank: int, ranks: int) -> dict[str, float]:
    """Ranks count 1, 2, ... micro-batches; the loss of a closed meter counts nothing."""

    class Levels:
        def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return outputs.mean()

        def metrics(self, outputs: torch.Tensor, targets: torch.Tensor) -> dict[str, float]:
            return {"level": outputs.mean().item()}

    meter = Meter(Levels())  # type: ignore[arg-type]
    value = torch.tensor([float(rank + 1)])
    meter(100 * value, value)
    with meter.open():
        for _ in range(rank + 1):
            assert meter(value, value).item() == rank + 1
    meter(100 * value, value)
    return meter.collect()


def test_a_meter_counts_every_micro_batch_of_every_rank_once(worker_pool: WorkerPool) -> None:
    assert worker_pool.run(metered, ranks=3) == [{"level": (1 + 2 * 2 + 3 * 3) / 6}] * 3
