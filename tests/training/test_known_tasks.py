"""Masked tokens and classes of images: what is drawn, what counts, what is refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.errors import InputError
from weft.training.tasks import make_task
from weft.training.tasks.base import Task, TaskSettings
from weft.training.tasks.text import NO_TARGET, targets_per_sample

MASK = 256


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> TaskSettings:
    folder = tmp_path_factory.mktemp("text")
    letters = np.random.default_rng(0).integers(97, 123, 200_000, dtype=np.uint8)
    (folder / "text.txt").write_bytes(letters.tobytes())
    return TaskSettings(
        data=str(folder / "text.txt"), sequence=40, vocabulary=257, cache=folder / "cache", seed=3
    )


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> TaskSettings:
    cache = tmp_path_factory.mktemp("digits")
    return TaskSettings(data="digits", sequence=17, vocabulary=10, cache=cache, image_size=8, channels=1)


def test_targets_are_the_tokens_of_the_text_and_all_else_stays(text: TaskSettings) -> None:
    inputs, targets = make_task("masked-lm", text).batch(np.arange(50))
    tokens, _ = make_task("causal-lm", text).batch(np.arange(50))
    asked = targets != NO_TARGET
    assert torch.equal(targets[asked], tokens[asked])
    assert torch.equal(inputs[~asked], tokens[~asked])
    assert (asked.sum(1) == targets_per_sample(40)).all()
    assert targets_per_sample(40) == 6


def test_shares_are_those_of_the_paper(text: TaskSettings) -> None:
    task = make_task("masked-lm", text)
    inputs, targets = task.batch(np.arange(task.samples))
    asked = targets != NO_TARGET
    count = int(asked.sum())
    masked = (inputs[asked] == MASK).double().mean().item()
    same = (inputs[asked] == targets[asked]).double().mean().item()
    # Four standard deviations of a share; a random token is the right one once in 256.
    tolerance = 4 * (0.16 / count) ** 0.5
    assert masked == pytest.approx(0.8, abs=tolerance)
    assert same == pytest.approx(0.1 + 0.1 / 256, abs=tolerance)
    # No position is preferred.
    positions = asked.double().mean(0)
    spread = 5 * (0.15 * 0.85 / task.samples) ** 0.5
    assert ((positions - targets_per_sample(40) / 40).abs() < spread).all()


@settings(max_examples=20)
@given(samples=st.lists(st.integers(0, 4000), min_size=1, max_size=8), seed=st.integers(0, 2**63 - 1))
def test_masks_depend_on_seed_and_sample_and_not_on_the_micro_batch(
    text: TaskSettings, samples: list[int], seed: int
) -> None:
    task = make_task("masked-lm", replace(text, seed=seed))
    inputs, targets = task.batch(np.array(samples))
    for row, sample in enumerate(samples):
        alone, asked = task.batch(np.array([sample]))
        assert torch.equal(alone[0], inputs[row])
        assert torch.equal(asked[0], targets[row])


def test_seeds_samples_and_sides_draw_apart(text: TaskSettings) -> None:
    task, other = make_task("masked-lm", text), make_task("masked-lm", replace(text, seed=4))
    sample = np.arange(20)
    masks = [
        task.batch(sample)[1] != NO_TARGET,
        task.batch(sample + 20)[1] != NO_TARGET,
        task.batch(sample, held_out=True)[1] != NO_TARGET,
        other.batch(sample)[1] != NO_TARGET,
    ]
    for first in range(4):
        for second in range(first):
            assert not torch.equal(masks[first], masks[second])


def require_equal_weights(task: Task, outputs: torch.Tensor, targets: torch.Tensor) -> None:
    """Losses and metrics of micro-batches of any size average to those of the whole batch."""
    for size in (1, 2, 3, 6):
        parts = [(outputs[i : i + size], targets[i : i + size]) for i in range(0, 12, size)]
        mean = torch.stack([task.loss(*part) for part in parts]).mean().item()
        assert mean == pytest.approx(task.loss(outputs, targets).item(), abs=1e-12)
        accuracy = np.mean([task.metrics(*part)["accuracy"] for part in parts])  # type: ignore[attr-defined]
        assert accuracy == pytest.approx(task.metrics(outputs, targets)["accuracy"])  # type: ignore[attr-defined]


def test_micro_batches_of_masked_text_count_equally(text: TaskSettings) -> None:
    task = make_task("masked-lm", text)
    _, targets = task.batch(np.arange(12))
    require_equal_weights(task, torch.randn(12, 40, 257, dtype=torch.float64), targets)


def test_micro_batches_of_images_count_equally(digits: TaskSettings) -> None:
    task = make_task("image-classification", digits)
    assert task.tokens_per_sample == 1, "speeds count images"
    _, targets = task.batch(np.arange(12))
    require_equal_weights(task, torch.randn(12, 10, dtype=torch.float64), targets)


def test_a_perfect_answer_has_no_loss_and_full_accuracy(text: TaskSettings, digits: TaskSettings) -> None:
    for kind, settings_, classes in (("masked-lm", text, 257), ("image-classification", digits, 10)):
        task = make_task(kind, settings_)
        _, targets = task.batch(np.arange(6))
        answer = 100.0 * torch.nn.functional.one_hot(targets.clamp(min=0), classes).float()
        assert task.loss(answer.bfloat16(), targets).dtype == torch.float32
        assert task.loss(answer, targets).item() == pytest.approx(0.0, abs=1e-6)
        assert task.metrics(answer, targets) == {"accuracy": 1.0}  # type: ignore[attr-defined]
        assert task.metrics(-answer, targets) == {"accuracy": 0.0}  # type: ignore[attr-defined]


def test_pixels_are_from_minus_one_to_one_and_labels_from_nought_to_nine(digits: TaskSettings) -> None:
    task = make_task("image-classification", digits)
    pixels, labels = task.batch(np.arange(task.samples))
    assert pixels.shape == (task.samples, 1, 8, 8)
    assert (pixels.min().item(), pixels.max().item()) == (-1.0, 1.0)
    assert sorted(set(labels.tolist())) == list(range(10))
    held_out, _ = task.batch(np.arange(task.held_out_samples), held_out=True)
    assert held_out.shape == (179, 1, 8, 8)


def test_a_vocabulary_without_room_for_the_mask_is_refused(text: TaskSettings) -> None:
    with pytest.raises(InputError, match=r"256 is too small; allowed: at least 257.*nearest valid: 257"):
        make_task("masked-lm", replace(text, vocabulary=256))


def test_a_model_of_text_is_refused_for_images(text: TaskSettings) -> None:
    with pytest.raises(InputError, match="the model reads text"):
        make_task("image-classification", text)
