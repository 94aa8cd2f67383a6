"""A stage that runs whole, and in segments, in one thread of a group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from thread_group import ThreadGroup

from weft.program.segments import Border, StageSegments
from weft.run.stage.pieces import StageCut, Tape
from weft.run.stage.segments import StageRun


def borders_of(kinds: Sequence[int]) -> tuple[Border, ...]:
    """Borders with collectives of these kinds, whose bytes nobody asks for."""
    return tuple(Border(kind=kind, bytes=0, most_bytes=0) for kind in kinds)


def whole(stage: Any, given: torch.Tensor) -> torch.Tensor:
    output = stage(given)
    output.pow(2).sum().backward()
    return output.detach()


def in_segments(
    cut: StageCut,
    given: torch.Tensor,
    group: ThreadGroup,
    there: tuple[Border, ...],
    back: tuple[Border, ...],
    *,
    splits: bool,
) -> torch.Tensor:
    """The stage of a cut, with borders on the way there and back; `splits`: weight parts come last."""
    run = StageRun(0, cut, StageSegments(forward=there, backward=back, split=(False,) * (len(back) + 1)))
    tape, value = Tape(), given
    run.begin(tape, given)
    for segment in range(len(there) + 1):
        value = run.run(tape, segment, value.detach().requires_grad_() if segment else given)
        if segment < len(there):
            value = run.cross(tape, segment, value, group, backward=False)
    gradient: Any = 2.0 * value
    parts: list[Any] = []
    for segment in range(len(back), -1, -1):
        gradient, left = run.go_back(tape, segment, gradient, splits=splits)
        parts += left
        if segment > 0:
            gradient = run.cross(tape, segment - 1, gradient, group, backward=True)
    assert bool(parts) == splits
    for part in parts:
        part.run()
    return value
