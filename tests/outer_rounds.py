"""Rounds of replicas that meet by an outer step, in threads of one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from thread_group import ThreadGroup, in_groups

from weft.describe.plan import Choice
from weft.methods.local_averaging.runtime.outer_step import Averaging, LocalRound
from weft.run.state.bucket import VECTOR_ELEMENTS
from weft.sync import get_synchroniser

METHODS = ("local-averaging", "slow-momentum", "diloco", "sign-momentum")


class OuterRound(NamedTuple):
    """How far every replica has moved from the agreed weights, shape (replicas, n), and at which rate."""

    moved: torch.Tensor
    rate: float = 0.5


class OuterOutcome(NamedTuple):
    """The agreed weights after every round, shape (rounds, n), the states by name, and the sent bytes."""

    weights: torch.Tensor
    states: dict[str, torch.Tensor]
    sent_bytes: dict[str, int]


def outer(
    method: str,
    start: torch.Tensor,
    rounds: Sequence[OuterRound],
    *,
    shares: Sequence[float] = (),
    lengths: dict[str, int] | None = None,
    **options: float | str,
) -> Sequence[OuterOutcome]:
    """Return every rank's outcome of rounds from the weights `start`, shape (n,)."""
    replicas = len(rounds[0].moved)
    shares = shares or [1.0 / replicas] * replicas
    lengths = lengths or {"weight": len(start)}
    unit = VECTOR_ELEMENTS * replicas
    padding = -len(start) % unit

    def one(group: ThreadGroup) -> OuterOutcome:
        synchroniser = get_synchroniser(Choice(name=method, options={"every": 1, **options}))
        assert isinstance(synchroniser, Averaging)
        weights = torch.nn.functional.pad(start, (0, padding))
        synchroniser.begin("0", weights.clone(), group, lengths)
        found = []
        for number, (moved, rate) in enumerate(rounds):
            weights = weights - torch.nn.functional.pad(moved[group.place], (0, padding))
            done = LocalRound(
                name="0",
                share=shares[group.place],
                finite=weights.isfinite().all(),
                learning_rate=rate,
                number=number,
                seed=7,
            )
            synchroniser.average(weights, done, group)
            found.append(weights[: len(start)].clone())
        return OuterOutcome(torch.stack(found), dict(synchroniser.tensors()), group.sent_bytes)

    return in_groups(replicas, one)


def drawn(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Normal numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)
