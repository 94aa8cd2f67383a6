"""The pass of a method that cuts stages into segments: its options, groups and checks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from weft.describe.layer_graph import LayerGraph
from weft.describe.plan import Plan
from weft.errors import Violation
from weft.program.checks.borders import check_borders
from weft.program.layout import PipelineLayout
from weft.program.lower import LoweredPipeline
from weft.program.passes import GroupTable, Pass
from weft.program.passes.cut import cut
from weft.program.passes.interleave import interleave
from weft.program.program import NONE
from weft.program.segments import CutInSegments


@dataclass(frozen=True, slots=True)
class CutOptions:
    """The obligation of a method that cuts stages, and True if two micro-batches take turns."""

    owed: CutInSegments
    interleaved: bool = False


def refuse_cut(where: str, problem: str, others: Mapping[str, Any]) -> list[Violation]:
    """Return the violation of a method that does not go with passes in segments, if one cuts them.

    `others` are the options of all methods by name.
    """
    cutters = [name for name, one in others.items() if isinstance(one, CutOptions)]
    return [Violation(where, f"passes in segments {problem}", f"{name}.run inside") for name in cutters]


def refuse_turns(where: str, problem: str, others: Mapping[str, Any]) -> list[Violation]:
    """Return the violation of a method that does not go with micro-batches that take turns in segments."""
    cutters = (name for name, one in others.items() if isinstance(one, CutOptions) and one.interleaved)
    return [Violation(where, f"interleaved passes {problem}", f"{name}.run instructions") for name in cutters]


def cutting_pass(
    name: str, options: Callable[[Plan, LayerGraph], CutOptions | None], *, after: tuple[str, ...]
) -> Pass[CutOptions]:
    """Return the pass of a method that cuts stages; those in `after` see whole passes."""
    return Pass(
        name=name,
        options=options,
        apply=_apply,
        after=after,
        last=True,
        groups=_groups,
        owes=lambda layout, chosen: chosen.owed,
        check=check_borders,
    )


def _apply(pipeline: LoweredPipeline, layout: PipelineLayout, options: CutOptions) -> LoweredPipeline:
    segments = options.owed.segments
    pipeline = cut(pipeline, segments)
    return interleave(pipeline, segments) if options.interleaved else pipeline


def _groups(layout: PipelineLayout, options: CutOptions) -> tuple[GroupTable, ...]:
    """Return each replica's groups that exchange, lane by lane; stages on the same ranks share them."""
    owed = options.owed
    numbers: dict[tuple[int, ...], int] = {}
    lanes = len(layout.stages[0].replicas[0])
    table = np.full((len(layout.stages), layout.replicas, lanes), NONE, dtype=np.int64)
    for stage, one in enumerate(layout.stages):
        for replica, ranks in enumerate(one.replicas):
            for group in owed.groups(stage, ranks) if owed.segments[stage].backward else ():
                number = numbers.setdefault(group, len(numbers))
                table[stage, replica, [ranks.index(rank) for rank in group]] = number
    return (GroupTable(kinds=owed.kinds, groups=tuple(numbers), by=("stage", "replica"), table=table),)
