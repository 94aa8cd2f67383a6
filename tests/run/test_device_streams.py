"""Laws of the streams of an accelerator, on one that is late: the host goes on, nothing comes too early."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from late_accelerator import LateAccelerator, LateEvent, LateKernelStream, late_device
from pool import WorkerPool
from small_jobs import batch_of, make_runtime, parameters_of
from small_plans import make_plan, make_program, tiny

from weft.describe.plan import Plan
from weft.errors import RunError
from weft.program.rank_program import part_of
from weft.run.device_streams import CopyQueue, DeviceClock, DeviceWork, KernelStream
from weft.run.rank_streams import RankStreams
from weft.run.record.recorder import Recorder
from weft.run.record.slots import read_slots
from weft.run.streams import Value
from weft.run.work_queue import WorkQueue

SEEDS = range(5)
LATE_WAIT = LateEvent.wait


class Forgetful(DeviceWork):
    """Work on a device that keeps nothing of what its kernels read."""

    def __init__(self, *made: Any) -> None:
        *others, _kept, reached = made
        super().__init__(*others, (), reached)


class Content:
    """Something that a value holds."""


def computing(accelerator: LateAccelerator) -> KernelStream:
    return KernelStream("computation", accelerator, DeviceClock(accelerator))


def beside(compute: KernelStream, name: str = "messages") -> KernelStream:
    accelerator = compute._accelerator
    return KernelStream(name, accelerator, compute.clock, accelerator.stream(), after=compute)


def computing_and_messages(accelerator: LateAccelerator) -> tuple[KernelStream, KernelStream]:
    compute = computing(accelerator)
    return compute, beside(compute)


@contextmanager
def copies(accelerator: LateAccelerator) -> Iterator[CopyQueue]:
    made = CopyQueue("copies", accelerator)
    try:
        yield made
    finally:
        made.close()


def held_up(accelerator: LateAccelerator) -> threading.Event:
    """Give the current stream a kernel that ends when the event is set."""
    release = threading.Event()
    accelerator.launch(release.wait)
    return release


@pytest.mark.parametrize("seed", SEEDS)
def test_the_host_goes_on_while_kernels_run_in_order(seed: int) -> None:
    accelerator, order = LateAccelerator(seed), []
    compute = computing(accelerator)
    release = held_up(accelerator)
    before: list[Value] = []
    for number in range(6):

        def work(number: int = number) -> None:
            accelerator.launch(lambda: order.append(number))

        before.append(Value.of(None, compute.run(str(number), work, *before)))
    assert order == []
    assert all(value.completion.times is None for value in before)
    release.set()
    before[-1].completion.wait()
    assert order == list(range(6))


def test_work_waits_on_the_host_for_what_a_thread_makes() -> None:
    accelerator, order, release = LateAccelerator(), [], threading.Event()
    compute, messages = computing(accelerator), WorkQueue("messages")
    arrived = messages.run("R0", lambda: order.append("arrived") if release.wait(60) else None)
    threading.Timer(0.05, release.set).start()
    compute.run("F0", lambda: order.append("launched"), Value.of(None, arrived))
    assert order == ["arrived", "launched"]
    messages.close()


@pytest.mark.parametrize("seed", SEEDS)
def test_copies_follow_the_kernels_that_were_launched_before(seed: int) -> None:
    accelerator, cell, seen = LateAccelerator(seed), ["old"], []
    compute = computing(accelerator)
    with copies(accelerator) as queue:
        release = held_up(accelerator)
        compute.run("F0", lambda: accelerator.launch(lambda: seen.append(cell[0])))
        # The allocator has given the copy the memory that kernels launched before still read.
        copied = queue.run("R1", lambda: accelerator.launch(lambda: cell.__setitem__(0, "new")))
        time.sleep(0.02)
        release.set()
        copied.wait()
    assert (seen, cell) == (["old"], ["new"])


@pytest.mark.parametrize("seed", SEEDS)
def test_copies_have_ended_when_their_completion_has(seed: int) -> None:
    accelerator, cell = LateAccelerator(seed), [0]

    def count() -> None:
        time.sleep(0.005)
        cell[0] += 1

    with copies(accelerator) as queue:
        for number in range(1, 5):
            queue.run(str(number), lambda: accelerator.launch(count)).wait()
            assert cell == [number]


def test_copies_read_what_was_computed() -> None:
    accelerator, cell, sent = LateAccelerator(), [0], []
    compute = computing(accelerator)
    with copies(accelerator) as queue:
        release = held_up(accelerator)
        made = Value.of(cell, compute.run("F0", lambda: accelerator.launch(lambda: cell.__setitem__(0, 7))))
        sending = queue.run("S0", lambda: accelerator.launch(lambda: sent.append(cell[0])), made)
        release.set()
        sending.wait()
    assert sent == [7]


def test_values_of_other_streams_are_kept_while_kernels_may_read_them() -> None:
    accelerator = LateAccelerator()
    compute, queue = computing(accelerator), WorkQueue("messages")
    own, other = Content(), Content()
    gone = {name: threading.Event() for name in ("own", "other")}
    weakref.finalize(own, gone["own"].set)
    weakref.finalize(other, gone["other"].set)
    arrived = queue.run("R0", lambda: None)
    made = compute.run("F0", lambda: None)
    release = held_up(accelerator)
    reading = compute.run("F1", lambda: None, Value.of(own, made), Value.of(other, arrived))
    queue.close()
    del own, other, made
    # Memory of the own stream is given away in the order of its kernels.
    assert gone["own"].is_set()
    assert not gone["other"].is_set()
    release.set()
    reading.wait()
    assert gone["other"].wait(10)


@pytest.mark.parametrize("keeps", [True, False])
def test_the_late_device_overwrites_what_nothing_keeps(keeps: bool) -> None:
    accelerator, seen = LateAccelerator(), []
    compute = LateKernelStream("computation", accelerator, DeviceClock(accelerator))
    arrived = Value.of([torch.ones(2)], beside(compute).run("R0", lambda: None))
    with patch("weft.run.device_streams.DeviceWork", DeviceWork if keeps else Forgetful):
        compute.run("F0", lambda: seen.append(arrived.content[0].sum()), arrived).wait()
    assert bool(seen[0].isfinite()) == keeps


def test_what_is_kept_is_given_back_without_anybody_who_waits() -> None:
    accelerator = LateAccelerator()
    compute, queue, content, gone = (
        computing(accelerator),
        WorkQueue("messages"),
        Content(),
        threading.Event(),
    )
    weakref.finalize(content, gone.set)
    compute.run("F0", lambda: None, Value.of(content, queue.run("R0", lambda: None)))
    queue.close()
    del content
    accelerator.default.synchronize()
    compute.run("F1", lambda: None)
    assert gone.is_set()


@pytest.mark.parametrize("seed", SEEDS)
def test_times_are_those_of_the_device_on_the_clock_of_the_host(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Clocks are compared before every computation.
    monkeypatch.setattr("weft.run.device_streams.ANCHORED_NS", 0)
    accelerator = LateAccelerator(seed)
    compute, told = computing(accelerator), []
    began_ns = time.monotonic_ns()
    launched = [
        compute.run(str(number), lambda: accelerator.launch(lambda: time.sleep(0.004))) for number in range(5)
    ]
    for completion in launched:
        completion.report_to(lambda start_ns, end_ns: told.append((start_ns, end_ns)))
    launched[-1].wait()
    for completion in launched:
        completion.wait()
    assert sorted(told) == [completion.times for completion in launched]
    told.sort()
    # The host may have been held up while it compared the clocks.
    error_ns = max(completion._anchor.error_ns for completion in launched)
    edges = [began_ns, *(time for times in told for time in times), time.monotonic_ns()]
    assert all(later - earlier >= -2 * error_ns for earlier, later in pairwise(edges))
    assert all(end_ns - start_ns >= 4_000_000 for start_ns, end_ns in told)


@pytest.mark.parametrize("seed", SEEDS)
def test_computations_follow_the_messages_that_they_read_and_the_host_goes_on(seed: int) -> None:
    accelerator, order = LateAccelerator(seed), []
    compute, messages = computing_and_messages(accelerator)
    held = threading.Event()
    arrived = messages.run(
        "R0", lambda: accelerator.launch(lambda: order.append("arrived") if held.wait(60) else None)
    )
    compute.run("F0", lambda: accelerator.launch(lambda: order.append("computed")), Value.of(None, arrived))
    time.sleep(0.02)
    assert order == []
    held.set()
    compute.close()
    assert order == ["arrived", "computed"]


@pytest.mark.parametrize("seed", SEEDS)
def test_messages_follow_the_kernels_that_were_launched_before(seed: int) -> None:
    accelerator, order = LateAccelerator(seed), []
    compute, messages = computing_and_messages(accelerator)
    release = held_up(accelerator)
    compute.run("F0", lambda: accelerator.launch(lambda: order.append("computed")))
    # The allocator has given the message the memory that kernels launched before still read.
    messages.run("R1", lambda: accelerator.launch(lambda: order.append("arrived")))
    time.sleep(0.02)
    release.set()
    messages.close()
    assert order == ["computed", "arrived"]


Launch = tuple[int, tuple[int, ...]]


@st.composite
def launches(draw: st.DrawFn) -> list[Launch]:
    """Works in the order of their launch: a stream, and the former works that each reads."""
    count = draw(st.integers(1, 12))
    former = [draw(st.sets(st.integers(0, one - 1), max_size=3)) if one else set() for one in range(count)]
    return [(draw(st.integers(0, 2)), tuple(sorted(reads))) for reads in former]


@given(launches(), st.integers(0, 2**16))
@settings(max_examples=25, deadline=None)
def test_a_stream_waits_for_what_no_other_wait_implies_and_for_nothing_else(
    works: list[Launch], seed: int
) -> None:
    accelerator, ended, early, waits = LateAccelerator(seed), set[int](), [], []
    compute = computing(accelerator)
    streams = (compute, beside(compute, "messages"), beside(compute, "sums"))
    release, made = held_up(accelerator), list[Value[Any]]()
    with patch.object(LateEvent, "wait", lambda event: waits.append(event) or LATE_WAIT(event)):
        for number, (stream, reads) in enumerate(works):

            def kernel(number: int = number, reads: tuple[int, ...] = reads) -> None:
                early.extend((number, one) for one in reads if one not in ended)
                ended.add(number)

            def launched(kernel: Callable[[], None] = kernel) -> None:
                accelerator.launch(kernel)

            given = (made[one] for one in reads)
            made.append(Value.of(None, streams[stream].run(str(number), launched, *given)))
    release.set()
    for value in made:
        value.completion.wait()
    assert (early, ended) == ([], set(range(len(works))))
    assert len(waits) == fewest_waits(works)


def fewest_waits(works: list[Launch]) -> int:
    """The edges between streams that no path of other edges and stream orders stands for."""
    follows: list[set[int]] = []
    last: dict[int, int] = {}
    count = 0

    def closure(ones: Iterable[int]) -> set[int]:
        return set().union(*({one} | follows[one] for one in ones))

    for number, (stream, reads) in enumerate(works):
        implied = closure([last[stream]] if stream in last else [])
        if stream:
            # Kernels beside the default stream follow all that were launched in it, by one wait.
            count += 1
            implied |= closure([last[0]] if 0 in last else [])
        needed = [one for one in reads if one not in implied]
        needed = [one for one in needed if one not in closure(other for other in needed if other != one)]
        count += len(needed)
        follows.append(implied | closure(reads))
        last[stream] = number
    return count


def test_what_a_message_reads_is_kept_until_it_has_ended() -> None:
    accelerator = LateAccelerator()
    compute, messages = computing_and_messages(accelerator)
    content, gone = Content(), threading.Event()
    weakref.finalize(content, gone.set)
    made = compute.run("F0", lambda: None)
    held = threading.Event()
    sent = messages.run("S0", lambda: accelerator.launch(held.wait), Value.of(content, made))
    del content
    assert not gone.is_set()
    held.set()
    sent.wait()
    assert gone.wait(10)


def test_ended_work_is_reported_while_other_work_hangs() -> None:
    config = tiny(tied=False)
    part = part_of(make_program(config, make_plan(config, pp=2)), 1)
    receive, forward = list(part.instructions())[:2]
    accelerator, told = LateAccelerator(), []
    compute = computing(accelerator)
    streams = RankStreams(compute, lambda name: beside(compute, name))
    arrived = streams.of(receive).run("R0", lambda: None)
    arrived.report_to(lambda start_ns, end_ns: told.append("R0"))
    release = held_up(accelerator)
    hanging = streams.of(forward).run("F0", lambda: None)
    hanging.report_to(lambda start_ns, end_ns: told.append("F0"))
    deadline = time.monotonic() + 10
    while not told and time.monotonic() < deadline:
        streams.notice()
    assert told == ["R0"]
    release.set()
    hanging.wait()
    streams.close()
    assert told == ["R0", "F0"]


def test_a_kernel_that_fails_is_named_by_its_instruction() -> None:
    accelerator = LateAccelerator()
    compute = computing(accelerator)
    failing = compute.run("F0.3", lambda: None)
    accelerator.broken = True
    with pytest.raises(RunError, match=r"^F0\.3: computation failed: an illegal memory access$"):
        failing.wait()
    with copies(accelerator) as queue:
        sending = queue.run("S0.3", lambda: None, Value.of(None, failing))
        with pytest.raises(RunError, match=r"^F0\.3: computation failed"):
            sending.wait()


def trained(
    rank: int, ranks: int, plan: Plan, seed: int | None, folder: Any, kernels: bool = False
) -> tuple[list[float], list[torch.Tensor], int]:
    """Losses and parameters of three steps, and the number of recorded instructions."""
    config, program = tiny(tied=False), make_program(tiny(tied=False), plan)
    with nullcontext() if seed is None else late_device(seed + rank, kernels=kernels):
        recorder = Recorder(folder, program=part_of(program, rank), plan_id=plan.plan_id, steps=3)
        runtime = make_runtime(rank, config, plan, program, recorder=recorder)
        losses = [runtime.step(step, batch_of(config, plan, step)).loss for step in range(3)]
        runtime.gather_weights()
        found = list(parameters_of(runtime).values())
        runtime.close()
        recorder.close()
    return losses, found, len(read_slots(recorder.path).records)


@pytest.mark.parametrize("sharding", ["zero-0", "zero-3"])
def test_a_plan_trains_to_the_same_bits(worker_pool: WorkerPool, tmp_path: Any, sharding: str) -> None:
    config = tiny(tied=False)
    plan = make_plan(config, pp=2, dp=2, loops=2, schedule="breadth-first", precision="fp32").model_copy(
        update={"sharding": sharding}
    )
    expected = worker_pool.run(trained, plan, None, tmp_path, ranks=4)
    for seed, kernels in ((0, False), (1, False), (2, True), (3, True)):
        late = worker_pool.run(trained, plan, seed, tmp_path, kernels, ranks=4)
        for ours, theirs in zip(late, expected, strict=True):
            assert ours[0] == theirs[0]
            assert all(torch.equal(*pair) for pair in zip(ours[1], theirs[1], strict=True))
            assert ours[2] == theirs[2]


def run_ahead(rank: int, ranks: int, plan: Plan) -> tuple[bool, float, float]:
    """Whether a step returns before the device has begun it, its loss then, and on the CPU."""
    config, losses = tiny(tied=False), []
    for accelerator in (LateAccelerator(), None):
        with patch("weft.run.rank_streams.accelerator_of", lambda device, late=accelerator: late):
            runtime = make_runtime(rank, config, plan, make_program(config, plan))
            release = threading.Event() if accelerator is None else held_up(accelerator)
            result = runtime.step(0, batch_of(config, plan, 0))
            if accelerator is not None:
                unread = result._read.times is None
            release.set()
            losses.append(result.loss)
            runtime.close()
    return unread, *losses


def test_a_step_returns_before_its_loss_is_there(worker_pool: WorkerPool) -> None:
    plan = make_plan(tiny(tied=False), loops=2, schedule="breadth-first", precision="fp32")
    [(unread, loss, expected)] = worker_pool.run(run_ahead, plan, ranks=1)
    assert unread
    assert loss == expected


def copied(rank: int, ranks: int, plan: Plan, seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Weights as they are copied after a step, and as they are then."""
    config = tiny(tied=False)
    with late_device(seed, kernels=True):
        runtime = make_runtime(rank, config, plan, make_program(config, plan))
        runtime.step(0, batch_of(config, plan, 0))
        runtime.gather_weights()
        expected, found = parameters_of(runtime), dict[str, torch.Tensor]()

        def copy() -> None:
            # The device is slow, so the next step would be over.
            time.sleep(0.2)
            found.update(parameters_of(runtime))

        completion = runtime.copy(copy)
        runtime.step(1, batch_of(config, plan, 1))
        completion.wait()
        runtime.close()
    return [(expected[name], found[name]) for name in expected]


@pytest.mark.parametrize("seed", range(2))
def test_optimizers_step_after_the_copy_of_their_weights(worker_pool: WorkerPool, seed: int) -> None:
    plan = make_plan(tiny(tied=False), loops=2, schedule="breadth-first", precision="fp32")
    [pairs] = worker_pool.run(copied, plan, seed, ranks=1)
    assert pairs
    assert all(torch.equal(*pair) for pair in pairs)
