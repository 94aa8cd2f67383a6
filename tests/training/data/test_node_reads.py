"""One rank of a node reads a micro-batch and hands it to the others; a lost or failing rank delays nobody."""

from __future__ import annotations

import json
import socket
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from logged_task import READ
from pool import WorkerPool
from pooled_runs import trained

from weft.run.workspace import Samples, inputs_of
from weft.training.data.node_reads import NodeNeeds, NodeReads, packed, unpacked
from weft.training.directory.run_directory import RunDirectory

WAIT_S = 30.0
RUN = """
[model]
preset = "gpt-1m"
[task]
kind = "logged_task:{kind}"
data = "{text}"
sequence = 32
[train]
steps = 3
evaluate_every = 2
global_batch = 8
precision = "fp32"
[plan]
{layout}
micro_batch_size = 2
"""

needs_of_nodes = st.dictionaries(st.integers(0, 40), st.frozensets(st.integers(0, 9)), min_size=1, max_size=5)


@given(needs_of_nodes)
def test_each_micro_batch_has_one_reader_and_everyone_is_served(
    numbers: Mapping[int, frozenset[int]],
) -> None:
    ranks = {rank: NodeNeeds(rank, numbers) for rank in numbers}
    readers = Counter(number for one in ranks.values() for number in one.takers)
    assert readers == Counter(frozenset().union(*numbers.values()))
    for rank, one in ranks.items():
        assert {*one.takers, *one.givers} == numbers[rank]
        for number, giver in one.givers.items():
            assert rank in ranks[giver].takers[number]
        assert all(rank in ranks[peer].peers for peer in one.peers)


@pytest.mark.parametrize(
    "samples",
    [
        (torch.arange(6).reshape(2, 3), torch.arange(6).reshape(2, 3)[:, 1:]),
        ((torch.zeros(2, 0), torch.ones(2, 3, dtype=torch.bool)), torch.ones(2, dtype=torch.float64)),
        ((torch.rand(3, 1),), torch.rand(3).bfloat16()),
        (torch.arange(8).reshape(2, 4), torch.arange(8).reshape(2, 4), [[1, 3], [4]]),
    ],
    ids=["views", "several-inputs", "one-of-several", "documents"],
)
def test_a_micro_batch_arrives_as_it_was(samples: Samples) -> None:
    inputs, targets, *lengths = unpacked(packed(samples))
    assert isinstance(inputs, tuple) == isinstance(samples[0], tuple)
    arrived, sent = (*inputs_of(inputs), targets), (*inputs_of(samples[0]), samples[1])
    for one, other in zip(arrived, sent, strict=True):
        assert one.dtype == other.dtype
        assert one.equal(other)
    assert lengths == list(samples[2:])


class Node:
    """Ranks in threads of this process, connected in pairs; `read` counts what each has read."""

    def __init__(self, numbers: Mapping[int, frozenset[int]], read: Callable[[int, int, int], None]) -> None:
        self.read: Counter[tuple[int, int, int]] = Counter()
        lines: dict[int, dict[int, socket.socket]] = {rank: {} for rank in numbers}
        for one, other in combinations(numbers, 2):
            if other in NodeNeeds(one, numbers).peers:
                lines[one][other], lines[other][one] = socket.socketpair()

        def reading(rank: int, step: int, number: int) -> Samples:
            self.read[rank, step, number] += 1
            read(rank, step, number)
            return torch.tensor([step]), torch.tensor([number])

        self.ranks = {
            rank: NodeReads(
                lambda step, number, rank=rank: reading(rank, step, number),
                NodeNeeds(rank, numbers),
                lines[rank],
            )
            for rank in numbers
        }

    def take(self, rank: int, steps: range) -> list[tuple[int, ...]]:
        reads = self.ranks[rank]
        return [
            tuple(int(value) for value in reads(step, number)[:2])
            for step in steps
            for number in sorted(reads.needs.numbers[rank])
        ]


def all_of(numbers: frozenset[int], steps: range) -> list[tuple[int, int]]:
    return [(step, number) for step in steps for number in sorted(numbers)]


