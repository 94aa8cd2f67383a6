"""Laws: gradients are taken whole, clipped by all ranks of a replica, and bounded before any is reduced."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from program.mutations import twice, without_edge, without_row

from weft.describe.layout import Layout
from weft.describe.models import resolve_model
from weft.describe.plan import GRADIENT_NORM, Choice, Plan
from weft.describe.plan_file import check_plan
from weft.describe.reading import parse_toml
from weft.describe.run_file import parse_run
from weft.describe.run_tables.methods import requested_methods
from weft.errors import InputError
from weft.methods.micro_batch_clipping.kinds import (
    BOUND_GRADIENT,
    CLIP_GRADIENT,
    CLIP_KINDS,
    TAKE_GRADIENT,
)
from weft.methods.micro_batch_clipping.options import read_options
from weft.methods.micro_batch_clipping.report import SECTION
from weft.moves.layout import build_plan, refuse
from weft.moves.registry import refused_pins
from weft.planning.compile import compile_evaluation, compile_plan
from weft.planning.planners.space import layouts
from weft.planning.problem import Problem, problem_of
from weft.predict.cost.memory import gradient_element_bytes, own_parameters, with_slack
from weft.predict.cost.network import Network
from weft.predict.cost.placed_plan import CostModel
from weft.predict.cost.price import price
from weft.predict.simulator import simulate
from weft.program.kinds import BACKWARD, STEP
from weft.program.program import Program
from weft.program.verify import require_valid, verify

BASE = Layout(pp=2, dp=2, loops=1, micro_batch_size=2, schedule="1f1b")
OWN_KINDS = (TAKE_GRADIENT, CLIP_GRADIENT, BOUND_GRADIENT)
RUN = """
[model]
preset = "llama-1m"
[task]
sequence = 16
data = "text.txt"
[train]
global_batch = 8
steps = 2
[clip]
{keys}
"""


SOURCES_RUN = """
[model]
preset = "gpt-1m"
[task]
sequence = 16
{task}
[train]
global_batch = 8
[clip]
{keys}
"""


def clipping(micro: str = "min", samples: int = 2, **keys: Any) -> Choice:
    return Choice(name="micro-batch-clipping", options={"micro": micro, "samples": samples, **keys})


@pytest.fixture(scope="module")
def problem() -> Problem:
    return problem_of(model="llama-1m", on="8xa100-40gb", global_batch=16)


def asking(problem: Problem, *choices: Choice) -> Problem:
    return replace(problem, job=replace(problem.job, methods=choices))


def plan_of(problem: Problem, choice: Choice, layout: Layout = BASE) -> Plan:
    job = asking(problem, choice).job
    return build_plan(job, layout, [1.0] * len(job.graph.layers))


def program_of(problem: Problem, choice: Choice, layout: Layout = BASE) -> Program:
    return compile_plan(plan_of(problem, choice, layout), problem.job.graph)


@pytest.mark.parametrize("sharding", ["zero-0", "zero-1", "zero-2", "zero-3"])
@pytest.mark.parametrize(
    ("schedule", "samples", "groups"), [("1f1b", 2, 4), ("gpipe", 2, 4), ("1f1b", 4, 2), ("1f1b", 8, 1)]
)
def test_programs_are_proven_and_clip_as_often_as_asked(
    problem: Problem, sharding: Any, schedule: str, samples: int, groups: int
) -> None:
    layout = replace(BASE, sharding=sharding, schedule=schedule, methods=(Choice(name=GRADIENT_NORM),))
    program = program_of(problem, clipping(samples=samples), layout)
    require_valid(program)
    counts = [(program.columns.kind == kind).sum() for kind in OWN_KINDS]
    assert counts == [groups * layout.ranks, groups * layout.ranks, layout.ranks]


def test_norms_are_of_replicas_and_bounds_of_all_ranks(problem: Problem) -> None:
    program, plan = program_of(problem, clipping()), plan_of(problem, clipping())
    columns = program.columns
    for row in np.flatnonzero(columns.kind == CLIP_GRADIENT).tolist():
        replica = int(columns.replica[row])
        ranks = {rank for stage in plan.stages for rank in stage.replicas[replica].ranks}
        assert set(program.groups[columns.group[row]]) == ranks
        assert columns.bytes[row] == 8
    for row in np.flatnonzero(columns.kind == BOUND_GRADIENT).tolist():
        assert set(program.groups[columns.group[row]]) == set(range(plan.ranks))
        assert columns.bytes[row] == 8 * plan.micro_batches


def test_every_edge_of_a_clipped_micro_batch_is_needed(problem: Problem) -> None:
    program = program_of(problem, clipping(samples=4))
    kinds, edges = program.columns.kind, program.edges
    own = np.isin(kinds, OWN_KINDS)
    touching = np.flatnonzero(
        (own[edges.source] | own[edges.target]) & (program.columns.rank[edges.target] == 0)
    )
    assert len(touching) > 8
    for edge in touching.tolist():
        assert verify(without_edge(program, edge)), edge
    for kind in OWN_KINDS:
        row = int(np.flatnonzero(kinds == kind)[0])
        for broken in (twice(program, row), without_row(program, row)):
            assert verify(broken), kind


def test_no_gradient_is_added_before_the_last_one_is_taken(problem: Problem) -> None:
    program = program_of(problem, clipping())
    columns, edges = program.columns, program.edges
    takes = (columns.kind[edges.source] == TAKE_GRADIENT) & (columns.kind[edges.target] == BACKWARD)
    assert takes.sum() == 3 * BASE.ranks
    problems = [str(one) for one in verify(without_edge(program, int(np.flatnonzero(takes)[0])))]
    assert any("'empty_gradient'" in one for one in problems)
    bounded = (columns.kind[edges.source] == BOUND_GRADIENT) & (columns.kind[edges.target] == STEP)
    assert bounded.sum() == BASE.ranks


@pytest.mark.parametrize(
    ("schedule", "pp", "loops"), [("1f1b", 2, 1), ("zb-v", 2, 2), ("breadth-first", 2, 3)]
)
def test_passes_over_gradients_and_their_copies_are_priced(
    problem: Problem, schedule: str, pp: int, loops: int
) -> None:
    graph, choice, layout = problem.job.graph, clipping(), replace(BASE, schedule=schedule, loops=loops)
    model = CostModel(graph=graph, cluster=problem.job.cluster)
    plan, plain = plan_of(problem, choice, layout), build_plan(problem.job, layout, [1.0] * len(graph.layers))
    program = program_of(problem, choice, layout)
    found = price(model, program, plan).costs
    before = price(model, compile_plan(plain, graph), plain).costs
    sums = (found.base_bytes - before.base_bytes).tolist()
    columns = program.columns
    for rank in range(program.ranks):
        mine = [index for index, one in enumerate(plan.stages) if rank in one.replicas[rank % 2].ranks]
        bytes_of = {
            index: gradient_element_bytes(plan)
            * own_parameters(graph, plan.stages[index].layers, plan.shape(index))
            for index in mine
        }
        assert sums[rank] == pytest.approx(with_slack(np.array([sum(bytes_of.values())]))[0], abs=2)
        takes, cuts = (
            np.flatnonzero((columns.kind == kind) & (columns.rank == rank)) for kind in OWN_KINDS[:2]
        )
        for take in takes.tolist():
            size = with_slack(np.array([bytes_of[int(columns.stage[take])]]))[0]
            assert found.live_bytes[take] == size
        freed = set(found.live_bytes[cuts].tolist())
        assert freed == {-sum(with_slack(np.array([one]))[0] for one in bytes_of.values())}
    row = int(np.flatnonzero(columns.kind == CLIP_GRADIENT)[0])
    alone_s = Network(cluster=problem.job.cluster).all_reduce_s(program.groups[columns.group[row]], 8)
    assert found.occupancy[row] * 1e-9 > alone_s
    assert found.occupancy[int(np.flatnonzero(columns.kind == TAKE_GRADIENT)[0])] > 0
    assert found.live_bytes.sum() == 0


def test_norms_of_stages_cost_no_meeting_of_the_pipeline(problem: Problem) -> None:
    """They are known at once, so no gradient waits; the model's norm crosses the pipeline."""
    choice = clipping(scope="stage", layers_per_stage="3,3")
    layout = replace(BASE, dp=1, layers_per_stage=(3, 3))
    model = CostModel(graph=problem.job.graph, cluster=problem.job.cluster)
    taken = []
    for one in (choice, clipping()):
        plan, program = plan_of(problem, one, layout), program_of(problem, one, layout)
        require_valid(program)
        costs = price(model, program, plan).costs
        rows = np.flatnonzero(np.isin(program.columns.kind, CLIP_KINDS))
        taken.append(costs.occupancy[rows].sum())
        assert costs.live_bytes.sum() == 0
    program = program_of(problem, choice, layout)
    assert taken[0] < taken[1]
    assert program.obligations.methods["micro-batch-clipping"].facts["clipped by the norm of"] == "each stage"
    kinds = program.columns.kind
    assert {len(program.groups[group]) for group in program.columns.group[np.isin(kinds, CLIP_KINDS)]} == {1}


