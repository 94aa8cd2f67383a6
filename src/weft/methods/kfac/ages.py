"""The age of the curvature in a program: the steps from a capture to the steps that use it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from weft.methods.bubble_filling.kinds import owed_by as windows_of
from weft.methods.kfac.kinds import CURVATURES, INVERSIONS, PRECONDITION, owed_by
from weft.methods.kfac.linears import FACTORS
from weft.program.kinds import BACKWARD, BACKWARD_INPUT, FORWARD
from weft.program.program import Program

# Cycles until all ages repeat: of windows that no step has filled yet, and of their inverses.
_SETTLED = 3
_PASSES = {FORWARD: 0, BACKWARD: 1, BACKWARD_INPUT: 1}


def steady_age(program: Program) -> float | None:
    """Return the mean age, over steps and layers, that `curvature_age_steps` settles at; None without K-FAC.

    It follows the rows of the first rank of each stage, in their order.
    """
    owed, windows, columns = owed_by(program), windows_of(program), program.columns
    if owed is None or windows is None:
        return None
    kinds = [*_PASSES, *CURVATURES, *INVERSIONS, PRECONDITION]
    ages: list[int] = []
    for stage in owed.stages:
        own = (columns.stage == stage) & np.isin(columns.kind, kinds)
        rows = np.flatnonzero(own & (columns.rank == columns.rank[own].min()))
        table = zip(
            *(
                one[rows].tolist()
                for one in (columns.kind, columns.part, columns.micro_batch, columns.iteration)
            ),
            strict=True,
        )
        ages += _ages(list(table), windows.steps[stage], owed.layers[stage], program.steps_per_cycle)
    return sum(ages) / len(ages) if ages else None


def _ages(
    rows: list[tuple[int, int, int, int]], window: int, layers: Mapping[int, tuple[int, int]], cycle: int
) -> list[int]:
    """Return the ages of all layers of a stage in the steps of a settled cycle."""
    left: dict[tuple[int, int], int] = {}
    captured: dict[tuple[int, int], int] = {}
    made, used, ages = dict.fromkeys(layers, 0), dict.fromkeys(layers, 0), list[int]()
    for turn in range(_SETTLED + 1):
        for kind, part, micro_batch, iteration in rows:
            step = turn * cycle + iteration
            if kind in _PASSES:
                if iteration % window == 0:
                    left[_PASSES[kind], micro_batch] = step
            elif kind in CURVATURES:
                side = CURVATURES.index(kind)
                captured[part, side] = left.get((side, micro_batch), 0)
            elif kind in INVERSIONS:
                layer = part // FACTORS
                made[layer] += 1
                if made[layer] == sum(layers[layer]):
                    made[layer], used[layer] = 0, min(captured.get((layer, side), 0) for side in (0, 1))
            elif turn == _SETTLED:
                ages += [step - one for one in used.values()]
    return ages
