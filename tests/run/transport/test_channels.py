"""Messages: order, payloads, sizes, times, and errors that name the instruction and the peer."""

from __future__ import annotations

import os
import random
import signal
import threading
from pathlib import Path

import pytest
import torch
from pool import RankError, WorkerPool

from weft.run.launch.failures import PeerLostError
from weft.run.streams import Completion, Value
from weft.run.transport.channels import PAYLOADS, SMALL_BYTES, Channels, open_channels
from weft.run.work_queue import WorkQueue

pytestmark = pytest.mark.processes

TIMEOUT_S = 60.0
SMALL, LARGE = 3, SMALL_BYTES // 4 + 1


class Lines:
    """Messages with all other ranks, on streams as a Program has them: by peer, direction and payload."""

    def __init__(self, rank: int, ranks: int, timeout_s: float = TIMEOUT_S) -> None:
        self._channels: Channels = open_channels(set(range(ranks)) - {rank}, timeout_s)
        self._streams: dict[tuple[int, str, str], WorkQueue] = {}

    def send(self, tensor: torch.Tensor, peer: int, payload: str, label: str) -> Completion:
        outbox = self._channels.outgoing(peer, payload, tensor.nbytes)
        return outbox.send(self._stream(peer, "out", payload), label, Value.of(tensor))

    def receive(
        self, shape: tuple[int, ...], dtype: torch.dtype, peer: int, payload: str, label: str
    ) -> Value[torch.Tensor]:
        tensor = torch.empty(shape, dtype=dtype)
        inbox = self._channels.incoming(peer, payload, tensor.nbytes)
        return Value.of(tensor, inbox.receive(self._stream(peer, "in", payload), label, tensor))

    def close(self) -> None:
        for stream in self._streams.values():
            stream.close()
        self._channels.close()

    def _stream(self, *key: int | str) -> WorkQueue:
        return self._streams.setdefault(key, WorkQueue(" ".join(map(str, key))))


def read(value: Value[torch.Tensor]) -> torch.Tensor:
    value.completion.wait()
    return value.content


def threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("weft-")}


def exchange(rank: int, ranks: int, length: int) -> tuple[dict[str, list[float]], int, bool]:
    """Both ranks send before they receive, two payloads at once, and read them in another order."""
    # The process has run other tests before.
    before = threads()
    channels = Lines(rank, ranks)
    peer, times = 1 - rank, []

    def stamp(start_ns: int, end_ns: int) -> None:
        times.append((start_ns, end_ns))

    sent = [
        channels.send(torch.full((length,), 100.0 * index + number), peer, payload, "SF")
        for number in range(4)
        for index, payload in enumerate(PAYLOADS)
    ]
    received = {
        payload: [channels.receive((length,), torch.float32, peer, payload, "RF") for _ in range(4)]
        for payload in reversed(PAYLOADS)
    }
    for completion in (*sent, *(value.completion for values in received.values() for value in values)):
        completion.report_to(stamp)
    # The last one first: whoever waits for it finds those before it, too.
    values = {
        payload: [read(value).unique().item() for value in reversed(arriving)]
        for payload, arriving in received.items()
    }
    for completion in sent:
        completion.wait()
    beside = bool(threads() - before)
    channels.close()
    assert all(end_ns >= start_ns > 0 for start_ns, end_ns in times)
    assert not threads() - before
    return values, len(times), beside


@pytest.mark.parametrize("length", [SMALL, LARGE])
def test_order_and_payloads_are_kept(worker_pool: WorkerPool, length: int) -> None:
    for values, stamps, beside in worker_pool.run(exchange, length, ranks=2):
        assert values == {"activation": [3.0, 2.0, 1.0, 0.0], "output_gradient": [103.0, 102.0, 101.0, 100.0]}
        assert stamps == 16
        assert beside == (length == LARGE)


def converse(rank: int, ranks: int, seed: int) -> None:
    """Three ranks send each other messages of any size and type, all before anyone reads."""
    channels = Lines(rank, ranks)
    pairs = [(source, target) for source in range(ranks) for target in range(ranks) if source != target]
    draw = random.Random(seed)
    # More than what the system takes in at once, so that some of the small ones have to wait.
    messages = [
        (
            draw.choice(pairs),
            draw.choice(PAYLOADS),
            (draw.choice((0, 1, 5, SMALL_BYTES // 8, SMALL_BYTES // 2)), draw.randint(1, 3)),
            draw.choice((torch.float32, torch.bfloat16, torch.float64)),
        )
        for _ in range(200)
    ]
    messages += [((0, 1), PAYLOADS[0], (SMALL_BYTES // 8, 1), torch.float64)] * 400

    def content(number: int) -> torch.Tensor:
        _, _, shape, dtype = messages[number]
        generator = torch.Generator().manual_seed(number)
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    sent, received = [], []
    for number, ((source, target), payload, shape, dtype) in enumerate(messages):
        if source == rank:
            sent.append(channels.send(content(number), target, payload, str(number)))
        if target == rank:
            received.append((number, channels.receive(shape, dtype, source, payload, str(number))))
    draw.shuffle(received)
    for number, value in received:
        assert torch.equal(read(value), content(number)), messages[number]
    for one in sent:
        one.wait()
    channels.close()


def test_messages_of_all_sizes_arrive_whoever_reads_first(worker_pool: WorkerPool) -> None:
    worker_pool.run(converse, 5, ranks=3)


def lose_peer(rank: int, ranks: int, notes: Path, length: int) -> None:
    channels = Lines(rank, ranks)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    values = [
        channels.receive((length,), torch.float32, 1, "activation", label) for label in ("RF1.0", "RF1.1")
    ]
    with notes.open("a") as file:
        for value in values:
            with pytest.raises(PeerLostError) as caught:
                read(value)
            print(caught.value, file=file)
        with pytest.raises(PeerLostError) as caught:
            send_until_refused(channels, length)
        print(caught.value, file=file)


def send_until_refused(channels: Lines, length: int) -> None:
    for _ in range(1000):
        channels.send(torch.zeros(length), 1, "activation", "SF0.0").wait()


@pytest.mark.parametrize("length", [SMALL, LARGE])
def test_a_lost_peer_is_named_with_the_instruction(
    worker_pool: WorkerPool, tmp_path: Path, length: int
) -> None:
    with pytest.raises(RankError, match="rank 1: the process died"):
        worker_pool.run(lose_peer, tmp_path / "notes", length, ranks=2)
    first, second, third = (tmp_path / "notes").read_text().splitlines()
    assert first.startswith("RF1.0: receive of activation from rank 1 failed: ")
    assert second == first
    assert third.startswith("SF0.0: send of activation to rank 1 failed: ")


def wait_in_vain(rank: int, ranks: int) -> list[str]:
    channels = Lines(rank, ranks, timeout_s=0.2)
    found = []
    for length in (SMALL, LARGE):
        value = channels.receive((length,), torch.float32, 1 - rank, "activation", "RF1.0")
        with pytest.raises(PeerLostError) as caught:
            read(value)
        found.append(str(caught.value))
    return found


def test_nobody_waits_for_ever(worker_pool: WorkerPool) -> None:
    for rank, found in enumerate(worker_pool.run(wait_in_vain, ranks=2)):
        line = f"RF1.0: receive of activation from rank {1 - rank} failed: nothing came in time"
        assert found == [line, line]