def test_norms_of_stages_are_declared_as_empirical() -> None:
    keys = 'samples = 2\nscope = "stage"\nlayers_per_stage = [3, 3]'
    run = parse_run(parse_toml(RUN.format(keys=keys), "run.toml"))
    [problem] = refused_pins(run)
    assert str(problem.problem) == "'exact' keeps out [clip], which is empirical"
    assert refused_pins(parse_run(parse_toml(RUN.format(keys="samples = 2"), "run.toml"))) == []
    [choice] = requested_methods(run.methods, resolve_model("gpt-1m"))
    assert choice.options["layers_per_stage"] == "3,3"
    assert read_options(choice).layers_per_stage == (3, 3)


def test_stages_that_wait_for_each_other_hold_more_gradients(problem: Problem) -> None:
    """Breadth-first knows no norm before its first stages go back; 1F1B knows one after each turn."""
    graph, model = problem.job.graph, CostModel(graph=problem.job.graph, cluster=problem.job.cluster)
    most = []
    for layout in (BASE, replace(BASE, schedule="breadth-first", loops=2)):
        plan, program = plan_of(problem, clipping(), layout), program_of(problem, clipping(), layout)
        costs = price(model, program, plan).costs
        own = np.isin(program.columns.kind, OWN_KINDS)
        only = replace(costs, live_bytes=np.where(own, costs.live_bytes, 0), base_bytes=0 * costs.base_bytes)
        peaks = simulate(program, replace(only, working_bytes=None)).peak_bytes
        stage = gradient_element_bytes(plan) * graph.parameters() / len(plan.stages)
        most.append(max(peaks) / stage)
    assert most[0] < 3 < 4 < most[1]


