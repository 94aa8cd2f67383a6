"""The reader: what a rank needs, one step ahead, in order; failures come at the step that needed it."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from equality_table import Row
from small_plans import make_plan, make_program, tiny

from weft.describe.models import resolve_model
from weft.errors import RunError
from weft.program.rank_program import part_of
from weft.run.workspace import Samples
from weft.training.data.reader import (
    BatchReader,
    TaskReads,
    held_out_reads,
    micro_batches_read,
    training_samples,
)
from weft.training.data.sampler import SampleLedger, StepSamples
from weft.training.tasks.base import TaskSettings

STEPS = range(3, 7)
WAIT_S = 30.0


def pair(step: int, number: int) -> Samples:
    return torch.tensor([step]), torch.tensor([number])


def test_every_step_gets_its_own_micro_batches() -> None:
    with BatchReader(pair, [4, 1], STEPS) as reader:
        for step in STEPS:
            batch = reader.step(step)
            for number in (1, 4, 1):
                assert [one.item() for one in batch(number)] == [step, number]
            assert reader.waited_s >= 0


def test_it_reads_one_step_ahead_and_no_further() -> None:
    read: list[tuple[int, int]] = []
    news = threading.Condition()

    def reading(step: int, number: int) -> Samples:
        with news:
            read.append((step, number))
            news.notify()
        return pair(step, number)

    with BatchReader(reading, [0, 1], STEPS) as reader:
        reader.step(3)(1)
        with news:
            assert news.wait_for(lambda: len(read) >= 4, WAIT_S)
    assert read == [(3, 0), (3, 1), (4, 0), (4, 1)]


def test_the_last_step_reads_nothing_after_it_and_the_thread_ends() -> None:
    with BatchReader(pair, [0], range(2)) as reader:
        for step in range(2):
            assert reader.step(step)(0)[0].item() == step
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("weft-reader")]


def test_waiting_is_counted_by_step() -> None:
    release = threading.Event()

    def reading(step: int, number: int) -> Samples:
        if step == 3:
            assert release.wait(WAIT_S)
        return pair(step, number)

    with BatchReader(reading, [0], STEPS) as reader:
        batch = reader.step(3)
        threading.Timer(0.05, release.set).start()
        batch(0)
        assert reader.waited_s >= 0.04
        reader.step(4)
        assert reader.waited_s == 0


def test_leaving_early_reads_no_more() -> None:
    read: list[int] = []
    started, release = threading.Event(), threading.Event()

    def reading(step: int, number: int) -> Samples:
        read.append(number)
        started.set()
        assert release.wait(WAIT_S)
        return pair(step, number)

    with BatchReader(reading, range(100), STEPS):
        assert started.wait(WAIT_S)
        threading.Timer(0.05, release.set).start()
    assert len(read) < 100


@pytest.mark.parametrize(
    ("layout", "needed"),
    [
        ({"pp": 3, "micro_batches": 4}, [[0, 1, 2, 3], [], [0, 1, 2, 3]]),
        ({"pp": 1, "dp": 2, "micro_batches": 2}, [[0, 1], [2, 3]]),
        ({"pp": 2, "loops": 2, "schedule": "breadth-first", "micro_batches": 2}, [[0, 1], [0, 1]]),
    ],
)
def test_only_ranks_of_first_and_last_stages_read(layout: dict[str, int], needed: list[list[int]]) -> None:
    config = tiny(layers=4)
    plan = make_plan(config, **layout)
    program = make_program(config, plan)
    found = [micro_batches_read(part_of(program, rank)) for rank in range(plan.ranks)]
    assert [sorted(numbers) for numbers in found] == needed
    assert sorted({number for numbers in found for number in numbers}) == list(
        range(plan.global_batch // plan.micro_batch_size)
    )


@pytest.mark.parametrize(
    ("layers", "sources", "needed"),
    [
        (((0, 2), (1, 3), (4,)), (0,), [[0, 1, 2], [], [0, 1, 2]]),
        (((0,), (1, 2), (3,), (4,)), (0, 1), [[0, 1, 2], [0, 1, 2], [], [0, 1, 2]]),
    ],
)
def test_ranks_whose_stages_read_samples_beside_others_read_too(
    layers: tuple[tuple[int, ...], ...], sources: tuple[int, ...], needed: list[list[int]]
) -> None:
    model, count = resolve_model("own_models:two_stems"), len(layers)
    row = Row(model, "1f1b", pp=count, layers=layers, splits=(2, 4, 2, 2)[:count], micro_batches=3)
    program = make_program(model, replace(row, micro_batch_size=4).plan)
    assert program.obligations.sources == sources
    assert [micro_batches_read(part_of(program, rank)) for rank in range(count)] == needed


def test_stages_with_losses_of_their_own_read_targets_too() -> None:
    config = tiny(layers=4)
    plan = make_plan(config, pp=3, micro_batches=4)
    middle = part_of(make_program(config, plan), 1)
    assert sorted(micro_batches_read(middle, {1})) == [0, 1, 2, 3]
    assert micro_batches_read(middle, {0, 2}) == []


class Broken:
    """A task whose sample 5 is in a file that is gone."""

    samples = held_out_samples = 8
    tokens_per_sample = 1
    fingerprint = "broken"

    def __init__(self, settings: TaskSettings) -> None:
        self._folder = Path(settings.data)

    def sample_name(self, sample: int) -> str:
        return f"in part {sample // 4}"

    def batch(self, samples: np.ndarray, *, held_out: bool = False) -> Samples:
        for sample in samples.tolist():
            if sample == 5:
                (self._folder / "5.bin").read_bytes()
        return torch.from_numpy(samples), torch.from_numpy(samples)

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return outputs.mean()


def test_a_sample_that_cannot_be_read_is_named_at_the_step_that_needed_it(tmp_path: Path) -> None:
    task = Broken(TaskSettings(data=str(tmp_path), sequence=1, vocabulary=1, cache=tmp_path))
    ledger = SampleLedger(8, 1)
    where = ledger.take(0, 8).tolist().index(5)
    bad_step, number = where // 4, where % 4 // 2
    with BatchReader(
        training_samples(TaskReads(task), ledger, 0, StepSamples(((0, 1),), 2)), [0, 1], range(2)
    ) as reader:
        for step in range(2):
            batch = reader.step(step)
            for micro_batch in range(2):
                if (step, micro_batch) == (bad_step, number):
                    with pytest.raises(RunError) as failed:
                        batch(micro_batch)
                else:
                    expected = ledger.take(step * 4 + micro_batch * 2, 2)
                    assert np.array_equal(batch(micro_batch)[0].numpy(), expected)
    path = tmp_path / "5.bin"
    assert str(failed.value) == (
        f"step {bad_step}: sample 5 in part 1: FileNotFoundError: "
        f"[Errno 2] No such file or directory: '{path}'"
    )


def test_a_held_out_sample_is_named_too(tmp_path: Path) -> None:
    task = Broken(TaskSettings(data=str(tmp_path), sequence=1, vocabulary=1, cache=tmp_path))
    with pytest.raises(RunError, match=r"^held-out data: sample 5 in part 1: FileNotFoundError"):
        held_out_reads(TaskReads(task), np.arange(6).reshape(1, 6), 2)(0, 2)


def test_samples_that_can_be_read_one_by_one_are_all_named(tmp_path: Path) -> None:
    class OnlyAlone(Broken):
        def batch(self, samples: np.ndarray, *, held_out: bool = False) -> Samples:
            if len(samples) > 1:
                raise ValueError
            return super().batch(samples % 4)

    task = OnlyAlone(TaskSettings(data=str(tmp_path), sequence=1, vocabulary=1, cache=tmp_path))
    ledger = SampleLedger(8, 0)
    first, second = ledger.take(2, 2).tolist()
    with pytest.raises(RunError, match=f"step 0: samples {first}, {second}: ValueError"):
        training_samples(TaskReads(task), ledger, 0, StepSamples(((0, 1),), 2))(0, 1)


def test_threads_read_one_after_the_other() -> None:
    inside = threading.Semaphore()

    class Alone:
        """A task like a file with one position: reads of two threads at once would mix."""

        def batch(self, samples: np.ndarray, *, held_out: bool = False) -> Samples:
            assert inside.acquire(blocking=False)
            time.sleep(0.01)
            inside.release()
            return torch.from_numpy(samples), torch.tensor([held_out])

    reads, others = TaskReads(Alone()), SampleLedger(8, 0)  # type: ignore[arg-type]
    training = training_samples(reads, others, 0, StepSamples(((0, 1),), 1))
    held_out = held_out_reads(reads, np.arange(4).reshape(2, 2), 1)
    with BatchReader(training, [0, 1], range(2)) as one, BatchReader(held_out, [0, 1], range(2)) as other:
        for step in range(2):
            batch, held = one.step(step), other.step(step)
            for number in range(2):
                assert [batch(number)[1].item(), held(number)[1].item()] == [0, 1]
                assert held(number)[0].item() == 2 * step + number
