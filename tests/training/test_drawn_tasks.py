"""Tasks of models of towers: losses and metrics of micro-batches average to those of all; refusals."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from weft.describe.models import PRESETS
from weft.describe.tasks import CLICKS, DOSES, MATCHING, MODALITIES
from weft.errors import InputError
from weft.training.data.synthetic import HELD_OUT
from weft.training.tasks import make_task
from weft.training.tasks.base import TaskSettings

KINDS = {MODALITIES: "mmt-tiny", CLICKS: "dlrm-tiny", DOSES: "candle-uno-tiny"}


def settings_of(kind: str) -> TaskSettings:
    config = PRESETS[KINDS[kind]]
    return TaskSettings(
        data="synthetic",
        sequence=config.sequence,
        vocabulary=config.vocabulary,
        cache=Path("unused"),
        towers=config.towers,
    )


@pytest.mark.parametrize("kind", KINDS)
def test_micro_batches_average_to_the_whole_batch(kind: str) -> None:
    settings = settings_of(kind)
    task = make_task(kind, settings)
    _, targets = task.batch(np.arange(16))
    outputs = torch.randn(16, settings.vocabulary, dtype=torch.float64)
    measured = task.metrics  # type: ignore[attr-defined]
    for of in (lambda *pair: task.loss(*pair).item(), lambda *pair: next(iter(measured(*pair).values()))):
        parts = [of(outputs[first : first + 4], targets[first : first + 4]) for first in range(0, 16, 4)]
        assert np.mean(parts) == pytest.approx(of(outputs, targets))


@pytest.mark.parametrize("kind", KINDS)
def test_losses_are_at_least_fp32(kind: str) -> None:
    settings = settings_of(kind)
    task = make_task(kind, settings)
    _, targets = task.batch(np.arange(4))
    assert (
        task.loss(torch.zeros(4, settings.vocabulary, dtype=torch.bfloat16), targets).dtype == torch.float32
    )


def test_r_squared_is_one_for_the_targets_and_none_for_their_mean() -> None:
    task = make_task(DOSES, settings_of(DOSES))
    _, targets = task.batch(np.arange(HELD_OUT), held_out=True)
    measured = task.metrics  # type: ignore[attr-defined]
    assert measured(targets[:, None], targets) == {"r_squared": 1.0}
    mean = targets.double().mean().expand(HELD_OUT, 1)
    assert measured(mean, targets)["r_squared"] == pytest.approx(0.0, abs=1e-6)


def test_half_of_the_texts_name_their_image(tmp_path: Path) -> None:
    config = PRESETS["image-text-tiny"]
    settings = TaskSettings(
        data="digits", sequence=12, vocabulary=256, cache=tmp_path, image_size=8, channels=1
    )
    task = make_task(MATCHING, settings)
    (pixels, texts), targets = task.batch(np.arange(400))
    assert pixels.shape == (400, config.channels, 8, 8)
    assert targets.mean().item() == pytest.approx(0.5, abs=0.1)
    (again, text), target = task.batch(np.array([7]))
    assert torch.equal(again[0], pixels[7])
    assert torch.equal(text[0], texts[7])
    assert target[0] == targets[7]
    names = {bytes(row.tolist()).decode().strip() for row in texts}
    assert len(names) == 10
    with pytest.raises(InputError, match=r"texts of 5 bytes .*image-text-tiny"):
        make_task(MATCHING, replace(settings, image_size=0))
    with pytest.raises(InputError, match="images with names are digits"):
        make_task(MATCHING, replace(settings, data="folder"))


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_without_towers_is_refused(kind: str) -> None:
    with pytest.raises(InputError, match=r"model: it has one input; .*mmt-tiny"):
        make_task(kind, replace(settings_of(kind), towers=None))
