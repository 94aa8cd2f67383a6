"""Laws of CSER while replicas come and go: nothing is lost, and all who are there agree on `x - e`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from cser_rounds import UpdateOf, drawn_updates, part_of
from hypothesis import given, settings
from hypothesis import strategies as st
from methods.test_cser_absences import absences
from thread_group import ThreadGroup, group_of, in_threads

from weft.methods.cser.absences import Absences
from weft.methods.cser.runtime.meeting import Assembly

LENGTH, STEPS = 48, 16
SENT: tuple[dict[str, Any], ...] = (
    {"update_ratio": 4.0, "reset_ratio": 2.0, "keep_errors": True, "block": 3},
    {"reset_ratio": 2.0, "keep_errors": True, "block": 3},
    {"update_ratio": 4.0, "reset_ratio": 2.0, "compressor": "top-k"},
    {"compressor": "sign"},
)


class Way(NamedTuple):
    """Weights, errors and the common weights before the resets of every step, shape (steps, n); NaN: away."""

    weights: torch.Tensor
    errors: torch.Tensor
    common: torch.Tensor


def groups_of(replicas: int) -> list[Mapping[frozenset[int], ThreadGroup]]:
    """By replica, its place in every group of replicas that may meet."""
    found: list[dict[frozenset[int], ThreadGroup]] = [{} for _ in range(replicas)]
    for mask in range(1, 2**replicas):
        members = [one for one in range(replicas) if mask >> one & 1]
        for replica, group in zip(members, group_of(len(members)), strict=True):
            found[replica][frozenset(members)] = group
    return found


def walked(
    replicas: int, away: Absences, shares: list[float], updates: UpdateOf, options: dict[str, Any]
) -> list[Way]:
    """What every replica has after each step."""
    groups, all_of_them = groups_of(replicas), range(replicas)
    start = torch.linspace(-1.0, 1.0, LENGTH, dtype=torch.float64)

    def walk(replica: int) -> Way:
        part, there = part_of(start, every=away.every, **options), torch.tensor(True)
        way: list[list[torch.Tensor]] = [[], [], []]
        for step in range(STEPS):
            stepped = frozenset(one for one in all_of_them if away.computes(one, step))
            meeting = frozenset(one for one in all_of_them if away.meets(one, step))
            common = torch.full_like(start, torch.nan)
            if replica in stepped:
                part.begin_step(step)
                part.flat.sub_(updates(replica, step, part.flat.clone()))
                part.form.after(part.flat, there)
                if "update_ratio" in options or "compressor" in options:
                    part.form.update(
                        part.flat, step, Assembly.of(groups[replica][stepped], shares[replica], there)
                    )
                common = part.flat - part.form.error
            if (step + 1) % away.every == 0 and replica in meeting:
                group, number = groups[replica][meeting], step // away.every
                if meeting != stepped:
                    seat = Assembly.of(group, shares[replica], torch.tensor(replica in stepped))
                    part.form.rejoin(part.flat, number, seat)
                part.form.reset(part.flat, number, Assembly.of(group, shares[replica], there))
            for kept, value in zip(way, (part.flat, part.form.error, common), strict=True):
                kept.append(value.clone())
        return Way(*map(torch.stack, way))

    return in_threads(walk, all_of_them)


@given(absences(), st.integers(0, 2**31), st.sampled_from(SENT))
@settings(max_examples=12, deadline=None)
def test_whoever_is_there_agrees_and_no_update_is_lost(
    drawn: tuple[int, Absences], seed: int, options: dict[str, Any]
) -> None:
    replicas, away = drawn
    drawn_ones, updates = drawn_updates(seed, replicas, STEPS, LENGTH)
    shares = [(1.0 + one) / sum(range(1, replicas + 1)) for one in range(replicas)]
    ways = walked(replicas, away, shares, updates, options)
    before = [torch.linspace(-1.0, 1.0, LENGTH, dtype=torch.float64)] * replicas
    for step in range(STEPS):
        stepped = [one for one in range(replicas) if away.computes(one, step)]
        back = [one for one in range(replicas) if away.returns(one, step)]
        there = [*stepped, *back]
        # 1. Weights minus errors are the same on all that are there, also on whoever has just come back.
        common = [ways[one].weights[step] - ways[one].errors[step] for one in there]
        assert all(torch.allclose(one, common[0], rtol=0, atol=1e-11) for one in common)
        # 2. Each update of those that step counts once, and so does the error that a replica brings back.
        expected = sum(shares[one] * (before[one] - drawn_ones[one, step]) for one in stepped)
        for one in back:
            brought = ways[one].errors[step - 1]
            expected = expected + shares[one] * (ways[stepped[0]].common[step] + brought)
        found = sum(shares[one] * ways[one].weights[step] for one in there)
        assert torch.allclose(found, expected, rtol=0, atol=1e-11)
        # 3. Nothing of an absent replica changes.
        for one in set(range(replicas)) - set(there):
            assert torch.equal(ways[one].weights[step], before[one])
            assert torch.equal(ways[one].errors[step], ways[one].errors[step - 1])
        before = [way.weights[step] for way in ways]