def test_an_evaluation_clips_nothing(problem: Problem) -> None:
    program = compile_evaluation(plan_of(problem, clipping()), problem.job.graph)
    require_valid(program)
    assert not np.isin(program.columns.kind, OWN_KINDS).any()


@pytest.mark.parametrize(
    ("choice", "changes", "reason"),
    [
        (clipping(), {"schedule": "chimera"}, "chimera is not one of 1f1b, graph-1f1b, gpipe, depth-first"),
        (
            clipping(),
            {"schedule": "breadth-first", "loops": 3, "sharding": "zero-2"},
            "stages take turns in two buffers of gradients, which are needed to the end of a step; "
            "nearest sharding: zero-1",
        ),
        (clipping(), {"micro_batch_size": 4}, "micro-batches of 4 samples are no parts of clipped ones of 2"),
        (
            clipping(scope="stage", layers_per_stage="2,4"),
            {},
            "clip: layers_per_stage: a balanced cut: norms are of stages of 2+4 layers; "
            "nearest layers_per_stage: [2, 4]",
        ),
        (
            clipping(scope="stage", layers_per_stage="2,4"),
            {"layers_per_stage": (3, 3)},
            "stages of 3+3 layers: norms are of stages of 2+4 layers",
        ),
        (clipping(samples=16), {}, "4 micro-batches of a replica are no whole groups of 8"),
        (clipping(), {"micro_batches_per_replica": (3, 5)}, "replicas with unlike shares of the batch"),
        (clipping(), {"sync": "local-averaging"}, "nearest sync: dense"),
    ],
)
def test_plans_that_cannot_clip_are_refused(
    problem: Problem, choice: Choice, changes: dict[str, Any], reason: str
) -> None:
    job, layout = asking(problem, choice).job, replace(BASE, **changes)
    found = refuse(job, layout)
    assert found is not None
    assert reason in found
    assert "\n" not in found