@pytest.mark.parametrize(
    "numbers",
    [
        {0: frozenset({0, 1}), 1: frozenset({0, 1})},
        {0: frozenset({0, 2}), 1: frozenset(), 2: frozenset({0, 1, 2, 3}), 5: frozenset({1, 3})},
    ],
)
def test_nothing_is_read_twice_on_a_node(numbers: Mapping[int, frozenset[int]]) -> None:
    node, steps = Node(numbers, lambda *_: None), range(20)
    with ThreadPoolExecutor(len(numbers)) as pool:
        taken = {rank: pool.submit(node.take, rank, steps) for rank in numbers}
        for rank, one in taken.items():
            assert one.result(WAIT_S) == all_of(numbers[rank], steps)
    distinct = len(frozenset().union(*numbers.values())) * len(steps)
    assert sum(node.read.values()) == distinct
    assert sum(one.read_bytes for one in node.ranks.values()) == 16 * distinct
    for reads in node.ranks.values():
        with reads:
            pass
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("weft-samples")]


def test_a_rank_reads_for_itself_once_the_reading_one_is_gone() -> None:
    both = frozenset({0, 1})
    node = Node({0: both, 1: both}, lambda *_: None)
    assert node.take(0, range(2)) == node.take(1, range(2))
    with node.ranks[0]:
        pass
    assert node.take(1, range(2, 4)) == all_of(both, range(2, 4))
    assert {place for place in node.read if place[0] == 1} == {
        (1, step, one) for step in (2, 3) for one in both
    }


def test_a_read_that_fails_is_repeated_where_its_error_is_needed() -> None:
    def failing(rank: int, step: int, number: int) -> None:
        if number == 1:
            raise OSError(f"rank {rank} cannot read")

    both = frozenset({0, 1})
    node = Node({0: both, 1: both}, failing)
    for rank in (0, 1):
        with pytest.raises(OSError, match=f"rank {rank} cannot read"):
            node.take(rank, range(1))


def test_a_rank_that_waits_for_samples_can_be_ended() -> None:
    both = frozenset({0})
    node = Node({0: both, 1: both}, lambda *_: None)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(node.take, 1, range(1))
        with node.ranks[1]:
            pass
        waiting.result(WAIT_S)


@pytest.mark.processes
@pytest.mark.parametrize("layout", ["pp = 2", "tp = 2"])
def test_ranks_of_a_node_train_on_samples_that_one_of_them_has_read(
    own_home: None, worker_pool: WorkerPool, tmp_path: Path, layout: str
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("over and under " * 400)
    runs, logs = {}, {}
    for kind in ("Logged", "LoggedByAll"):
        path = tmp_path / f"{kind}.toml"
        path.write_text(RUN.format(kind=kind, text=text, layout=layout))
        runs[kind] = trained(worker_pool, path, directory=tmp_path / kind)
        logs[kind] = [json.loads(line) for line in (tmp_path / READ).read_text().splitlines()]
        (tmp_path / READ).unlink()
    one, each = (RunDirectory(path) for path in runs.values())
    assert [row["loss"] for row in one.metrics()] == [row["loss"] for row in each.metrics()]
    assert one.held_out() == each.held_out()
    assert len(one.held_out()) == 3, "before the first step, after the second and after the last"
    assert len({process for process, *_ in logs["Logged"]}) == 1
    assert len({process for process, *_ in logs["LoggedByAll"]}) == 2
    read, read_by_all = (
        {kind: samples_read(log, held_out=kind) for kind in (False, True)} for log in logs.values()
    )
    assert read_by_all == {kind: samples + samples for kind, samples in read.items()}
    assert not any(count % 3 for count in read[True].values()), "each evaluation reads the same samples"
    for path in runs.values():
        result = json.loads((path / "result.json").read_text())
        assert result["data_read_bytes"] == read[False].total() * 2 * 32 * 8, "int64 inputs and targets"


def samples_read(log: list[tuple[int, bool, list[int]]], *, held_out: bool) -> Counter[int]:
    return Counter(sample for _, kind, samples in log if kind == held_out for sample in samples)
