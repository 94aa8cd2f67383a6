"""The report's figures of bubbles: predicted, measured, windows by stage, and ages."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from filled_plans import fills, kfac, placed
from methods.test_evaluate import GPT, planned
from small_plans import make_plan, make_program

from weft.describe.families import layer_graph
from weft.methods.bubble_filling.decide import with_windows
from weft.methods.bubble_filling.options import PieceRun, StageWindow, options_of, read_windows
from weft.methods.bubble_filling.report import REPORT, Filled
from weft.methods.bubble_filling.works import items_of
from weft.methods.kfac.ages import steady_age
from weft.planning.decisions import decided_words
from weft.program.kinds import KINDS

SECTION = REPORT[0]


def test_words_and_rows_tell_works_of_windows_and_of_steps() -> None:
    job = planned(bubble={"work": ["kfac", "evaluate"]}, kfac={})
    filled, windows = Filled.of(job), read_windows(options_of(job.plan).windows)
    assert filled is not None
    assert filled.busy_before < filled.busy <= 1.0
    rows = dict(SECTION.rows(job, []))
    assert rows["evaluate, pieces of a stage in each step"] == str(filled.in_steps["evaluate"])
    told = dict(one.split(": ") for one in rows["steps of a window, by stage"].split(", "))
    assert told
    assert {stage: str(windows[int(stage)].steps) for stage in told} == told
    assert rows["devices busy, predicted with it"] == f"{filled.busy:.1%}"
    [words] = [one for one in decided_words(job) if one.startswith("bubbles: ")]
    assert f"kfac {filled.every}, evaluate in every step" in words


def test_steps_as_predicted_have_the_predicted_shares_and_no_drift() -> None:
    job = planned()
    filled, timeline = Filled.of(job), job.predicted.simulation.timeline
    assert filled is not None
    rows = dict(SECTION.measured(job, timeline))
    shares = [
        float(rows[f"devices busy, measured {which}"].rstrip("%")) / 100
        for which in ("without the work", "with it")
    ]
    assert shares == pytest.approx([filled.busy_before, filled.busy], rel=0.02)
    assert rows["held out forward, measured"] == "1.00 times the predicted time"
    late = timeline.kind == KINDS.code("held_out_forward")
    half = (timeline.end_ns - timeline.start_ns) // 2
    slow = replace(timeline, end_ns=np.where(late, timeline.end_ns + half, timeline.end_ns))
    [told] = [text for name, text in SECTION.measured(job, slow) if name == "held out forward, measured"]
    assert told == "1.50 times the predicted time; `weft corrections` learns it for the next plan"


@pytest.mark.parametrize(("every", "expected"), [(1, 0.0), (4, 1.5), (5, 2.0)])
def test_curvature_that_is_inverted_at_once_is_as_old_as_its_window(every: int, expected: float) -> None:
    plan = make_plan(GPT, schedule="1f1b", pp=2, dp=2, micro_batches=4)
    program = make_program(GPT, plan.model_copy(update={"methods": (kfac(GPT, every=every),)}))
    assert steady_age(program) == expected


def test_curvature_that_is_inverted_a_step_late_is_a_step_older() -> None:
    plan = make_plan(GPT, schedule="1f1b", pp=2, micro_batches=4)
    open_plan = plan.model_copy(update={"methods": (kfac(GPT), fills())})
    # In the second step of three, behind the last pass: four forwards and four backwards.
    windows = [
        StageWindow(
            3,
            tuple(
                PieceRun(1, 7, place, 0, item.count(4))
                for place, item in enumerate(items_of(open_plan, layer_graph(GPT), stage))
            ),
        )
        for stage in range(2)
    ]
    program = make_program(GPT, with_windows(open_plan, windows))
    # Steps use curvature of three, one and two steps before.
    assert steady_age(program) == 2.0


def test_curvature_in_bubbles_is_at_most_two_windows_old() -> None:
    plan = make_plan(GPT, schedule="1f1b", pp=4, micro_batches=8)
    filled = placed(GPT, plan.model_copy(update={"methods": (kfac(GPT), fills())}))
    age, steps = (
        steady_age(make_program(GPT, filled)),
        [one.steps for one in read_windows(options_of(filled).windows)],
    )
    assert age is not None
    assert 0.0 < age <= 2 * max(steps)
