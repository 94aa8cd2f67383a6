"""`[sync] method = "auto"`: the fastest method within the contract, and never a slower plan than dense."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.describe.cluster import Link
from weft.describe.cluster_file import parse_cluster
from weft.describe.contract import Contract
from weft.describe.device import RESERVE_BYTES
from weft.describe.layout import OPEN, Layout, PartialLayout
from weft.describe.plan import Choice
from weft.describe.plan_subject import subject_of
from weft.describe.run_file import RunFile, parse_run
from weft.describe.synchronisation import AUTO, keeps_gradients_local
from weft.errors import InputError
from weft.moves.layout import build_plan
from weft.moves.registry import sync_contracts
from weft.planning.long_steps import predict_long
from weft.planning.planned import plan_run, planned_for, searched_densely
from weft.planning.planners import Candidate, Ranking, Verdict
from weft.planning.planners.homogeneous import UniformPlanner
from weft.planning.problem import Problem, problem_of
from weft.planning.synchronisations import (
    Synchronised,
    decided_sync,
    in_sync,
    merged,
    synchronised_in_each,
)
from weft.planning.ties import break_ties

# One runner searches for all of them.
pytestmark = pytest.mark.xdist_group("synchronisations")

CLUSTER = """
name = "two-nodes"
[[node]]
name = "a"
count = 2
device = "a100-80gb"
devices = 2
[[link]]
between = ["a", "a"]
bandwidth = "1 Gbit/s"
latency = "30 us"
"""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_HOME", str(tmp_path))
    (tmp_path / "cluster.toml").write_text(CLUSTER)


def run_file(tmp_path: Path, contract: str = "empirical", **tables: Any) -> RunFile:
    """A small model on two nodes with a slow link, planned by degrees alone."""
    record = {
        "model": {"preset": "gpt-1m"},
        "task": {"sequence": 128},
        "train": {"global_batch": 16},
        "cluster": {"use": str(tmp_path / "cluster.toml")},
        "goal": {"contract": contract},
        "plan": {"planner": "uniform"},
        "sync": {"method": AUTO},
    }
    return parse_run(record | tables)


@cache
def dense_ranking(bytes_per_s: float, pins: PartialLayout = OPEN) -> Ranking:
    """The search by degrees on four devices of two nodes, joined by such a link."""
    cluster = parse_cluster("4xa100-80gb")
    (group,) = cluster.groups
    nodes = replace(group, count=2, devices=2)
    link = {(group.name, group.name): Link(bytes_per_s, 3e-5)}
    problem = problem_of(model="gpt-1m", on="4xa100-80gb", global_batch=16, pins=pins)
    problem = replace(
        problem, job=replace(problem.job, cluster=replace(cluster, groups=(nodes,), links=link))
    )
    return break_ties(UniformPlanner().search(problem))


def in_each(ranking: Ranking, asked: Choice | None = None) -> tuple[Synchronised, ...]:
    return synchronised_in_each(ranking, 200, asked)


@cache
def with_any_method(
    bytes_per_s: float, pins: PartialLayout = OPEN, contract: Contract = Contract.EMPIRICAL
) -> tuple[Synchronised, ...]:
    return in_each(within(dense_ranking(bytes_per_s, pins), contract))


def within(ranking: Ranking, contract: Contract) -> Ranking:
    return replace(ranking, problem=replace(ranking.problem, contract=contract))


@settings(max_examples=12)
@given(st.sampled_from([1e7, 1e8, 1e9, 1e10]), st.sampled_from(Contract))
def test_auto_keeps_the_contract_and_is_never_slower_than_dense(
    bytes_per_s: float, contract: Contract
) -> None:
    ranking = within(dense_ranking(bytes_per_s), contract)
    found = with_any_method(bytes_per_s, contract=contract)
    assert all(one.contract <= contract for one in found if one.candidate is not None)
    assert {one.sync.name for one in found} == set(sync_contracts())
    assert all(one.reason for one in found if not one.fits)
    best = merged(ranking, found).fitting[0]
    dense_wins = found[0].sync.name == "dense"
    assert best == (ranking.fitting[0] if dense_wins else found[0].candidate)
    assert best.step_s <= ranking.fitting[0].step_s
    if contract is Contract.EXACT:
        assert best == ranking.fitting[0]
    fitting = [one for one in found if one.fits and one.candidate is not None]
    dense = [one.sync.name for one in fitting].index("dense")
    # Those not likely to beat dense follow it, also with a slightly shorter step.
    for some in (fitting[: dense + 1], fitting[dense + 1 :]):
        values = [one.candidate.step_s for one in some if one.candidate is not None]
        assert values == sorted(values)


def test_dense_candidates_keep_their_order_among_methods() -> None:
    ranking = within(dense_ranking(1e8), Contract.EMPIRICAL)
    found = with_any_method(1e8)
    mixed = merged(ranking, found)
    assert [one for one in mixed.candidates if one.chain.sync == "dense"] == list(ranking.candidates)
    others = [one for one in mixed.fitting if one.chain.sync != "dense"]
    assert len(others) == len({one.sync.name for one in found if one.fits}) - 1
    assert all("of dense's step" in one.reason for one in others)


@settings(max_examples=15)
@given(st.floats(1e7, 1e11), st.floats(1.0, 100.0), st.integers(1, 4), st.sampled_from(["zero-1", "zero-2"]))
def test_a_faster_link_never_lets_few_bits_overtake_dense_sums(
    bytes_per_s: float, factor: float, loops: int, sharding: Any
) -> None:
    schedule = "depth-first" if loops > 1 else "1f1b"
    layout = Layout(pp=1, dp=4, loops=loops, micro_batch_size=2, schedule=schedule, sharding=sharding)
    slow, fast = (
        [predicted_s(speed, replace(layout, sync=name)) for name in ("dense", "sdp4bit")]
        for speed in (bytes_per_s, factor * bytes_per_s)
    )
    # Times are whole nanoseconds.
    assert slow[0] > slow[1] or fast[0] <= fast[1] + 1e-8
    assert fast[0] <= slow[0] + 1e-8
    assert fast[1] <= slow[1] + 1e-8


def predicted_s(bytes_per_s: float, layout: Layout) -> float:
    problem = with_link(bytes_per_s)
    weights = [1.0] * len(problem.job.graph.layers)
    return predict_long(problem.cost_model, build_plan(problem.job, layout, weights)).prediction.step_s


def with_link(bytes_per_s: float) -> Problem:
    problem = dense_ranking(1e8).problem
    links = dict.fromkeys(problem.job.cluster.links, Link(bytes_per_s, 3e-5))
    return replace(problem, job=replace(problem.job, cluster=replace(problem.job.cluster, links=links)))


def test_rules_among_tied_dense_plans_give_no_other_method_the_first_place() -> None:
    ranking = within(dense_ranking(1e8), Contract.EMPIRICAL)
    slower, faster = sorted(ranking.fitting, key=lambda one: -one.step_s)[:2]
    ranking = replace(ranking, candidates=(slower, faster))
    prediction = faster.prediction
    assert prediction is not None
    assert faster.step_s < slower.step_s
    between = (faster.step_s + slower.step_s) / 2
    other = replace(faster, prediction=prediction.model_copy(update={"step_s": between}))
    found = Synchronised(sync=Choice(name="other"), contract=Contract.EXACT, candidate=other)
    assert merged(ranking, [found]).fitting == [slower, faster, other]


def test_a_method_gets_the_sharding_that_it_needs_or_the_reason_why_it_cannot() -> None:
    found = with_any_method(1e7)
    for one in found:
        assert one.candidate is not None
        assert one.sync.name != "sdp4bit" or one.candidate.chain.sharding != "zero-0"
        assert one.sync.name != "local-averaging" or one.candidate.chain.sharding == "zero-0"
    pinned = with_any_method(1e7, PartialLayout(sharding="zero-3"))
    by_words = {str(one.sync.options.get("weights")): one for one in pinned if one.sync.name == "sdp4bit"}
    assert by_words["whole"].fits
    assert "no whole weights" in by_words["None"].reason
    apart = next(one for one in pinned if one.sync.name == "local-averaging")
    assert apart.candidate is None
    assert "zero-3: replicas that step by themselves share nothing out" in apart.reason


def test_one_replica_is_a_reason() -> None:
    found = with_any_method(1e7, PartialLayout(dp=1))
    assert found[0].sync.name == "dense"
    assert {one.reason for one in found[1:]} == {"no layout of the search has several replicas"}


def test_a_given_choice_is_one_more_proposal() -> None:
    asked = Choice(name="local-averaging", options={"every": 5})
    found = in_each(within(dense_ranking(1e7), Contract.EMPIRICAL), asked)
    assert sum(one.sync == asked for one in found) == 1


def test_the_chosen_method_is_in_plan_and_run_as_if_it_had_been_asked_for(tmp_path: Path) -> None:
    run = run_file(tmp_path)
    auto, dense = plan_run(run), searched_densely(run)
    assert auto.prediction.step_s < dense.prediction.step_s
    assert auto.run.sync.method == auto.plan.sync.name == auto.problem.sync != "dense"
    assert auto.ranking is not None
    best = auto.ranking.fitting[0]
    assert best.plan == auto.plan
    again = planned_for(subject_of(auto.run), auto.plan)
    assert again.problem.job.sync_options == auto.problem.job.sync_options == best.chain.sync_options
    assert (
        build_plan(again.problem.job, replace(best.chain, sync_options={}), [1.0] * 6).sync == auto.plan.sync
    )
    assert planned_for(subject_of(run), auto.plan).run.sync == auto.run.sync
    told = auto.problem.assumed["sync"]
    assert "the best of auto" in told
    assert "dense: " in told


def test_exact_means_dense(tmp_path: Path) -> None:
    run = run_file(tmp_path, "exact")
    auto, dense = plan_run(run), searched_densely(run)
    assert auto.plan == dense.plan
    assert auto.run == in_sync(run, Choice(name="dense"))
    assert "sdp4bit: goal.contract 'exact' keeps it out" in auto.problem.assumed["sync"]


def test_a_later_plan_has_the_chosen_method(tmp_path: Path) -> None:
    then = {"planner": "uniform", "then": {"at_step": 10, "micro_batch_size": 2}}
    planned = plan_run(run_file(tmp_path, plan=then))
    assert planned.later is not None
    assert planned.later.job.plan.sync.name == planned.plan.sync.name != "dense"


def test_scaled_losses_refuse_replicas_that_step_apart(tmp_path: Path) -> None:
    planned = plan_run(run_file(tmp_path, train={"global_batch": 16, "precision": "fp16"}))
    assert not keeps_gradients_local(planned.plan.sync)
    assert "no common factor of their losses" in planned.problem.assumed["sync"]


def test_a_step_that_is_hardly_shorter_is_no_reason_to_leave_dense() -> None:
    fast, slow = (with_any_method(bytes_per_s) for bytes_per_s in (1e12, 1e7))
    assert fast[0].sync.name == "dense"
    candidates = [one.candidate for one in fast if one.fits and one.candidate is not None]
    assert min(one.step_s for one in candidates) < candidates[0].step_s
    assert slow[0].sync.name != "dense"


def test_what_is_too_big_recomputes_more() -> None:
    pins = PartialLayout(dp=4, micro_batch_size=4)
    ranking = within(dense_ranking(1e7, pins), Contract.EMPIRICAL)
    each = {one.sync.name: one.candidate for one in with_any_method(1e7, pins) if one.candidate is not None}
    apart = each["local-averaging"]
    (group,) = ranking.problem.job.cluster.groups
    memory = apart.peak_bytes + RESERVE_BYTES - 1
    # A stated reserve has room for communicators.
    device = replace(group.device, memory_bytes=memory, reserve_bytes=RESERVE_BYTES)
    cluster = replace(ranking.problem.job.cluster, groups=(replace(group, device=device),))
    problem = replace(ranking.problem, job=replace(ranking.problem.job, cluster=cluster))
    found = in_each(replace(ranking, problem=problem))
    again = next(one for one in found if one.sync.name == "local-averaging")
    assert again.fits
    assert again.candidate is not None
    assert apart.chain.recompute == "none" != again.candidate.chain.recompute


@pytest.mark.parametrize(
    ("sync", "expected"),
    [
        ({"method": AUTO, "every": 4}, "every: the planner chooses it with 'auto'; leave it out"),
        ({"method": "aut"}, "'aut' is not one of auto, clan, cser, dense"),
    ],
)
def test_a_mistake_is_a_clear_line(tmp_path: Path, sync: dict[str, Any], expected: str) -> None:
    with pytest.raises(InputError) as raised:
        plan_run(run_file(tmp_path, sync=sync))
    (violation,) = raised.value.violations
    assert expected in str(violation)


def test_the_decided_problem_tells_each_method_once() -> None:
    ranking = within(dense_ranking(1e7), Contract.EMPIRICAL)
    found = with_any_method(1e7)
    told = decided_sync(ranking.problem, found).assumed["sync"].partition("(")[2]
    assert [name for name in sync_contracts() if f"{name}: " not in told and f"{name}, " not in told] == []
    assert told.count("dense: ") == 1


def test_where_nothing_fits_a_method_is_shown_on_a_pruned_layout() -> None:
    pins = PartialLayout(dp=4, micro_batch_size=4)
    ranking = within(dense_ranking(1e7, pins), Contract.EMPIRICAL)
    each = {one.sync.name: one.candidate for one in with_any_method(1e7, pins) if one.candidate is not None}
    (group,) = ranking.problem.job.cluster.groups
    memory = each["local-averaging"].peak_bytes + RESERVE_BYTES - 1
    device = replace(group.device, memory_bytes=memory, reserve_bytes=RESERVE_BYTES)
    cluster = replace(ranking.problem.job.cluster, groups=(replace(group, device=device),))
    pins = PartialLayout(recompute="none", dp=4)
    problem = replace(ranking.problem, pins=pins, job=replace(ranking.problem.job, cluster=cluster))
    (kept,) = ranking.fitting
    left_out = Candidate(layout=replace(kept.chain, micro_batch_size=1), verdict=Verdict.PRUNED, reason="")
    found = in_each(replace(ranking, problem=problem, candidates=(kept, left_out)))
    apart = next(one for one in found if one.sync.name == "local-averaging")
    assert apart.fits
    assert apart.candidate is not None
    assert apart.candidate.chain.micro_batch_size == 1


def test_replicas_that_would_never_meet_are_refused(tmp_path: Path) -> None:
    planned = plan_run(run_file(tmp_path, train={"global_batch": 16, "steps": 3}))
    assert not keeps_gradients_local(planned.plan.sync)
    found = synchronised_in_each(within(dense_ranking(1e7), Contract.EMPIRICAL), 9)
    apart = [one for one in found if one.sync.name == "local-averaging"]
    refused = [one.sync.options["every"] for one in apart if "never meet in the 9 steps" in one.reason]
    assert refused == [16, 32]
