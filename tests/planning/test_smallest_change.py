"""Smallest changes: one notch, legal, it fits, and no other notch that fits is faster."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest

from weft.describe.layout import Layout
from weft.describe.plan import Choice
from weft.describe.run_file import run_of_keywords
from weft.errors import InputError
from weft.moves.layout import refuse
from weft.moves.move import Purpose
from weft.planning.advice import SmallestChanges, advised
from weft.planning.neighbours import neighbours
from weft.planning.planned import plan_run
from weft.planning.planners import Candidate, Ranking, Verdict
from weft.planning.planners.bounds import Bounds
from weft.planning.planners.simulated import simulated
from weft.planning.problem import Problem, problem_of


def problem(on: str = "8xa100-80gb", model: str = "llama-7b") -> Problem:
    return problem_of(model=model, on=on, global_batch=32, precision="bf16")


def layout(**changed: object) -> Layout:
    base = Layout(pp=1, dp=8, loops=1, micro_batch_size=4, schedule="1f1b", sharding="zero-1")
    return replace(base, **changed)  # type: ignore[arg-type]


def judged(of: Problem, one: Layout) -> Candidate:
    asked = Candidate(layout=one, verdict=Verdict.PRUNED, reason="")
    return simulated(of, asked, Bounds(of).layer_seconds(one))


def notches(asked: Problem, rejected: Layout) -> list[tuple[str, Layout]]:
    found = neighbours(asked, rejected, Purpose.SMALLER, Bounds(asked).layer_seconds)
    return [(one.words, one.layout) for one in found]


ROWS = (layout(), layout(micro_batch_size=1, sharding="zero-0"), layout(pp=2, dp=4))


@pytest.mark.parametrize("rejected", ROWS, ids=str)
def test_it_is_the_fastest_legal_notch_that_fits(rejected: Layout) -> None:
    asked = replace(problem(), memory_risk=0.5)
    found = SmallestChanges(asked).of(rejected)
    fitting = {}
    for words, changed in notches(asked, rejected):
        if refuse(asked.job, changed) is None:
            candidate = judged(asked, changed)
            if candidate.verdict is Verdict.FITS:
                fitting[words] = candidate.step_s
    assert found is not None
    assert found.step_s == min(fitting.values())
    assert fitting[found.words] == found.step_s
    assert found.candidate.verdict is Verdict.FITS


def test_every_notch_is_one_and_keeps_the_devices() -> None:
    asked = problem()
    mixed = layout(pp=2, dp=4).recomputing(("full", "none"))
    for rejected in (*ROWS, mixed, layout(recompute="selective"), layout(sharding="zero-3", island=4)):
        for words, changed in notches(asked, rejected):
            assert changed.ranks == rejected.ranks
            before, after = asdict(rejected), asdict(changed)
            different = {key for key in before if before[key] != after[key]}
            if "recompute_per_stage" in different:
                different = different - {"recompute_per_stage"} | {"recompute"}
            if {"pp", "ep"} & different:
                # Other stages than those that recompute unlike each other.
                different -= {"recompute"}
            if "ep" in different:
                # Each rank keeps its number of samples.
                different -= {"micro_batch_size"}
            degrees = {"dp", "tp", "pp", "ep"}
            assert len(different - degrees - {"island"}) == (0 if different & degrees else 1), words
    moved = (Choice(name="offload", options={"states": True, "activations": True}),)
    last = layout(
        micro_batch_size=1, recompute="full", sharding="zero-3", dp=1, methods=moved, loss="chunked"
    )
    assert notches(asked, last) == []


def test_what_is_left_alone_shares_nothing_and_islands_shrink_away() -> None:
    asked = problem()
    made = dict(notches(asked, layout(dp=2)))
    assert made["tp 1 -> 2, dp 2 -> 1"].sharding == "zero-0"
    islands = dict(notches(asked, layout(sharding="zero-3", island=4)))
    assert islands["pp 1 -> 2, dp 8 -> 4"].island is None
    uneven = layout(micro_batches_per_replica=(2, 1, 1, 1, 1, 1, 1, 0))
    assert dict(notches(asked, uneven))["micro-batch size 4 -> 2"].micro_batches_per_replica == (
        4, 2, 2, 2, 2, 2, 2, 0,
    )  # fmt: skip


def test_tensor_ranks_stay_on_a_node() -> None:
    words = [name for name, _ in notches(problem("2xa100-80gb"), layout(tp=2))]
    assert not any(name.startswith("tp") for name in words)


def test_what_no_notch_makes_fit_has_no_answer() -> None:
    huge = problem_of(model="gpt3-175b", on="8xa100-80gb", global_batch=32, precision="bf16")
    assert SmallestChanges(huge).of(layout()) is None


def test_only_rejected_rows_that_are_shown_are_asked() -> None:
    asked = problem()
    rows = tuple(judged(asked, one) for one in (layout(micro_batch_size=1, recompute="full"), *ROWS))
    shown = advised(Ranking(problem=asked, candidates=rows), 3)
    assert [one.candidate for one in shown] == list(rows[:3])
    for one in shown:
        assert (one.smallest_change is None) or one.candidate.verdict is Verdict.TOO_BIG
    assert any(one.smallest_change is not None for one in shown)


def test_a_job_that_does_not_fit_is_told_what_would() -> None:
    pins = {"dp": 8, "pp": 1, "tp": 1, "sharding": "zero-3", "recompute": "none", "micro_batch_size": 4}
    run = run_of_keywords(
        model="llama-7b", on="8xa100-80gb", global_batch=64, sequence=None, precision="bf16", pins=pins
    )
    with pytest.raises(InputError, match=r"; fits with .* -> .*: a step of \d"):
        plan_run(run)


def test_it_may_be_to_recompute_in_the_first_stages_alone() -> None:
    """The first stage of a pipeline under 1f1b keeps the most micro-batches."""
    asked = problem("4xa100-40gb")
    keeps = layout(pp=4, dp=1, micro_batch_size=1, sharding="zero-0")
    assert judged(asked, keeps).verdict is Verdict.TOO_BIG
    change = SmallestChanges(asked).of(keeps)
    assert change is not None
    assert change.words == "recompute none -> selective in the first stage of 4"
    assert change.candidate.layout.recomputes == ("selective", "none", "none", "none")
    assert change.step_s < judged(asked, keeps.recomputing("selective")).step_s


def test_of_many_stages_the_first_are_taken_a_few_at_a_time() -> None:
    deep = layout(pp=4, dp=2, loops=8, schedule="depth-first")
    found = notches(problem(model="llama-13b"), deep)
    partly = [words for words, changed in found if changed.recompute_per_stage is not None]
    first = [words for words in partly if words.startswith("recompute none -> selective")]
    assert first[0] == "recompute none -> selective in the first 2 stages of 32"
    assert len(first) == 15