def test_plans_edited_by_hand_are_refused(problem: Problem) -> None:
    job, plan = problem.job, plan_of(problem, clipping())
    assert check_plan(plan, job.graph, job.cluster) == []
    edits: dict[str, dict[str, object]] = {
        "other samples": {"methods": (clipping(samples=3),)},
        "unknown": {"methods": (clipping("most"),)},
        "two paths": {"schedule": Choice(name="chimera")},
        "another cut": {"methods": (clipping(scope="stage", layers_per_stage="1,5"),)},
        "apart": {"sync": Choice(name="local-averaging")},
    }
    for name, update in edits.items():
        assert check_plan(plan.model_copy(update=update), job.graph, job.cluster), name


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ("", "clip: samples: missing"),
        ('samples = 2\nscope = "stage"', "clip: layers_per_stage: missing; scope is 'stage'"),
        ("samples = 2\nlayers_per_stage = [3, 3]", "clip: layers_per_stage: given; scope is 'model'"),
        ('samples = 2\nmicro = "fixed"', "clip: bound: missing; micro is 'fixed'"),
        ("samples = 2\nbound = 1.0", "clip: bound: 1; micro is 'min'"),
        ('samples = 2\nmicro = "quantile"', "clip: quantile: missing"),
        ('samples = 2\nmicro = "quantile"\nquantile = 1.5', "clip: quantile: 1.5"),
        ('samples = 2\nmicro = "quantil"', "nearest valid: quantile"),
        ("samples = 0", "clip: samples: 0"),
    ],
)
def test_keys_that_do_not_go_together_are_refused(keys: str, reason: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_run(parse_toml(RUN.format(keys=keys), "run"))
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("task", "keys", "reason"),
    [
        ("", "sources = 2", "clip.sources: 2 have bounds of their own; the data has 1 (nearest valid: 1)"),
        (
            'data = { "a" = 1, "b" = 2 }\nsource_block = 2',
            "sources = 3",
            "clip.sources: 3 have bounds of their own; the data has 2 (nearest valid: 2)",
        ),
        (
            'data = { "a" = 1, "b" = 2 }\nsource_block = 2',
            "samples = 4\nsources = 2",
            "task.source_block: 2; 4 samples of one source are clipped together (nearest valid: 4)",
        ),
        ("", 'micro = "fixed"\nbound = 1.0\nsources = 2', "clip: sources: 2; micro is 'fixed'"),
    ],
)
def test_sources_that_the_data_does_not_keep_apart_are_refused(task: str, keys: str, reason: str) -> None:
    given = keys if "samples" in keys else f"samples = 2\n{keys}"
    with pytest.raises(InputError) as caught:
        parse_run(parse_toml(SOURCES_RUN.format(task=task, keys=given), "run"))
    assert reason in str(caught.value)


def test_blocks_of_several_clipped_micro_batches_are_not() -> None:
    task, keys = 'data = { "a" = 1, "b" = 2 }\nsource_block = 4', "samples = 2\nsources = 2"
    run = parse_run(parse_toml(SOURCES_RUN.format(task=task, keys=keys), "run"))
    [choice] = requested_methods(run.methods, resolve_model("gpt-1m"))
    assert choice.options["sources"] == 2


