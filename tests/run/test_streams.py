"""Laws of streams and completions, and that handlers state what they follow instead of trusting the host.

The same Programs are run with the streams of a CPU and with late ones, on which nothing is in order but what
the instructions say: gradients have the same bits, and every edge of the Program is stated.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import pytest
import torch
from asked_methods import TELLS_NORMS
from late_streams import late
from pool import WorkerPool
from small_jobs import batch_of, descent, make_runtime, parameters_of
from small_plans import divisible, make_plan, make_program, tiny
from tensor_plans import tensor_plan
from torch import nn

from weft.describe.families import layer_graph
from weft.describe.model import ModelConfig
from weft.describe.plan import GRADIENT_NORM, Choice, Plan
from weft.errors import RunError
from weft.planning.compile import compile_evaluation_part
from weft.program.verify import require_valid
from weft.run.rank_streams import HostStream
from weft.run.streams import Ended, Stream, Value
from weft.run.work_queue import WorkQueue

STEPS = 3


@contextmanager
def queues(*names: str) -> Iterator[list[WorkQueue]]:
    made = [WorkQueue(name) for name in names]
    try:
        yield made
    finally:
        for one in made:
            one.close()


def test_work_follows_what_it_reads_and_what_came_before() -> None:
    release, order = threading.Event(), []

    def held() -> None:
        release.wait()
        order.append("first")

    with queues("a", "b") as (one, other):
        first = one.run("first", held)
        second = other.run("second", lambda: order.append("second"), Value.of(None, first))
        third = other.run("third", lambda: order.append("third"))
        # What reads nothing of these goes on.
        HostStream().run("host", lambda: order.append("host"))
        assert order == ["host"]
        release.set()
        for completion in (third, second, first):
            completion.wait()
    assert order == ["host", "first", "second", "third"]


def test_the_host_computes_at_once_after_what_it_reads() -> None:
    release, order = threading.Event(), []
    with queues("a") as (queue,):

        def held() -> None:
            release.wait()
            order.append("first")

        first = queue.run("first", held)
        threading.Timer(0.01, release.set).start()
        ended = HostStream().run("second", lambda: order.append("second"), Value.of(None, first))
        assert order == ["first", "second"]
        assert first.times is not None
        assert ended.times[0] >= first.times[1]


def test_contents_are_there_for_who_reads_the_value() -> None:
    with queues("a", "b") as (one, other):
        values = [Value() for _ in range(20)]
        for number, value in enumerate(values):
            before = values[number - 1] if number else Value.of(1)

            def work(value: Value = value, before: Value = before) -> None:
                value.content = 2 * before.content

            value.completion = (one, other)[number % 2].run(str(number), work, before)
        values[-1].completion.wait()
        assert values[-1].content == 2**20


def test_the_first_failure_reaches_all_that_follows() -> None:
    def fail() -> None:
        raise ConnectionError("gone")

    ran: list[str] = []
    with queues("first", "second") as (one, other):
        broken = one.run("R0", fail)
        behind = one.run("R1", lambda: ran.append("R1"))
        reader = other.run("G0", lambda: ran.append("G0"), Value.of(None, broken))
        after = other.run("G1", lambda: ran.append("G1"))
        for completion in (after, reader, behind, broken):
            with pytest.raises(RunError, match=r"^R0: first failed: gone$"):
                completion.wait()
            assert completion.times is None
        with pytest.raises(RunError, match=r"^R0: first failed: gone$"):
            HostStream().run("F0", lambda: ran.append("F0"), Value.of(None, behind))
    assert not ran


def test_times_are_known_after_the_end_and_told_once() -> None:
    release, told = threading.Event(), []

    def stamp(start_ns: int, end_ns: int) -> None:
        told.append((start_ns, end_ns))

    with queues("a", "b") as (one, other):
        first = one.run("first", release.wait)
        second = other.run("second", lambda: None, Value.of(None, first))
        for completion in (first, second):
            completion.report_to(stamp)
            assert completion.times is None
        release.set()
        second.wait()
        assert told == [first.times, second.times]
        assert first.times is not None
        assert second.times is not None
        assert second.times[0] >= first.times[1] >= first.times[0]
        second.report_to(stamp)
    assert told == [first.times, second.times, second.times]
    Ended.at((3, 4)).report_to(stamp)
    assert told[-1] == (3, 4)


def test_stamps_that_come_while_work_ends_are_taken_once() -> None:
    told: list[int] = []
    with queues("a") as (queue,):
        for number in range(500):
            completion = queue.run("quick", lambda: None)
            completion.report_to(lambda start_ns, end_ns, number=number: told.append(number))
        completion.wait()
    assert sorted(told) == list(range(500))


class Held:
    """Something that work holds."""


def test_a_stream_holds_nothing_of_work_that_has_ended() -> None:
    with queues("a") as (queue,):
        held = Held()
        gone = threading.Event()
        weakref.finalize(held, gone.set)
        value = Value.of(held)
        completion = queue.run("holds", lambda: None, value)
        completion.wait()
        del value, held
        assert gone.wait(10)
        assert completion.times is not None


@pytest.fixture(params=["host", "queue"])
def any_stream(request: pytest.FixtureRequest) -> Iterator[Stream]:
    if request.param == "host":
        yield HostStream()
    else:
        with queues("queue") as (queue,):
            yield queue


def test_every_stream_ends_its_work_in_order(any_stream: Stream) -> None:
    order: list[int] = []
    completions = [
        any_stream.run(str(number), lambda number=number: order.append(number)) for number in range(20)
    ]
    completions[-1].wait()
    assert order == list(range(20))
    times = [completion.times for completion in completions]
    assert all(before[1] <= after[0] <= after[1] for before, after in pairwise(times))


Norms = tuple[float | None, dict[str, list[float]]]
Trained = tuple[list[float], list[Norms], list[torch.Tensor], list[torch.Tensor], float]


def train(
    rank: int, ranks: int, config: ModelConfig, plan: Plan, seed: int | None, small_bytes: int
) -> tuple[Trained, list[str]]:
    """What steps and an evaluation give, on late streams where a seed is given, and edges nobody stated."""
    gradients: list[torch.Tensor] = []

    def watched(module: nn.Module) -> torch.optim.Optimizer:
        def look(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            stepped = (one for group in optimizer.param_groups for one in group["params"])
            gradients.extend(one.grad.clone() for one in stepped)

        optimizer = descent(module)
        optimizer.register_step_pre_hook(look)
        return optimizer

    program, batches = make_program(config, plan), [batch_of(config, plan, step) for step in range(STEPS)]
    clip_norm = 0.4 if plan.method(GRADIENT_NORM) else None
    streams = nullcontext() if seed is None else late(seed + rank)
    with patch("weft.run.transport.channels.SMALL_BYTES", small_bytes), streams as clock:
        runtime = make_runtime(rank, config, plan, program, optimizer_factory=watched, clip_norm=clip_norm)
        results = [runtime.step(step, batch) for step, batch in enumerate(batches)]
        unstated = clock.missing(program, rank, STEPS) if clock is not None else []
        losses = [result.loss for result in results]
        norms = [(result.gradient_norm, result.series) for result in results]
        runtime.gather_weights()
        parameters = list(parameters_of(runtime).values())
        evaluated = runtime.evaluate(compile_evaluation_part(plan, layer_graph(config), rank), batches)
        runtime.close()
    return (losses, norms, gradients, parameters, evaluated), unstated


def plan_of(config: ModelConfig, sharding: str, *, clips: bool = False, **sizes: Any) -> Plan:
    plan = make_plan(config, precision="fp32", **sizes)
    island = 2 if plan.ranks == 4 and sharding == "zero-3" else None
    return plan.model_copy(
        update={
            "sharding": sharding,
            "island": island,
            "methods": (Choice(name=GRADIENT_NORM),) if clips else (),
        }
    )


def told(plan: Plan) -> Plan:
    return plan.model_copy(update={"methods": TELLS_NORMS})


def in_segments(config: ModelConfig, way: str, **sizes: Any) -> Plan:
    choice = Choice(name="tensor-collectives", options={"run": way})
    return tensor_plan(config, precision="fp32", **sizes).model_copy(update={"methods": (choice,)})


WHOLE, TIED, DIVIDED = tiny(), tiny(tied=True), divisible("gpt")
CASES = {
    "1f1b": (WHOLE, plan_of(WHOLE, "zero-0", pp=2, schedule="1f1b")),
    "norms of micro-batches": (WHOLE, told(plan_of(WHOLE, "zero-1", pp=2, dp=2, schedule="zb-h1"))),
    "zb-v, tied": (TIED, plan_of(TIED, "zero-0", pp=2, loops=2, schedule="zb-v", clips=True)),
    "zero-0": (WHOLE, plan_of(WHOLE, "zero-0", dp=2, loops=2, schedule="breadth-first", clips=True)),
    "zero-1, tied": (TIED, plan_of(TIED, "zero-1", pp=2, dp=2, schedule="zb-h1", clips=True)),
    "zero-2": (WHOLE, plan_of(WHOLE, "zero-2", dp=2, loops=4, schedule="depth-first")),
    "segments": (DIVIDED, in_segments(DIVIDED, "overlapped", pp=2, schedule="1f1b")),
    "segments in turns": (DIVIDED, in_segments(DIVIDED, "interleaved")),
    "zero-3, islands": (WHOLE, plan_of(WHOLE, "zero-3", dp=4, loops=4, schedule="depth-first")),
}


@pytest.mark.processes
@pytest.mark.parametrize("case", CASES)
def test_late_streams_compute_the_same_bits_and_every_edge_is_stated(
    worker_pool: WorkerPool, case: str
) -> None:
    config, plan = CASES[case]
    require_valid(make_program(config, plan))
    # No message is small, so that all go over the streams.
    expected = worker_pool.run(train, config, plan, None, -1, ranks=plan.ranks)
    found = worker_pool.run(train, config, plan, 11, -1, ranks=plan.ranks)
    for (on_time, _), (lately, unstated) in zip(expected, found, strict=True):
        require_same(lately, on_time)
        assert unstated == []


@pytest.mark.processes
def test_small_messages_are_read_by_whoever_is_first(worker_pool: WorkerPool) -> None:
    config, plan = CASES["1f1b"]
    expected = worker_pool.run(train, config, plan, None, 2**16, ranks=2)
    for seed in (1, 2, 3):
        found = worker_pool.run(train, config, plan, seed, 2**16, ranks=2)
        for (on_time, _), (lately, _) in zip(expected, found, strict=True):
            require_same(lately, on_time)


def require_same(found: Trained, expected: Trained) -> None:
    """To the bit."""
    assert found[:2] == expected[:2]
    for tensors, others in zip(found[2:4], expected[2:4], strict=True):
        assert len(tensors) == len(others) > 0
        assert all(torch.equal(one, other) for one, other in zip(tensors, others, strict=True))
    assert found[4] == expected[4]


def broken_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    raise ZeroDivisionError("no loss today")


def fail(rank: int, ranks: int, config: ModelConfig, plan: Plan) -> list[str]:
    with late(rank):
        runtime = make_runtime(rank, config, plan, make_program(config, plan), loss_fn=broken_loss)
        result = runtime.step(4, batch_of(config, plan, 0))
        with pytest.raises(RunError) as read:
            _ = result.loss
        # The next step ends with it, too.
        with pytest.raises(RunError) as caught:
            runtime.step(5, batch_of(config, plan, 0))
        with pytest.raises(RunError):
            runtime.close()
    return [str(read.value), str(caught.value)]


@pytest.mark.processes
def test_a_late_failure_is_told_with_the_instruction_that_failed(worker_pool: WorkerPool) -> None:
    [[read, text]] = worker_pool.run(fail, WHOLE, plan_of(WHOLE, "zero-0"), ranks=1)
    assert read == "step 4: F0.0: compute failed: no loss today"
    assert text.startswith("rank 0, step 5, instruction ")
    assert text.endswith(": F0.0: compute failed: no loss today")
