"""The study of clipped micro-batches on bad data: its rules, its trainings, its rankings, and a quick run."""

from __future__ import annotations

import importlib
import json
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from example_modules import importable_from

FOLDER = Path(__file__).parents[2] / "examples" / "clipping"


@pytest.fixture(autouse=True)
def _beside_the_examples() -> Iterator[None]:
    with importable_from(FOLDER):
        yield


def means(groups: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(3, groups, 7, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def no_sources(groups: int) -> torch.Tensor:
    return torch.zeros(3, groups, dtype=torch.long)


def test_the_least_norm_is_that_of_weft_and_changes_nothing_alone() -> None:
    arms = importlib.import_module("arms")
    arms.require_as_weft()
    alone = means(1)
    assert torch.equal(arms.LeastNorm().combine(alone, no_sources(1)), alone[:, 0])


def test_a_micro_batch_without_a_gradient_sets_no_bound() -> None:
    arms, given = importlib.import_module("arms"), means(4)
    given[:, 2] = 0.0
    three = given[:, [0, 1, 3]]
    found = arms.LeastNorm().combine(given, no_sources(4))
    torch.testing.assert_close(found, arms.LeastNorm().combine(three, no_sources(3)) * 3 / 4)


def test_a_median_of_one_micro_batch_is_its_mean_and_no_outlier_moves_one_of_more() -> None:
    arms = importlib.import_module("arms")
    rule, alone = arms.CoordinateMedian(), means(1)
    assert torch.equal(rule.combine(alone, no_sources(1)), arms.StepRule().combine(alone, no_sources(1)))
    for groups in (3, 4):
        given = means(groups)
        expected = np.median(given.numpy(), axis=1)
        np.testing.assert_allclose(rule.combine(given, no_sources(groups)).numpy(), expected)
        far = given.clone()
        far[given == given.amax(1, keepdim=True)] = 1e6
        np.testing.assert_allclose(rule.combine(far, no_sources(groups)).numpy(), expected)


def test_bounds_are_percentiles_of_the_norms_so_far_and_fixed_ones_stay() -> None:
    arms = importlib.import_module("arms")
    auto, fixed = arms.AutoClip(0.3), arms.FixedClip(steps=4, percentile=0.3)
    norms = []
    for step in range(9):
        given = means(2, seed=step)
        mean = given.mean(1)
        norms.append(mean.norm(dim=1).numpy())
        for rule, seen in ((auto, norms), (fixed, norms[:4])):
            found = rule.combine(given, no_sources(2))
            bound = np.percentile(np.stack(seen), 30, axis=0)
            np.testing.assert_allclose(rule.bound.numpy(), bound)
            np.testing.assert_allclose(found.norm(dim=1).numpy(), np.minimum(bound, norms[-1]))
    assert not torch.equal(auto.bound, fixed.bound)


def test_pruning_leaves_out_the_highest_losses_and_keeps_the_weight_of_a_batch() -> None:
    arms = importlib.import_module("arms")
    losses = torch.randn(3, 20, generator=torch.Generator().manual_seed(0))
    weights = arms.LossPruning(0.2).weights(losses)
    assert torch.equal(weights == 0, losses >= losses.sort(dim=1).values[:, 16:17])
    torch.testing.assert_close(weights.mean(1), torch.ones(3))


def test_separation_is_the_share_of_pairs_in_order_and_absent_without_bad_samples() -> None:
    suspects = importlib.import_module("suspects")
    bad = torch.tensor([False, False, True, True])
    for scores, area in (((1, 2, 3, 4), 1.0), ((4, 3, 2, 1), 0.0), ((1, 1, 1, 1), 0.5), ((1, 3, 2, 4), 0.75)):
        assert suspects.separation(torch.tensor(scores), bad) == area
    assert suspects.separation(torch.arange(4), torch.zeros(4, dtype=torch.bool)) is None


def test_scores_are_means_over_the_window_of_a_samples_micro_batches() -> None:
    suspects, stacked = importlib.import_module("suspects"), importlib.import_module("stacked_training")
    # Two steps with two micro-batches of two samples; sample 0 is bad and in the larger ones.
    chosen = torch.tensor([[[0, 1, 2, 3], [2, 3, 0, 1]]])
    norms = torch.tensor([[[4.0, 1.0], [1.0, 2.0]]])
    seen = stacked.Seen(chosen, chosen.float(), norms, torch.tensor([[True, False, False, False]]))
    found = suspects.separations(seen, 1.0)
    # It ties with sample 1 of its micro-batches, and is above the two others.
    assert found["suppressed early"] == found["norm late"] == [pytest.approx(2.5 / 3)]
    assert found["loss early"] == [0.0]
    clean = seen._replace(bad=torch.zeros(1, 4, dtype=torch.bool))
    assert suspects.separations(clean, 1.0) == {}


@pytest.mark.parametrize("name", ["Digits", "Text"])
def test_gradients_of_micro_batches_are_those_of_their_samples_alone(name: str) -> None:
    tasks, stacked = importlib.import_module("bad_tasks"), importlib.import_module("stacked_training")
    arms = importlib.import_module("arms")
    task = tasks.Digits(adaptive=False) if name == "Digits" else tasks.Text()
    starts = [stacked.Start(0.1, seed, 0.1) for seed in (0, 1)]
    training = stacked.StackedTraining(task, starts, samples=4)
    data = training._data[1]
    inputs = torch.stack([one.inputs[:8] for one in training._data])
    targets = torch.stack([one.targets[:8] for one in training._data])
    found, losses = training._gradients(arms.StepRule(), inputs, targets)
    alone = training.weights[1:].clone().requires_grad_()
    loss = task.losses(task.split(alone), data.inputs[None, 4:8], data.targets[None, 4:8]).mean()
    loss.backward()
    torch.testing.assert_close(found[1, 1], alone.grad[0], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(losses[1, 4:].mean(), loss.detach())


def test_trainings_beside_each_other_are_those_alone() -> None:
    tasks, stacked = importlib.import_module("bad_tasks"), importlib.import_module("stacked_training")
    arms = importlib.import_module("arms")
    for adaptive in (False, True):
        starts = [stacked.Start(rate, seed, 0.1) for rate, seed in ((0.01, 0), (0.02, 1))]
        both = stacked.StackedTraining(tasks.Digits(adaptive), starts, samples=8)
        alone = stacked.StackedTraining(tasks.Digits(adaptive), starts[1:], samples=8)
        both.run(arms.LeastNorm(), 5)
        alone.run(arms.LeastNorm(), 5)
        torch.testing.assert_close(both.weights[1], alone.weights[0], rtol=1e-4, atol=1e-5)


def test_an_epoch_has_every_sample_once_and_blocks_of_one_source() -> None:
    stacked = importlib.import_module("stacked_training")
    sources = torch.arange(24) % 3 // 2
    for block in (1, 4):
        found = stacked.order(sources, block, 48, torch.Generator().manual_seed(0))
        for epoch in found.view(2, 24):
            assert epoch.sort().values.tolist() == list(range(24))
        of_blocks = sources[found].view(-1, block)
        assert (of_blocks == of_blocks[:, :1]).all()
    assert found[:24].tolist() != found[24:].tolist()


def test_wrong_labels_are_wrong_and_garbage_is_random_bytes() -> None:
    tasks = importlib.import_module("bad_tasks")
    digits, generator = tasks.Digits(adaptive=False), torch.Generator().manual_seed(0)
    clean, dirty = digits.samples(0.0, generator), digits.samples(0.2, generator)
    assert not clean.bad.any()
    assert dirty.bad.sum() == round(0.2 * len(dirty.bad))
    assert torch.equal(dirty.targets != clean.targets, dirty.bad)
    text = tasks.Text(second=0.05)
    samples = text.samples(0.1, generator)
    assert samples.bad.sum() == 0.1 * text.COUNT
    assert samples.sources.sum() == 0.05 * text.COUNT
    # Nearly all of prose is ASCII, and half of all bytes are not.
    assert (samples.inputs[~samples.bad] >= 128).double().mean() < 0.01
    assert (samples.inputs[samples.bad] >= 128).double().mean() > 0.4


def test_a_grid_grows_while_its_best_rate_is_at_a_border(monkeypatch: pytest.MonkeyPatch) -> None:
    bad_data = importlib.import_module("bad_data")

    def trained(task: Any, arm: Any, starts: Any, steps: int, block: int) -> tuple[SimpleNamespace, None]:
        off = torch.tensor([abs(math.log2(start.rate / 64)) for start in starts])
        off[[start.rate > 500 for start in starts]] = torch.nan
        return SimpleNamespace(held_out=lambda part: {"loss": off}), None

    monkeypatch.setattr(bad_data, "trained", trained)
    task = SimpleNamespace(rates=(1.0, 2.0), error=lambda figure: figure)
    best, tried = bad_data.tuned(task, None, 0.1, seeds=2, steps=1, growths=4, block=1)
    assert best == 64.0
    assert tried == [2.0**power for power in range(9)][: len(tried)]
    assert tried[-1] > best
    assert bad_data.tuned(task, None, 0.1, seeds=2, steps=1, growths=0, block=1) == (2.0, [1.0, 2.0])


@pytest.mark.examples
@pytest.mark.processes
def test_a_quick_study_of_bad_data_is_sane() -> None:
    finished = subprocess.run(
        [sys.executable, str(FOLDER / "bad_data.py"), "--quick", "--json"],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    tables = json.loads(finished.stdout)
    digits = [name for name in tables if name.startswith("digits")]
    assert len(digits) == 4
    for name in digits:
        for one in tables[name]:
            # Ten classes.
            assert all(0.3 < accuracy <= 1.0 for accuracy in one["figures"]["accuracy"])
            ranked = one["bad"] > 0 and one["arm"].startswith(("plain", "min"))
            assert bool(one["areas"]) == ranked
            assert all(0.0 <= area <= 1.0 for areas in one["areas"].values() for area in areas)
            # A network that has learned anything finds wrong labels strange.
            assert all(area > 0.8 for area in one["areas"].get("loss late", []))
    clean, text, second = (table for name, table in tables.items() if name not in digits)
    for one in (*clean, *text, *second):
        # Bytes at random have ln(256) nats.
        assert all(1.0 < loss < math.log(256) for losses in one["figures"].values() for loss in losses)
    both = {one["arm"]: one["figures"] for one in second}
    assert min(both["min, 1"]["sums"]) > max(both["min, 1, own bounds"]["sums"])
