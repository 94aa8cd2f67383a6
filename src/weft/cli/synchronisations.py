"""`weft plan --compare-sync`: synchronisation methods side by side."""

from __future__ import annotations

from pathlib import Path

from weft.cli.output import console, print_json, say_written, working, write_asked
from weft.cli.rankings import print_problem
from weft.cli.tables.synchronisation import sync_record, sync_tables
from weft.describe.plan_file import PlanFile
from weft.describe.run_file import RunFile
from weft.describe.synchronisation import AUTO
from weft.planning.planned import searched_densely
from weft.planning.planners import Planner
from weft.planning.sync_comparison import compare_synchronisations


def show_synchronisations(run: RunFile, planner: Planner | None, *, out: Path | None, json: bool) -> None:
    """Show every method on its best layout, and write the plan of the first to `out`, if given.

    A pinned method is one of them, with its options.

    Raises:
        InputError: if the dense search has no layout that fits.
    """
    asked = None if run.sync.method == AUTO else run.sync.choice
    with working("searching layouts for each way to agree"):
        dense = searched_densely(run, planner)
        assert dense.ranking is not None, "it was searched for"
        answers = compare_synchronisations(dense.ranking, run.train.steps, asked)
    best = answers[0].found.candidate
    assert best is not None, "dense fits at least"
    assert best.plan is not None, "a fitting candidate was simulated"
    write_asked([(out, PlanFile(best.plan, best.prediction, dense.problem.subject(run)).to_json)])
    if json:
        assumed = dict(dense.problem.assumed)
        print_json({"assumed": assumed, "methods": [sync_record(one) for one in answers]})
        return
    print_problem(dense.problem)
    console().print(sync_tables(answers))
    say_written(out)
