"""Planned jobs of given layouts, without a search."""

from __future__ import annotations

from typing import Any

from weft.describe.layout import Layout
from weft.describe.run_file import RunFile, run_of_keywords
from weft.moves.layout import build_plan
from weft.planning.planned_job import PlannedJob
from weft.planning.problem import problem_of_run


def run_of(
    model: str = "llama-7b", on: str = "16xa100-80gb", global_batch: int = 64, **words: Any
) -> RunFile:
    """A run of so many samples per step, in bf16 unless another precision is given."""
    given = {"sequence": None, "precision": "bf16", "pins": {}} | words
    return run_of_keywords(model=model, on=on, global_batch=global_batch, **given)


def planned(run: RunFile, **choices: Any) -> PlannedJob:
    """The job of a run with the layout of these choices; one device for each that is left out."""
    given: dict[str, Any] = {
        "pp": 1,
        "dp": 1,
        "loops": 1,
        "micro_batch_size": 1,
        "schedule": "1f1b",
    }
    problem = problem_of_run(run)
    layout = Layout(**(given | choices))
    # Embedding and head as light as nothing, so that stages have equally many blocks where they can.
    weights = [1.0 if layer.kind == "block" else 1e-6 for layer in problem.job.graph.layers]
    return PlannedJob(run=run, problem=problem, plan=build_plan(problem.job, layout, weights))
