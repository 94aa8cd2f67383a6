"""Laws of the streams of an accelerator, on one that is late: the host goes on, nothing comes too early."""

from __future__ import annotations

import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import astuple, replace
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from late_accelerator import LateAccelerator, LateEvent, LateKernelStream, late_device
from pool import WorkerPool
from program.rank_parts import parts
from small_jobs import batch_of, make_runtime, parameters_of
from small_plans import make_plan, make_program, tiny

from weft.describe.plan import Plan
from weft.errors import RunError
from weft.methods.sharding.kinds import GATHER
from weft.program.kinds import FORWARD, RECEIVE_ACTIVATION, is_compute
from weft.program.program import Columns, Edges
from weft.program.rank_program import RankProgram, part_of
from weft.program.stream_waits import stream_waits
from weft.run.device_streams import CopyQueue, DeviceClock, DeviceWork, KernelStream
from weft.run.rank_streams import RankStreams
from weft.run.record.recorder import Recorder
from weft.run.record.slots import read_slots
from weft.run.streams import Completion, Ended, Stream, Value
from weft.run.work_queue import WorkQueue

SEEDS = range(5)
STEPS = 4
LATE_WAIT = LateEvent.wait


class Forgetful(DeviceWork):
    """Work on a device that keeps nothing of what its kernels read."""

    def __init__(self, *made: Any) -> None:
        *others, _kept, order = made
        super().__init__(*others, (), order)


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


@given(parts(), st.integers(0, 2**16), st.data())
@settings(max_examples=25, deadline=None)
def test_streams_wait_for_what_the_program_says_and_for_nothing_else(
    part: RankProgram, seed: int, data: st.DataObject
) -> None:
    """Also where some instructions have nothing to do. None states what it reads."""
    idle = data.draw(st.sets(st.sampled_from(part.positions), max_size=len(part) // 3))
    accelerator, ended, early, waits = LateAccelerator(seed), set(), [], []
    compute = computing(accelerator)
    streams = RankStreams(compute, lambda name: beside(compute, name))
    order, under_way, steps = streams.order(part), list[Completion](), [0]
    assert order is not None
    follows = defaultdict[int, list[tuple[int, int]]](list)
    for source, target, distance in zip(*(one.tolist() for one in astuple(part.edges)), strict=True):
        of_source, of_target = part.columns.iteration[[source - part.first_row, target - part.first_row]]
        follows[target].append((source, of_target + distance * part.steps_per_cycle - of_source))

    def issue_of(position: int) -> Callable[[Stream], Completion]:
        def issue(stream: Stream) -> Completion:
            here = steps[0]

            def kernel() -> None:
                sources = ((here - later, source) for source, later in follows[position])
                early.extend(
                    one for one in sources if one[0] >= 0 and one[1] not in idle and one not in ended
                )
                ended.add((here, position))

            if position in idle:
                return Ended.now()
            return stream.run(str(position), lambda: accelerator.launch(kernel))

        return issue

    actions = [
        (one.iteration, streams.of(one), order.ordered(one, issue_of(one.position)))
        for one in part.instructions()
    ]
    with patch.object(LateEvent, "wait", lambda event: waits.append(event) or LATE_WAIT(event)):
        for steps[0] in range(STEPS):
            order.begin_step()
            now = steps[0] % part.steps_per_cycle
            launched = [issue(stream) for iteration, stream, issue in actions if iteration == now]
            for one in under_way:
                one.wait()
            under_way = launched
    streams.close()
    compute.close()
    assert early == []
    assert len({position for _, position in ended}) == len(part) - len(idle)
    # Kernels beside the default stream follow all that were launched in it, by one wait.
    others = np.count_nonzero(~is_compute(part.columns.kind))
    assert len(waits) <= STEPS * (len(stream_waits(part)) + others)


def test_what_follows_an_idle_instruction_follows_what_that_one_follows() -> None:
    """A gather follows a receive, and a forward pass follows both."""
    accelerator, order, held = LateAccelerator(), [], threading.Event()
    compute = computing(accelerator)
    streams = RankStreams(compute, lambda name: beside(compute, name))
    part = replace(
        part_of(make_program(tiny(tied=False), make_plan(tiny(tied=False))), 0),
        columns=Columns.of(3, kind=[RECEIVE_ACTIVATION, GATHER, FORWARD], peer=[1, -1, -1]),
        edges=Edges.of([0, 1, 0], [1, 2, 2]),
    )
    program = streams.order(part)
    assert program is not None
    assert len(stream_waits(part)) == 2
    works: list[Callable[[Stream], Completion]] = [
        lambda stream: stream.run("R0", lambda: accelerator.launch(lambda: held.wait(60))),
        lambda stream: Ended.now(),
        lambda stream: stream.run("F0", lambda: accelerator.launch(lambda: order.append("F0"))),
    ]
    for one, work in zip(part.instructions(), works, strict=True):
        program.ordered(one, work)(streams.of(one))
    time.sleep(0.02)
    assert order == []
    held.set()
    compute.close()
    streams.close()
    assert order == ["F0"]


def test_what_no_instruction_of_the_program_has_made_is_waited_for() -> None:
    accelerator, order = LateAccelerator(), []
    compute, messages = computing_and_messages(accelerator)
    program, held = object(), threading.Event()
    mine, other = (
        messages.run(name, lambda: accelerator.launch(lambda: held.wait(60)), order=given)
        for name, given in (("mine", program), ("other", None))
    )
    compute.run(
        "F0", lambda: accelerator.launch(lambda: order.append("F0")), Value.of(None, mine), order=program
    ).wait()
    compute.run(
        "F1", lambda: accelerator.launch(lambda: order.append("F1")), Value.of(None, other), order=program
    )
    time.sleep(0.02)
    assert order == ["F0"]
    held.set()
    compute.close()
    assert order == ["F0", "F1"]


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