def test_off_asks_for_no_method() -> None:
    run = parse_run(parse_toml(RUN.format(keys='micro = "off"\nsamples = 2'), "run"))
    assert requested_methods(run.methods, resolve_model("gpt-1m")) == ()


def test_the_report_tells_what_clipping_leaves(problem: Problem) -> None:
    metrics = [
        {"step": 0, "clip_norms": [2.0, 4.0], "clip_bound": 2.0, "clipped": 0.5, "dropped": 0.0},
        {"step": 1, "clip_norms": [1.0, None], "clip_bound": 1.0, "clipped": 0.0, "dropped": 0.5},
    ]
    planned = planned_on(problem, "text")
    rows = dict(SECTION.rows(planned, metrics))
    assert rows["clipped micro-batches"] == "2 samples, to min"
    assert rows["bound, first and last step"] == "2, 1"
    assert rows["above the bound"] == "25.0%"
    # What is left out has no length.
    assert rows["length that clipping leaves, mean"] == "62.5%"
    assert rows["left out, not finite"] == "25.0%"
    chart = SECTION.chart(planned, metrics)
    assert chart is not None
    assert chart.curves[1].points == [(0, 3.0), (1, 1.0)]
    table = SECTION.table(planned, metrics)
    assert table is not None
    assert table.rows[:2] == [(1, 1, "nan", "1", "1", "text"), (0, 1, "4", "2", "0.5", "text")]
    unlike = [{"step": 0}]
    assert SECTION.rows(planned, unlike) == []
    assert SECTION.chart(planned, unlike) is None
    assert SECTION.table(planned, unlike) is None


def planned_on(problem: Problem, data: Any) -> Any:
    run = SimpleNamespace(task=SimpleNamespace(data=data))
    return SimpleNamespace(plan=plan_of(problem, clipping()), run=run)


def test_the_report_ranks_sources_by_what_they_lose(problem: Problem) -> None:
    numbers = {"clip_bound": 1.0, "clipped": 0.5, "dropped": 0.0}
    metrics = [
        {"step": 3, "clip_norms": [1.0, 4.0], "sample_sources": [0, 0, 1, 1], **numbers},
        {"step": 4, "clip_norms": [2.0, 1.0], "sample_sources": [0, 1, 0, 0], **numbers},
    ]
    planned = planned_on(problem, {"clean": 3.0, "dirty": 1.0})
    rows = SECTION.rows(planned, metrics)[-2:]
    # Of 3 dirty samples, two lose 3/4 and one half; of 5 clean ones, one loses half.
    assert rows[0] == ("dirty", "loses 66.7% of its length; mean norm 3.333")
    assert rows[1] == ("clean", "loses 10.0% of its length; mean norm 1.2")
    table = SECTION.table(planned, metrics)
    assert table is not None
    assert table.head[-1] == "source"
    assert [row[-1] for row in table.rows[:2]] == ["dirty 100%", "clean 50%; dirty 50%"]
    # A run that was resumed with another batch tells of the last one.
    before = {"step": 2, "clip_norms": [1.0], "sample_sources": [0, 0], **numbers}
    assert SECTION.rows(planned, [before, *metrics]) == SECTION.rows(planned, metrics)
    # Rows of a run before sources were recorded.
    old = [{name: value for name, value in row.items() if name != "sample_sources"} for row in metrics]
    assert len(SECTION.rows(planned, old)) == len(SECTION.rows(planned, metrics)) - 2


def test_planners_search_only_the_cut_of_stages_with_norms(problem: Problem) -> None:
    choice = clipping(scope="stage", layers_per_stage="2,4")
    found = list(layouts(asking(problem, choice)))
    assert {one.layers_per_stage for one in found} == {(2, 4)}
    assert {one.stages for one in found} == {2}
