"""Laws: sums of counts lie between passes and cost what they send; plans with other counts are refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from described_decoders import described
from hypothesis import given
from hypothesis import strategies as st
from program.mutations import twice, without_edge, without_row

from weft.describe.added_layers import trained_graph
from weft.describe.layout import Layout, PartialLayout
from weft.describe.models import resolve_model
from weft.describe.plan import Choice, Plan
from weft.describe.plan_file import check_plan
from weft.describe.reading import parse_toml
from weft.describe.run_file import parse_run
from weft.describe.run_tables.methods import requested_methods
from weft.errors import InputError
from weft.methods.expert_balance.coverage import coverage
from weft.methods.expert_balance.kinds import EXPERT_COUNTS, EXPERT_LOADS
from weft.methods.expert_balance.options import read_options
from weft.methods.expert_balance.program import mixtures
from weft.methods.expert_balance.report import SECTION
from weft.methods.expert_balance.rules import FORWARD_FIRST
from weft.moves.layout import build_plan, refuse
from weft.planning.compile import compile_evaluation, compile_plan
from weft.planning.planners import get_planner
from weft.planning.planners.space import layouts
from weft.planning.problem import Problem, problem_of
from weft.predict.cost.network import Network
from weft.predict.cost.placed_plan import CostModel
from weft.predict.cost.price import price
from weft.program.kinds import FORWARD, STEP
from weft.program.program import NONE, Program
from weft.program.schedules import get_schedule
from weft.program.schedules.base import Pipeline
from weft.program.verify import require_valid, verify

EXPERTS, BLOCKS = 8, 4
BASE = Layout(pp=2, dp=2, loops=1, micro_batch_size=2, schedule="gpipe")
RUN = """
[model]
preset = "mixtral-1m"
[task]
sequence = 16
data = "text.txt"
[train]
global_batch = 8
steps = 2
[experts]
{keys}
"""


def balance(**keys: Any) -> Choice:
    return Choice(name="expert-balance", options={"balance": "global-batch", **keys})


BUFFER = balance(balance="buffer", samples=2, replicas=2)


@pytest.fixture(scope="module")
def problem(tmp_path_factory: pytest.TempPathFactory) -> Problem:
    folder = tmp_path_factory.mktemp("mixture")
    described(folder, "mixtral", num_local_experts=EXPERTS)
    return problem_of(model=str(folder), on="8xa100-40gb", global_batch=16)


def asking(problem: Problem, choice: Choice) -> Problem:
    """The problem of a job that asks for the balance."""
    graph = trained_graph(problem.model, [choice])
    return replace(problem, job=replace(problem.job, graph=graph, methods=(choice,)))


def plan_of(problem: Problem, choice: Choice, layout: Layout = BASE) -> Plan:
    job = asking(problem, choice).job
    return build_plan(job, layout, [1.0] * len(job.graph.layers))


def program_of(problem: Problem, choice: Choice, layout: Layout = BASE) -> Program:
    return compile_plan(plan_of(problem, choice, layout), asking(problem, choice).job.graph)


@pytest.mark.parametrize(
    ("choice", "schedule", "sums"),
    [
        (balance(), "gpipe", 1),
        (balance(), "breadth-first", 1),
        (BUFFER, "1f1b", 4),
        (BUFFER, "zb-h1", 4),
        (balance(balance="synchronised", samples=2, replicas=2), "gpipe", 4),
        (balance(balance="sequence"), "1f1b", 0),
        (balance(balance="none", z_weight=0.1), "zb-h1", 0),
    ],
)
def test_programs_are_proven_and_have_as_many_sums(
    problem: Problem, choice: Choice, schedule: str, sums: int
) -> None:
    layout = replace(BASE, schedule=schedule, loops=2 if schedule == "breadth-first" else 1)
    program = program_of(problem, choice, layout)
    require_valid(program)
    columns = program.columns
    rows = np.flatnonzero(columns.kind == EXPERT_COUNTS)
    stages = {int(stage) for stage in columns.stage[columns.kind == FORWARD]}
    holding = {stage for stage in stages if _mixtures_in(problem, layout, choice, stage)}
    assert len(rows) == sums * layout.dp * len(holding)
    assert set(columns.stage[rows].tolist()) == (holding if sums else set())
    assert (columns.kind == EXPERT_LOADS).sum() == layout.pp * layout.dp


def _mixtures_in(problem: Problem, layout: Layout, choice: Choice, stage: int) -> int:
    plan = plan_of(problem, choice, layout)
    return len(set(mixtures(problem.job.graph)) & set(plan.stages[stage].layers))


def test_a_sum_sends_a_number_for_each_expert_over_all_ranks_of_its_stage(problem: Problem) -> None:
    choice = balance()
    program, plan = program_of(problem, choice), plan_of(problem, choice)
    columns, graph = program.columns, asking(problem, choice).job.graph
    for row in np.flatnonzero(columns.kind == EXPERT_COUNTS).tolist():
        stage = int(columns.stage[row])
        assert columns.bytes[row] == 8 * EXPERTS * _mixtures_in(problem, BASE, choice, stage)
        ranks = {rank for one in plan.stages[stage].replicas for rank in one.ranks}
        assert set(program.groups[columns.group[row]]) == ranks
    model = CostModel(graph=graph, cluster=problem.job.cluster)
    costs = price(model, program, plan).costs
    row = int(np.flatnonzero(columns.kind == EXPERT_COUNTS)[0])
    ranks = program.groups[columns.group[row]]
    alone_s = Network(cluster=problem.job.cluster).all_reduce_s(ranks, int(columns.bytes[row]))
    assert costs.occupancy[row] * 1e-9 == pytest.approx(alone_s, rel=1e-3)


def test_layers_with_experts_pay_for_scores_alone(problem: Problem) -> None:
    before, after = problem.job.graph, asking(problem, balance()).job.graph
    assert before.fingerprint != after.fingerprint
    changed = [
        place
        for place, pair in enumerate(zip(before.layers, after.layers, strict=True))
        if pair[0] != pair[1]
    ]
    assert changed == [*mixtures(before)] == [1, 2, 3, 4]


@pytest.mark.parametrize(("choice", "schedule"), [(balance(), "gpipe"), (BUFFER, "1f1b")])
def test_every_edge_of_a_sum_is_needed(problem: Problem, choice: Choice, schedule: str) -> None:
    program = program_of(problem, choice, replace(BASE, schedule=schedule))
    row = int(np.flatnonzero(program.columns.kind == EXPERT_COUNTS)[0])
    edges = program.edges
    touching = np.flatnonzero((edges.source == row) | (edges.target == row)).tolist()
    assert len(touching) == (8 if schedule == "gpipe" else 2)
    for edge in touching:
        problems = [str(one) for one in verify(without_edge(program, edge))]
        assert any("'expert_" in one for one in problems), edge
    for broken in (twice(program, row), without_row(program, row)):
        assert any("'expert_" in str(one) for one in verify(broken))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "chimera"])
def test_every_step_that_changes_biases_waits_for_the_loads(tmp_path: Path, schedule: str) -> None:
    described(tmp_path, "glm4_moe", n_routed_experts=EXPERTS)
    own = problem_of(model=str(tmp_path), on="8xa100-40gb", global_batch=16)
    layout = replace(BASE, schedule=schedule, dp=1 if schedule == "chimera" else 2)
    for rate in (0.0, 0.001):
        program = program_of(own, balance(balance="none", bias_rate=rate), layout)
        require_valid(program)
        columns, edges = program.columns, program.edges
        awaited = np.flatnonzero(
            (columns.kind[edges.source] == EXPERT_LOADS) & (columns.kind[edges.target] == STEP)
        ).tolist()
        steps = int((columns.kind == STEP).sum())
        assert len(awaited) == (steps if rate else 0)
        for edge in awaited:
            problems = [str(one) for one in verify(without_edge(program, edge))]
            assert any("'expert_loads'" in one for one in problems), edge


def test_a_bias_that_routers_do_not_have_is_refused(problem: Problem) -> None:
    with pytest.raises(InputError) as caught:
        asking(problem, balance(bias_rate=0.001))
    [violation] = caught.value.violations
    assert str(violation) == (
        "experts.bias_rate: 0.001; routers of mixtral have no bias for the choice of experts "
        "(nearest valid: 0)"
    )


def test_a_backward_pass_before_the_sum_is_refused(problem: Problem) -> None:
    """Of an order that goes back early, whatever the rules say."""
    plan = plan_of(problem, balance())
    early = plan.model_copy(update={"schedule": Choice(name="1f1b")})
    program = compile_plan(early, asking(problem, balance()).job.graph)
    problems = [str(one) for one in verify(program)]
    assert any("'expert_counts'" in one for one in problems), problems


def test_an_evaluation_counts_nothing(problem: Problem) -> None:
    plan = plan_of(problem, balance())
    program = compile_evaluation(plan, asking(problem, balance()).job.graph)
    require_valid(program)
    assert not np.isin(program.columns.kind, [EXPERT_COUNTS, EXPERT_LOADS]).any()


@pytest.mark.parametrize(
    ("choice", "changes", "reason"),
    [
        (balance(), {"schedule": "1f1b"}, "1f1b goes back before a stage has counted all micro-batches"),
        # Of four micro-batches, two stages have counted 2, 3, 4, 4 and 1, 2, 3, 4.
        (balance(), {"schedule": "1f1b"}, "the first time after 25% of them, in the mean after 72%"),
        (balance(), {"schedule": "zb-h1"}, "or experts.balance: buffer"),
        (
            balance(),
            {"sync": "local-averaging"},
            "replicas step by themselves, and would be balanced together",
        ),
        (
            BUFFER,
            {"micro_batch_size": 4},
            "micro_batch_size: 4; balance buffer is of micro-batches of 2 samples",
        ),
        (BUFFER, {"dp": 4}, "dp: 4 replicas; balance buffer is of 2"),
        (
            balance(capacity=1.0),
            {"cp": 2, "dp": 1},
            "experts.capacity: a capacity counts the tokens of whole",
        ),
        (BUFFER, {"micro_batches_per_replica": (3, 5)}, "balance buffer needs equal shares of replicas"),
        (
            balance(balance="micro-batch", samples=4),
            {},
            "ranks run 2 samples at once, and the balance counts 4 together",
        ),
        (balance(samples=2, micro_weight=0.1), {"ep": 2, "dp": 1}, "ranks run 1 samples at once"),
        (
            balance(balance="buffer", samples=2, replicas=1, micro_weight=0.1),
            {"ep": 2, "dp": 1},
            "ranks run 1 samples at once",
        ),
    ],
)
def test_plans_that_would_count_other_tokens_are_refused(
    problem: Problem, choice: Choice, changes: dict[str, Any], reason: str
) -> None:
    job, layout = asking(problem, choice).job, replace(BASE, **changes)
    found = refuse(job, layout)
    assert found is not None
    assert reason in found
    assert "\n" not in found


@pytest.mark.parametrize(
    ("choice", "changes"),
    [
        # One micro-batch of each replica is all of the step.
        (balance(), {"schedule": "1f1b", "micro_batch_size": 8}),
        (balance(balance="micro-batch", samples=2), {"schedule": "1f1b", "micro_batch_size": 4}),
        (balance(), {"ep": 2, "dp": 1}),
    ],
)
def test_plans_that_count_the_same_tokens_are_not(
    problem: Problem, choice: Choice, changes: dict[str, Any]
) -> None:
    asked, layout = asking(problem, choice), replace(BASE, **changes)
    assert refuse(asked.job, layout) is None
    plan = plan_of(problem, choice, layout)
    assert check_plan(plan, asked.job.graph, asked.job.cluster) == []


@given(micro_batches=st.integers(1, 24), devices=st.integers(1, 6), name=st.sampled_from(["1f1b", "zb-h1"]))
def test_early_orders_count_as_far_as_their_warm_up(micro_batches: int, devices: int, name: str) -> None:
    pipeline = Pipeline(devices, devices, micro_batches)
    schedule = get_schedule(name)
    if schedule.refuse(pipeline, {}) is not None:
        return
    shares = coverage(schedule, pipeline, {})
    expected = [
        min(micro_batches, place + devices - stage) / micro_batches
        for stage in range(devices)
        for place in range(micro_batches)
    ]
    assert sorted(shares) == pytest.approx(sorted(expected))


@pytest.mark.parametrize("name", FORWARD_FIRST)
def test_orders_that_go_forward_first_have_counted_all(name: str) -> None:
    assert set(coverage(get_schedule(name), Pipeline(4, 4, 8), {})) == {1.0}


def test_planners_try_orders_that_count_in_time(problem: Problem) -> None:
    asked, batch = asking(problem, balance()), problem.job.global_batch
    found = [one for one in layouts(asked) if refuse(asked.job, one) is None]
    several = {one.schedule for one in found if one.dp * one.micro_batch_size < batch}
    # Each of its two paths has one micro-batch.
    assert several - {"chimera"} == {"gpipe", "breadth-first"}
    assert len({one.schedule for one in found}) > 2
    # Also on devices with one stage, where all other jobs need no such order.
    assert any(one.pp == 1 and one.dp * one.micro_batch_size < batch for one in found)
    assert not any(one.pp == 1 and one.schedule == "gpipe" for one in layouts(problem))


def test_unlike_devices_run_orders_that_count_in_time(tmp_path: Path) -> None:
    described(tmp_path, "mixtral", num_local_experts=EXPERTS)
    pins = PartialLayout(pp=1, dp=2, micro_batch_size=2)
    asked = problem_of(
        model=str(tmp_path), on="1xa100-40gb+1xv100-32gb", global_batch=16, methods=(balance(),), pins=pins
    )
    best = get_planner("weft").search(asked).fitting[0]
    assert best.layout is not None
    assert best.layout.schedule in FORWARD_FIRST


def test_plans_edited_by_hand_are_refused(problem: Problem) -> None:
    asked, plan = asking(problem, BUFFER), plan_of(problem, BUFFER, replace(BASE, schedule="1f1b"))
    assert check_plan(plan, asked.job.graph, asked.job.cluster) == []
    edits: dict[str, dict[str, object]] = {
        "early": {"methods": (balance(),)},
        "other samples": {"methods": (balance(balance="buffer", samples=4, replicas=2),)},
        "unknown": {"methods": (balance(balance="everything"),)},
        "apart": {"sync": Choice(name="local-averaging")},
    }
    for name, update in edits.items():
        assert check_plan(plan.model_copy(update=update), asked.job.graph, asked.job.cluster), name


def test_a_dense_model_has_nothing_to_balance() -> None:
    dense = problem_of(model="llama-1m", on="8xa100-40gb", global_batch=16)
    with pytest.raises(InputError) as caught:
        asking(dense, balance())
    [violation] = caught.value.violations
    assert str(violation) == ("experts.balance: llama-1m has no experts (nearest valid: leave out [experts])")


def test_the_table_of_the_run_file_is_the_method_of_the_plan() -> None:
    keys = 'balance = "buffer"\nsamples = 2\nreplicas = 1\nweight = 0.5'
    run = parse_run(parse_toml(RUN.format(keys=keys), "run"))
    [choice] = requested_methods(run.methods, resolve_model("gpt-1m"))
    assert choice.name == "expert-balance"
    table = read_options(choice)
    assert (table.balance, table.samples, table.replicas) == ("buffer", 2, 1)
    assert (table.shared_weight, table.local_weight, table.counts) == (0.5, 0.0, True)


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ('balance = "buffer"', "experts: samples: missing"),
        ('balance = "buffer"\nsamples = 2', "experts: replicas: missing"),
        ("replicas = 2", "experts: replicas: 2; balance is 'global-batch'"),
        ("samples = 2", "experts: samples: 2; balance 'global-batch' counts no micro-batches"),
        ('balance = "sequence"\nmicro_weight = 0.1\nsamples = 1', "experts: micro_weight: 0.1"),
        ('balance = "none"\nweight = 0.1', 'experts: weight: 0.1; balance is "none"'),
        ("weight = -1.0", "experts: weight: -1.0"),
        ("capacity = 0", "experts: capacity: 0"),
        ("variation = -0.1", "experts: variation: -0.1"),
        ('balance = "global"', "nearest valid: global-batch"),
    ],
)
def test_keys_that_do_not_go_together_are_refused(keys: str, reason: str) -> None:
    with pytest.raises(InputError, match="experts") as caught:
        parse_run(parse_toml(RUN.format(keys=keys), "run"))
    assert reason in str(caught.value)


def test_the_report_names_the_most_unequal_layers(problem: Problem) -> None:
    even, odd = [4.0] * EXPERTS, [0.0, 16.0, *[16.0 / 6] * 6]
    numbers = {"balance_loss": 1.5, "expert_violation": 3.0, "expert_variation": 0.5}
    metrics = [
        {"step": step, "loss": 1.0, **numbers, "expert_loads": [*even, *even, *odd, *even]}
        for step in range(20)
    ]
    plan = plan_of(problem, balance())
    planned: Any = SimpleNamespace(plan=plan, problem=problem)
    rows = dict(SECTION.rows(planned, json.loads(json.dumps(metrics))))
    assert rows["counted over"] == "global-batch"
    assert rows["violation"] == "3 in step 0, 3 in step 19"
    name, text = list(rows.items())[4]
    assert name == "block.2, last 2 steps"
    assert text == "expert 1 has 4.00 times the mean, expert 0 0.00 times"
    chart = SECTION.chart(planned, metrics)
    assert chart is not None
    assert [line.name for line in chart.curves] == ["violation", "variation"]
    assert SECTION.rows(planned, [{"step": 0, "loss": 1.0}]) == []
    full = [{**row, "dropped_choices": share} for row, share in zip(metrics[-2:], (0.02, 0.04), strict=True)]
    lost = dict(SECTION.rows(planned, [*metrics[:-2], *full]))["choices beyond the capacity"]
    assert lost == "3.00% lose their expert"


def test_the_report_tells_which_experts_belong_to_a_source(problem: Problem) -> None:
    layers = problem.model.layers
    own, other = [0.8, 0.6, *[0.1] * 6], [0.1, 0.6, 0.8, *[0.1] * 5]
    sources: dict[str, Any] = {
        "code": {"loss": 1.0, "experts": [{"rates": own, "chosen_scores": 0.7}] * layers},
        "prose": {"loss": 2.0, "experts": [{"rates": other, "chosen_scores": 0.5}] * layers},
    }
    planned: Any = SimpleNamespace(plan=plan_of(problem, balance()), problem=problem)
    rows = dict(SECTION.by_source(planned, sources))
    chance = "chosen by at least 50.0% of tokens, by chance 25.0%"
    assert rows["experts of code"] == f"2.0 of 8 {chance}; scores of the chosen 0.700"
    # Both use expert 1.
    assert rows["experts of code and prose"] == "33.3% of those of either"
    # Two of eight experts are chosen by 80 % and 10 %.
    text = "0.087 standard deviation, mean of all experts"
    assert rows["share of tokens for an expert, by source"] == text
    assert rows["block.0, most chosen"] == "code: expert 0 by 80.0%; prose: expert 2 by 80.0%"
    # Older records have no slack.
    assert "slack between sources" not in rows
    for one, apart in zip(sources.values(), (1.5, 1.25), strict=True):
        [layer] = {id(layer): layer for layer in one["experts"]}.values()
        scores = [rate / 2 for rate in layer["rates"]]
        layer.update(scores=scores, balance=1.2, balance_of_samples=apart, slack=apart - 1.2)
    rows = dict(SECTION.by_source(planned, sources))
    assert rows["balance loss of code"] == "1.5000 by sample, 1.2000 together: slack 0.3000"
    assert rows["balance loss of prose"] == "1.2500 by sample, 1.2000 together: slack 0.0500"
    # f and P are half of the rates, and differ by 0.35 from their mean for two of eight experts.
    expected = 8 * 2 * (0.35 / 2) ** 2
    assert rows["slack between sources"] == f"{expected:.4f} of a balance loss, mean of layers"
    nothing = {name: {"loss": one["loss"]} for name, one in sources.items()}
    assert list(SECTION.by_source(planned, nothing)) == []


def test_a_sum_without_a_part_is_of_the_whole_step(problem: Problem) -> None:
    program = program_of(problem, balance())
    assert set(program.columns.part[program.columns.kind == EXPERT_COUNTS].tolist()) == {NONE}
    by_index = program_of(problem, BUFFER).columns
    assert set(by_index.part[by_index.kind == EXPERT_COUNTS].tolist()) == {0, 1, 2, 3}
