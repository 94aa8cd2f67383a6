"""Laws: what steps tell of draggers is what drew them, and the best size is between noise and draggers."""

from __future__ import annotations

from math import sqrt
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.describe.plan import Choice
from weft.methods.micro_batch_clipping.report import SECTION
from weft.methods.micro_batch_clipping.size import Draggers, estimate
from weft.program.arrays import Floats

NUMBERS, STEPS, GROUPS = 200, 40, 64


def steps_of(rate: float, noise: float, samples: int) -> tuple[Floats, Floats]:
    """Draw steps: the norms of their micro-batches, and the lengths of the means of directions."""
    random = np.random.default_rng(0)
    norms, lengths = [], []
    for _ in range(STEPS):
        shape = GROUPS, samples, NUMBERS
        # The mean gradient has length 1, and the noise of a sample the squared length `noise`.
        gradients = random.normal(size=shape) * sqrt(noise / NUMBERS) + np.eye(NUMBERS)[0]
        dragging = random.random(shape[:2]) < rate
        gradients[dragging] = 100.0 * samples * random.normal(size=(int(dragging.sum()), NUMBERS))
        means = gradients.mean(axis=1)
        norms.append(np.linalg.norm(means, axis=1))
        lengths.append(np.linalg.norm((means / norms[-1][:, None]).mean(axis=0)))
    return np.array(norms), np.array(lengths)


@pytest.mark.parametrize("samples", [1, 2, 4])
@pytest.mark.parametrize(("rate", "noise"), [(0.02, 1.0), (0.02, 20.0), (0.1, 4.0)])
def test_steps_tell_what_drew_them(rate: float, noise: float, samples: int) -> None:
    found = estimate(*steps_of(rate, noise, samples), samples)
    assert found is not None
    assert found.rate == pytest.approx(rate, rel=0.25)
    assert found.noise == pytest.approx(noise, rel=0.25)
    assert found.best_samples == pytest.approx(Draggers(rate, noise).best_samples, rel=0.25)


@given(rate=st.floats(1e-4, 0.5), noise=st.floats(1e-2, 1e4))
def test_no_size_reaches_farther_than_the_best(rate: float, noise: float) -> None:
    found = Draggers(rate, noise)
    best = found.best_samples
    assert found.reach(best) >= max(found.reach(best * factor) for factor in (0.5, 0.9, 1.1, 2.0))
    # More noise asks for larger micro-batches, and more draggers for smaller ones.
    assert Draggers(rate, 2 * noise).best_samples > best > Draggers(min(0.9, 1.5 * rate), noise).best_samples


def test_equal_directions_have_neither_noise_nor_draggers() -> None:
    found = estimate(np.ones((3, 8)), np.ones(3), 4)
    assert found is not None
    assert (found.rate, found.noise, found.best_samples) == (0.0, 0.0, float("inf"))
    # Directions that add up to nothing tell nothing; one micro-batch neither.
    assert estimate(np.ones((3, 8)), np.zeros(3), 4) is None
    assert estimate(np.ones((3, 1)), np.ones(3), 4) is None


def rows_of(norms: Floats, lengths: Floats, **options: Any) -> dict[str, str]:
    choice = Choice(name="micro-batch-clipping", options={"samples": 2, **options})
    planned: Any = SimpleNamespace(
        plan=SimpleNamespace(method=lambda name: choice if name == choice.name else None),
        problem=SimpleNamespace(job=SimpleNamespace(global_batch=2 * GROUPS)),
        run=SimpleNamespace(task=SimpleNamespace(data="text")),
    )
    metrics = [
        {
            "step": step,
            "clip_norms": each.tolist(),
            "clip_bound": each.min(),
            "clipped": 1.0,
            "dropped": 0.0,
            "gradient_norm": length * each.min(),
        }
        for step, (each, length) in enumerate(zip(norms, lengths, strict=True))
    ]
    return dict(SECTION.rows(planned, metrics))


def test_the_report_proposes_a_size() -> None:
    steps = steps_of(0.1, 4.0, 2)
    found = estimate(*steps, 2)
    assert found is not None
    rows = rows_of(*steps, micro="min")
    assert rows["samples that pull away, estimated"] == f"{found.rate:.2%}"
    assert rows["size by the norms"].startswith(f"{found.best_samples:.0f} samples; a mean of directions")
    assert f"{found.reach(2):.1%} with 2" in rows["size by the norms"]
    # Steps of other rules are not means of directions.
    assert "size by the norms" not in rows_of(*steps, micro="fixed", bound=1.0)
    # No more than the whole batch.
    assert rows_of(np.ones((3, GROUPS)), np.ones(3))["size by the norms"].startswith(f"{2 * GROUPS} samples")
