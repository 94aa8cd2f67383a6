"""Which run may go on from a checkpoint."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weft.errors import InputError
from weft.run.state.precision import STEPPED
from weft.training.checkpoint.training_state import TrainingState, require_same_job, require_steps_left
from weft.training.data.reader import TaskReads, training_samples
from weft.training.data.sampler import SampleLedger, StepSamples

SAVED = TrainingState(
    step=7,
    samples=56,
    plan_id="f00d",
    seed=3,
    model="cafe",
    precision="fp32",
    data="beef",
    first_loss=5.5,
)


def test_another_job_is_refused_with_every_difference() -> None:
    other = replace(SAVED, seed=4, model="d00d", data="bead")
    with pytest.raises(InputError) as refused:
        require_same_job(other, SAVED, "here")
    # A fingerprint is nothing that people could give.
    assert sorted(violation.nearest for violation in refused.value.violations) == ["", "", "3"]
    assert all(violation.where == "here" for violation in refused.value.violations)
    assert "saved with other layers (fingerprint cafe, now d00d)" in str(refused.value)
    assert "saved with other data (fingerprint beef, now bead)" in str(refused.value)


def test_the_states_of_another_optimizer_are_refused_unless_there_are_none() -> None:
    saved = replace(SAVED, optimizer="moments")
    with pytest.raises(InputError, match="saved with optimizer states moments, this run has momentum; "):
        require_same_job(replace(SAVED, optimizer="momentum"), saved, "here")
    require_same_job(saved, saved, "here")
    require_same_job(saved, SAVED, "here")


@pytest.mark.parametrize("saved", ["fp64", "fp32", "bf16"])
@pytest.mark.parametrize("now", ["fp64", "fp32", "bf16"])
def test_a_run_goes_on_in_every_precision_that_rounds_nothing(saved: str, now: str) -> None:
    begin, state = replace(SAVED, precision=now), replace(SAVED, precision=saved)
    if torch.promote_types(STEPPED[now], STEPPED[saved]) == STEPPED[now]:
        require_same_job(begin, state, "here")
        return
    line = f"here: saved with precision fp64, this run has {now}, which rounds .* \\(nearest valid: fp64\\)"
    with pytest.raises(InputError, match=line):
        require_same_job(begin, state, "here")


@given(
    samples=st.integers(1, 60),
    segments=st.lists(
        st.tuples(st.integers(0, 5), st.integers(1, 3), st.integers(1, 4)), min_size=1, max_size=5
    ),
)
def test_every_sample_comes_once_per_epoch_whatever_the_global_batches(
    samples: int, segments: list[tuple[int, int, int]]
) -> None:
    """Starts of some steps each, with their micro-batches and the size of these."""
    ledger, state, task = SampleLedger(samples, 3), replace(SAVED, step=0, samples=0), Reads()
    for steps, micro_batches, size in segments:
        of_steps, batch = StepSamples((tuple(range(micro_batches)),), size), micro_batches * size
        read = training_samples(TaskReads(task), ledger, state.origin(of_steps), of_steps)
        for step in range(state.step, state.step + steps):
            for number in range(micro_batches):
                read(step, number)
        state = replace(state, step=state.step + steps, samples=state.samples + steps * batch)
    assert len(task.read) == state.samples
    for first in range(0, state.samples, samples):
        epoch = task.read[first : first + samples]
        assert len(set(epoch)) == len(epoch)


class Reads:
    """A task that keeps which samples were asked for."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def batch(self, samples: np.ndarray, *, held_out: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        self.read.extend(samples.tolist())
        return torch.from_numpy(samples), torch.from_numpy(samples)


def test_another_plan_of_the_same_job_may_go_on_while_steps_are_left() -> None:
    begin = replace(SAVED, step=0, samples=0, plan_id="feed", first_loss=0.0)
    require_same_job(begin, SAVED, "here")
    require_steps_left(begin, SAVED, 8)
    require_steps_left(SAVED, SAVED, 7)
    with pytest.raises(InputError, match=r"train\.steps: 7; 7 are done, .* \(nearest valid: 8\)"):
        require_steps_left(begin, SAVED, 7)


def test_a_run_does_not_end_before_the_steps_that_it_has_done() -> None:
    with pytest.raises(InputError, match=r"train\.steps: 6; 7 are done \(nearest valid: 7\)"):
        require_steps_left(SAVED, SAVED, 6)
