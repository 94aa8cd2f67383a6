"""Learning rates: the rise, the decay, and torch's own closed forms."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weft.training.optimizer.optimizers import DECAYS, OptimizerSettings


def settings_of(**changes: object) -> OptimizerSettings:
    values = {"name": "sgd", "learning_rate": 0.5, "weight_decay": 0.0, "warm_up_steps": 4, "decay_steps": 20}
    return OptimizerSettings(**{**values, **changes})  # type: ignore[arg-type]


@given(st.integers(0, 50), st.integers(0, 200))
def test_the_rate_rises_linearly_and_stays(warm_up_steps: int, step: int) -> None:
    rate = settings_of(warm_up_steps=warm_up_steps).rate(step)
    assert rate == pytest.approx(0.5 if step + 1 >= warm_up_steps else 0.5 * (step + 1) / warm_up_steps)
    assert rate > 0


@given(st.sampled_from(sorted(DECAYS)), st.floats(0, 0.5), st.integers(0, 30), st.integers(1, 60), st.data())
def test_after_the_warm_up_the_rate_never_rises_and_ends_at_the_final_one(
    name: str, final: float, warm_up_steps: int, more: int, data: st.DataObject
) -> None:
    decay_steps = warm_up_steps + more
    settings = settings_of(
        schedule=name, final_learning_rate=final, warm_up_steps=warm_up_steps, decay_steps=decay_steps
    )
    step = data.draw(st.integers(warm_up_steps, decay_steps + 10))
    assert settings.rate(warm_up_steps) == pytest.approx(0.5)
    assert final - 1e-12 <= settings.rate(step + 1) <= settings.rate(step) + 1e-12
    if name != "constant":
        assert settings.rate(decay_steps) == pytest.approx(final)
        assert settings.rate(decay_steps + step) == pytest.approx(final)


@pytest.mark.parametrize("name", ["linear", "cosine"])
def test_the_decays_are_those_of_torch(name: str) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    theirs = (
        torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1 / 0.5, total_iters=20)
        if name == "linear"
        else torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20, eta_min=0.1)
    )
    ours = settings_of(schedule=name, final_learning_rate=0.1, warm_up_steps=0)
    for step in range(20):
        assert ours.rate(step) == pytest.approx(theirs.get_last_lr()[0])
        optimizer.step()
        theirs.step()


def test_a_run_that_ends_in_its_warm_up_only_rises() -> None:
    settings = settings_of(schedule="cosine", warm_up_steps=10, decay_steps=5)
    assert [settings.rate(step) for step in range(5)] == pytest.approx([0.05, 0.1, 0.15, 0.2, 0.25])
