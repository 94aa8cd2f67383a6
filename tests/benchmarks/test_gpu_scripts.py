"""Benchmarks for a GPU: their parts fit the classes that there are, which else a GPU alone would show."""

from __future__ import annotations

import curvature_parts
import layout_grid
import torch

from weft.methods.kfac.linears import treated_in


def test_the_parts_of_curvature_run_again_and_again() -> None:
    torch.manual_seed(0)
    work = curvature_parts.work_of(treated_in(curvature_parts.block_of(64, 16))[1], 32, "cpu")
    # The products of rows, their inverses, which assert that there are any, and their use.
    assert len(work) == 3
    for part in (*work, *work):
        part()


def test_every_layout_of_the_grid_is_predicted() -> None:
    for case in layout_grid.cases("cpu"):
        _, plan, _, prediction = layout_grid.prepare(layout_grid.arguments_of(case))
        assert {stage.recompute for stage in plan.stages} == {case["recompute"]}
        assert prediction.step_s > 0.0
