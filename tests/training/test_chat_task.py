"""`chat`: one mean over all answers of a step, whatever the micro-batches and the plan."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from equality_table import Row
from hypothesis import given
from hypothesis import strategies as st
from methods.rows.packing import PACKS
from pool import RankError, WorkerPool
from training.test_loop import CONFIG, job_of, losses, rows

from weft.describe.plan import Plan
from weft.describe.run_file import parse_run
from weft.errors import InputError
from weft.run.launch.worker_start import WorkerContext
from weft.training.loop import train
from weft.training.tasks.base import TaskSettings
from weft.training.tasks.chat import Chat


def chats(folder: Path, count: int = 60) -> Path:
    path = folder / "chats.jsonl"
    if not path.exists():
        random = np.random.default_rng(0)
        with open(path, "w") as file:
            for _ in range(count):
                one, other, words = random.integers(0, 9, 3).tolist()
                row = {"prompt": f"{one}+{other}=", "completion": f"{one + other}" + " yes" * words}
                file.write(json.dumps(row) + "\n")
    return path


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Chat:
    folder = tmp_path_factory.mktemp("chat")
    data = str(chats(folder))
    return Chat(TaskSettings(data=data, sequence=40, vocabulary=256, cache=folder / "cache"))


@pytest.fixture(scope="module")
def packed_task(tmp_path_factory: pytest.TempPathFactory) -> Chat:
    folder = tmp_path_factory.mktemp("packed-chat")
    data = str(chats(folder))
    return Chat(TaskSettings(data=data, sequence=40, vocabulary=256, cache=folder / "cache", packing=True))


@given(st.lists(st.integers(0, 50), min_size=6, max_size=6), st.sampled_from([1, 2, 3, 6]), st.booleans())
def test_the_mean_of_micro_batches_is_the_mean_over_all_targets(
    task: Chat, numbers: list[int], size: int, held_out: bool
) -> None:
    samples = np.array(numbers) % (task.held_out_samples if held_out else task.samples)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 40, 256, dtype=torch.float64, generator=generator)
    parts = []
    for first in range(0, 6, size):
        _, targets = task.batch(samples[first : first + size], held_out=held_out, among=samples)
        parts.append(task.loss(logits[first : first + size], targets))
    inputs, targets = task.batch(samples, held_out=held_out)
    assert inputs.shape == (6, 40)
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets[:, :-2].flatten())
    assert torch.stack(parts).mean().item() == pytest.approx(expected.item(), rel=1e-12)


def test_no_question_is_a_target(task: Chat) -> None:
    _, targets = task.batch(np.arange(task.samples))
    said = targets[:, :-2]
    asked = said != -100
    assert not {ord("+"), ord("=")} & set(said[asked].tolist())
    assert (asked.sum(1) == torch.from_numpy(task.corpus.training.counts)).all()


def run_chat(rank: int, ranks: int, run_dir: Path, plan: Plan, steps: int = 4) -> int:
    os.environ["WEFT_HOME"] = str(run_dir.parent / "home")
    job = job_of(plan, run_dir.parent / "chats.jsonl", steps, "chat")
    return train(job, run_dir, WorkerContext(rank, ranks, rank, "cpu", 1))


@pytest.mark.processes
@pytest.mark.parametrize("packing", [False, True])
def test_every_plan_trains_on_the_same_means(worker_pool: WorkerPool, tmp_path: Path, packing: bool) -> None:
    chats(tmp_path, 200)
    # Sizes that keep the global batch at eight samples.
    layouts: dict[str, dict[str, Any]] = {
        "one": {"micro_batches": 1, "micro_batch_size": 8},
        "pipeline": {"pp": 2, "micro_batches": 8, "micro_batch_size": 1, "schedule": "1f1b"},
        "replicas": {"dp": 2, "micro_batches": 2, "micro_batch_size": 2},
        "tensor": {"tp": 2, "micro_batches": 4, "micro_batch_size": 2},
        "context": {"cp": 2, "micro_batches": 4, "micro_batch_size": 2},
        "chunks": {"micro_batches": 2, "micro_batch_size": 4, "chunks": 3},
    }
    if packing:
        layouts = {
            name: {**layout, "methods": (PACKS,)} for name, layout in layouts.items() if name != "context"
        }
    plans = {name: Row(CONFIG, precision="fp32", **layout).plan for name, layout in layouts.items()}
    found = {}
    for name, plan in plans.items():
        (tmp_path / name).mkdir()
        assert worker_pool.run(run_chat, tmp_path / name, plan, ranks=plan.ranks) == [0] * plan.ranks
        found[name] = losses(tmp_path / name)
        assert len(found[name]) == 4
    for name in plans:
        assert list(found[name].values()) == pytest.approx(list(found["one"].values()), rel=2e-5), name
    (data,) = [row for row in rows(tmp_path / "one", "events.jsonl") if row["event"] == "data"]
    assert data["tokenizer"] == "bytes"
    assert 0 < data["filled"] <= 1


@pytest.mark.processes
def test_packed_conversations_are_resumed_and_evaluated(worker_pool: WorkerPool, tmp_path: Path) -> None:
    chats(tmp_path, 200)
    layout: dict[str, Any] = {"pp": 2, "micro_batches": 4, "micro_batch_size": 2, "schedule": "1f1b"}
    packed, plain = (
        Row(CONFIG, precision="fp32", methods=methods, **layout).plan for methods in ((PACKS,), ())
    )
    for name, stops in (("whole", (4,)), ("resumed", (2, 4))):
        (tmp_path / name).mkdir()
        for steps in stops:
            assert worker_pool.run(run_chat, tmp_path / name, packed, steps, ranks=2) == [0, 0]
    assert losses(tmp_path / "whole") == losses(tmp_path / "resumed")
    with pytest.raises(RankError, match="packed in"):
        worker_pool.run(run_chat, tmp_path / "whole", plain, 5, ranks=2)


@given(st.integers(0, 40), st.integers(1, 4))
def test_a_packed_loss_is_the_mean_over_the_targets_of_conversations(
    packed_task: Chat, first: int, count: int
) -> None:
    samples = (first + np.arange(count)) % packed_task.samples
    inputs, targets, documents = packed_task.batch(samples)
    assert [sum(lengths) for lengths in documents] == [inputs.shape[1]] * count
    logits = torch.randn(count, 40, 256, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets[:, :-2].flatten())
    assert packed_task.loss(logits, targets).item() == pytest.approx(expected.item(), rel=1e-12)


def test_chat_needs_data() -> None:
    record = {"model": {"preset": "gpt-1m"}, "task": {"kind": "chat"}}
    with pytest.raises(InputError, match=r"task: data: is missing: chat has no default, such as"):
        parse_run(record)
