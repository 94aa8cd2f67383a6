"""Steps of replicas under CSER in threads of one process, on one tensor of weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from thread_group import ThreadGroup, in_groups

from weft.methods.cser.options import CserOptions
from weft.methods.cser.program import owed_by
from weft.methods.cser.runtime.forms import ErrorFeedback, ExplicitErrors
from weft.methods.cser.runtime.meeting import Assembly
from weft.methods.cser.runtime.synced_part import SyncedPart

SEED = 7
# The update of a replica's step, from its number, the step and its weights.
UpdateOf = Callable[[int, int, torch.Tensor], torch.Tensor]


class CserOutcome(NamedTuple):
    """Weights and errors after every step, shape (steps, n), and the bytes that the replica sent.

    Attributes:
        met: the places of the last meeting of every step; None where there was none, or all places met.
        alike: whether all replicas chose the same blocks.
    """

    weights: torch.Tensor
    errors: torch.Tensor
    met: list[torch.Tensor | None]
    stalest: list[int]
    sent_bytes: int
    alike: bool


def part_of(start: torch.Tensor, seed: int = SEED, **options: Any) -> SyncedPart:
    """The weights `start`, shape (n,), on one replica."""
    weight = torch.nn.Parameter(start.clone())
    return SyncedPart("weight", [weight], CserOptions(**options), seed)


def on_one(
    group: ThreadGroup,
    start: torch.Tensor,
    updates: UpdateOf,
    steps: range,
    *,
    shares: Sequence[float] = (),
    part: SyncedPart | None = None,
    no_resets: bool = False,
    **options: Any,
) -> CserOutcome:
    """What one replica makes of the steps."""
    part, owed = part or part_of(start, **options), owed_by(CserOptions(**options))
    share = shares[group.place] if shares else 1.0 / group.size
    weights, errors, met, stalest, alike = [], [], [], [], True
    for step in steps:
        part.begin_step(step)
        part.flat.sub_(updates(group.place, step, part.flat.clone()))
        finite = part.flat.isfinite().all()
        part.form.after(part.flat, finite)
        finite = finite | torch.tensor(part.form.restores)
        places = None
        for reset in (False, True):
            if not (owed.resets_after(step) and not no_resets if reset else owed.updates_after(step)):
                continue
            assembly = Assembly.of(group, share, finite)
            number = step // owed.every if reset else step
            one = (part.form.reset if reset else part.form.update)(part.flat, number, assembly)
            part.note(one, step, reset=reset)
            places, alike = one.places, alike and bool(assembly.alike)
        weights.append(part.flat.clone())
        explicit = isinstance(part.form, ExplicitErrors | ErrorFeedback)
        errors.append(part.form.error.clone() if explicit else torch.zeros_like(start))
        met.append(places)
        stalest.append(part.stalest(step))
    sent_bytes = sum(group.sent_bytes.values())
    return CserOutcome(torch.stack(weights), torch.stack(errors), met, stalest, sent_bytes, alike)


def cser(
    replicas: int, start: torch.Tensor, updates: UpdateOf, steps: int, **asked: Any
) -> Sequence[CserOutcome]:
    """Every replica's outcome of so many steps; `asked` are options, and arguments of `on_one`."""
    return in_groups(replicas, lambda group: on_one(group, start, updates, range(steps), **asked))


def drawn_updates(seed: int, replicas: int, steps: int, length: int) -> tuple[torch.Tensor, UpdateOf]:
    """Normal updates that no weights decide, shape (replicas, steps, length), and the function of them."""
    generator = torch.Generator().manual_seed(seed)
    found = torch.randn((replicas, steps, length), generator=generator, dtype=torch.float64)
    return found, lambda replica, step, weights: found[replica, step]


def momentum_updates(seed: int, replicas: int, length: int, rate: float = 0.05) -> Callable[[], UpdateOf]:
    """Nesterov's steps on a quadratic of each replica; each call makes fresh momenta."""
    generator = torch.Generator().manual_seed(seed)
    curves = torch.rand((replicas, length), generator=generator, dtype=torch.float64) + 0.1
    goals = torch.randn((replicas, length), generator=generator, dtype=torch.float64)

    def fresh() -> UpdateOf:
        momenta = torch.zeros((replicas, length), dtype=torch.float64)

        def update(replica: int, step: int, weights: torch.Tensor) -> torch.Tensor:
            gradient = curves[replica] * (weights - goals[replica])
            momenta[replica] = 0.9 * momenta[replica] + gradient
            return rate * (0.9 * momenta[replica] + gradient)

        return update

    return fresh
