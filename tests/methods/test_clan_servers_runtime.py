"""Laws of sums on servers: nothing gets lost, replicas agree, links carry the bytes of the formula."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from methods.test_clan_runtime import (
    EXACT,
    LARGE,
    LENGTH,
    SHAPES,
    all_codecs,
    gradient_of,
    places,
    table,
)
from small_jobs import SEED
from thread_group import ThreadGroup, group_of, in_groups

from weft.methods.clan.options import ClanOptions
from weft.methods.clan.runtime.aggregator import Aggregator
from weft.methods.clan.runtime.exchange import TwoWaySums
from weft.methods.clan.runtime.served_group import ServedGroup
from weft.sync.base import Meeting

ORDER = ("compress", "push", "aggregate", "pull", "decompress")
LATER = (0, 0, 1, 1, 2)
CLIENTS, SERVERS = {"compress", "push", "pull", "decompress"}, {"push", "aggregate", "pull"}


class Member:
    """A replica of a stage, or a server, in a group of threads."""

    def __init__(
        self, options: ClanOptions, pieces: int, group: ThreadGroup, replicas: list[ThreadGroup]
    ) -> None:
        served = ServedGroup(group, group, group.size - len(replicas))
        self.pieces, self.server = pieces, served.server
        self.replica = replicas[group.place] if served.server < 0 else None
        self.sums, self.aggregator = (
            TwoWaySums(options),
            Aggregator(options, torch.float64, torch.device("cpu")),
        )
        if self.replica is None:
            self.aggregator.cut(0, pieces, served)
            return
        self.sums.lay_out(0, places())
        self.sums.cut(0, pieces, self.replica, (), served)
        self.sums.begin(0, torch.zeros(LENGTH, dtype=torch.float64))

    def step(self, gradient: torch.Tensor, step: int) -> torch.Tensor:
        """The sum of all replicas' gradients; nothing on a server."""
        flat = gradient.clone()
        for turn in range(self.pieces + 2):
            for name, lag in zip(ORDER, LATER, strict=True):
                if 0 <= turn - lag < self.pieces:
                    self.work(name, flat, self.meeting(step, turn - lag))
        if self.replica is not None:
            self.sums.reduce(flat, self.meeting(step, 0))
        return flat

    def work(self, name: str, flat: torch.Tensor, meeting: Meeting) -> None:
        if self.replica is None and name in SERVERS:
            getattr(self.aggregator, name)(meeting)
        elif self.replica is not None and name in CLIENTS:
            getattr(self.sums, name)(flat, meeting)

    def meeting(self, step: int, part: int) -> Meeting:
        group: Any = self.replica
        return Meeting(
            group=group,
            stage=0,
            step=step,
            part=part,
            replica=-1 if group is None else group.place,
            seed=SEED,
        )

    def carried(self) -> torch.Tensor | None:
        if self.replica is not None:
            return self.sums.carried(0)
        self.aggregator.give_errors()
        return None


@given(all_codecs(), st.integers(1, 4), st.integers(1, 3), st.integers(1, 20))
def test_replicas_agree_and_nothing_gets_lost_on_servers(
    options: ClanOptions, replicas: int, servers: int, pieces: int
) -> None:
    own = group_of(replicas)

    def work(group: ThreadGroup) -> tuple[list[torch.Tensor], torch.Tensor | None, int]:
        one = Member(options, pieces, group, own)
        group.sent_bytes["rows"] = 0
        sums = [one.step(gradient_of(group.place, step), step) for step in range(2)]
        sent = group.sent_bytes["rows"]
        return sums, one.carried(), sent

    results = in_groups(replicas + servers, work)
    sums, carried, _ = results[0]
    for others, left, _ in results[:replicas]:
        assert all(torch.equal(one, other) for one, other in zip(sums, others, strict=True))
        assert (left is None) != options.keeps_errors
        assert left is None or torch.equal(left, carried)
    whole = [sum(gradient_of(rank, step) for rank in range(replicas)) for step in range(2)]
    if carried is not None:
        torch.testing.assert_close(sum(sums) + carried, sum(whole), rtol=0.0, atol=EXACT)
    elements = sum(prod(SHAPES[number]) for number in LARGE)
    lengths = [elements * (n + 1) // pieces - elements * n // pieces for n in range(pieces)]
    share = sum(
        options.of_piece(0, part).payload_bytes(-(-length // (servers * options.block)))
        for part, length in enumerate(lengths)
    )
    assert [sent for *_, sent in results] == [2 * servers * share] * replicas + [
        2 * replicas * share
    ] * servers


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 6))
def test_a_codec_that_leaves_nothing_out_is_a_plain_sum_on_servers(
    replicas: int, servers: int, pieces: int
) -> None:
    own = group_of(replicas)

    def work(group: ThreadGroup) -> torch.Tensor:
        one = Member(table("top-k", ratio=1.0), pieces, group, own)
        return one.step(gradient_of(group.place, 0).float().double(), 0)

    expected = sum(gradient_of(rank, 0).float().double() for rank in range(replicas))
    for found in in_groups(replicas + servers, work)[:replicas]:
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("codec", ["top-k", "scaled-sign"])
def test_errors_of_a_share_outlive_a_gradient_that_is_not_finite(codec: str) -> None:
    """The shares without such a number go on; those with it have the errors of before, on both sides."""

    def run(steps: list[int]) -> list[tuple[dict[str, torch.Tensor], bool]]:
        own = group_of(2)

        def work(group: ThreadGroup) -> tuple[dict[str, torch.Tensor], bool]:
            one, finite = Member(table(codec), 1, group, own), True
            for step in steps:
                gradient = gradient_of(group.place, step)
                if step == 2 and group.place == 1:
                    gradient[0] = torch.nan
                summed = one.step(gradient, step)
                finite &= bool(summed.isfinite().all())
            tensors = {**one.sums.tensors(), **one.aggregator.tensors()}
            return {name: value.clone() for name, value in tensors.items()}, finite

        return list(in_groups(4, work))

    broken, before = run([0, 1, 2]), run([0, 1])
    assert not any(finite for _, finite in broken[:2])
    # The first of two servers owns the share with it.
    (first, _), (second, _) = broken[2:]
    (first_before, _), (second_before, _) = before[2:]
    assert torch.equal(first["owned/0/0"], first_before["owned/0/0"])
    assert not torch.equal(second["owned/0/0"], second_before["owned/0/0"])
    assert second["owned/0/0"].isfinite().all()
    for (now, _), (then, _) in zip(broken[:2], before[:2], strict=True):
        assert torch.equal(now["error/0"][:120], then["error/0"][:120])
        assert not torch.equal(now["error/0"][260:440], then["error/0"][260:440])
        assert now["error/0"].isfinite().all()


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 5))
def test_errors_that_another_plan_left_are_all_on_the_servers(
    replicas: int, servers: int, pieces: int
) -> None:
    left, own = gradient_of(7, 7), group_of(replicas)
    for number, (start, shape) in enumerate(places()):
        if number not in LARGE:
            left[start : start + prod(shape)] = 0.0

    def work(group: ThreadGroup) -> torch.Tensor | None:
        one = Member(table(), pieces, group, own)
        if one.replica is None:
            one.aggregator.take_errors()
        else:
            one.sums.carry_on(0, left)
        return one.carried()

    for found in in_groups(replicas + servers, work)[:replicas]:
        assert torch.equal(found, left)
