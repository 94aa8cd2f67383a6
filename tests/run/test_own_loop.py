"""`weft.Runtime` inside a user's own loop: learns like one process, refuses what does not fit."""

from pathlib import Path

import pytest
import torch
from small_jobs import make_plan, tiny

import weft
from weft.errors import InputError


def loss_fn(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def train(rank: int, ranks: int, path: Path, steps: int) -> list[float]:
    config = tiny()
    generator = torch.Generator().manual_seed(3)
    with weft.Runtime(path, config, loss_fn) as runtime:
        shape = (runtime.plan.global_batch, config.sequence)
        losses = []
        for _ in range(steps):
            tokens = torch.randint(config.vocabulary, shape, generator=generator)
            losses.append(runtime.step(tokens, tokens.roll(-1, 1)))
    return losses


def written(path: Path, **layout: int) -> Path:
    path.write_text(make_plan(tiny(), **layout).to_json())
    return path


def test_two_plans_of_a_job_have_the_same_losses(worker_pool, tmp_path):
    alone = written(tmp_path / "one.json", micro_batches=8)
    pair = written(tmp_path / "two.json", pp=2, loops=2, schedule="breadth-first", micro_batches=8)
    expected = worker_pool.run(train, alone, 3, ranks=1)[0]
    for losses in worker_pool.run(train, pair, 3, ranks=2):
        assert losses == pytest.approx(expected, abs=1e-9)
    assert expected[0] != expected[1]


def refused(rank: int, ranks: int, path: Path) -> list[str]:
    config = tiny()
    messages = []
    for plan, model in ((path, tiny(layers=5)), (make_plan(config, pp=2), config)):
        with pytest.raises(InputError) as caught:
            weft.Runtime(plan, model, loss_fn)
        messages.append(str(caught.value))
    runtime = weft.Runtime(path, config, loss_fn)
    with pytest.raises(InputError) as caught:
        runtime.step(torch.zeros(3, 8, dtype=torch.long), torch.zeros(3, 8, dtype=torch.long))
    messages.append(str(caught.value))
    runtime.close()
    return messages


def test_what_does_not_fit_is_refused_in_one_line(worker_pool, tmp_path):
    path = written(tmp_path / "plan.json")
    model, ranks, batch = worker_pool.run(refused, path, ranks=1)[0]
    assert "the plan is for tiny-gpt" in model
    assert "1 ranks run, the plan has 2" in ranks
    assert "global batch is 8" in batch
