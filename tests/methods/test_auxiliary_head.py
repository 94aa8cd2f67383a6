"""Laws: an auxiliary head belongs to the stage of its block, is priced there, and is refused in one line."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from asked_methods import with_head
from program.mutations import twice, with_value, without_row
from small_plans import make_plan, make_program, tiny

from weft.describe.added_layers import trained_graph
from weft.describe.cluster_file import parse_cluster
from weft.describe.model import ModelConfig
from weft.describe.models import resolve_model
from weft.describe.plan import Choice, Plan
from weft.describe.plan_file import check_plan
from weft.describe.reading import parse_toml
from weft.describe.run_file import parse_run
from weft.doors.emit import emit
from weft.errors import InputError
from weft.methods.auxiliary_head.kinds import HasHead
from weft.methods.auxiliary_head.layers import add_head
from weft.planning.compile import compile_evaluation
from weft.planning.planned import plan_run
from weft.planning.problem import problem_of_run
from weft.predict.cost.memory import own_parameters, plan_states, stage_parameters, with_slack
from weft.predict.cost.placed_plan import CostModel
from weft.predict.cost.price import price
from weft.program.kinds import BACKWARD, FORWARD
from weft.program.program import Program
from weft.program.verify import require_valid, verify
from weft.run.stage.build import build_stages

AFTER = 2
CLUSTER = parse_cluster("2xa100-80gb")


def headed(config: ModelConfig, *, recompute: str = "none", **sizes: object) -> Plan:
    plan = make_plan(config, precision="fp32", **sizes)
    graph = trained_graph(config, [with_head(AFTER)])
    stages = tuple(stage.model_copy(update={"recompute": recompute}) for stage in plan.stages)
    update = {"methods": (with_head(AFTER),), "model_fingerprint": graph.fingerprint, "stages": stages}
    return plan.model_copy(update=update)


def program(schedule: str = "1f1b") -> Program:
    config = tiny(layers=4)
    return make_program(config, headed(config, pp=2, schedule=schedule))


@pytest.mark.parametrize("family", ["gpt", "llama"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_stage_has_as_many_parameters_as_its_layers_say(family: str, tied: bool) -> None:
    config = tiny(family, layers=4, tied=tied)
    plan = headed(config, pp=2)
    graph = trained_graph(config, plan.methods)
    for index, stage in enumerate(plan.stages):
        [module] = build_stages(plan, config, index, 0, torch.float32).values()
        held = sum(parameter.numel() for parameter in module.parameters())
        assert held == stage_parameters(graph, stage.layers, plan.shape(index))
        assert hasattr(module, "auxiliary_head") == (AFTER in stage.layers)


def test_all_cuts_have_the_same_initial_values() -> None:
    config = tiny(layers=4)
    whole, cut = (headed(config, pp=pp) for pp in (1, 2))
    [one] = build_stages(whole, config, 0, 7, torch.float64).values()
    [half] = build_stages(cut, config, 0, 7, torch.float64).values()
    heads = one.auxiliary_head.state_dict(), half.auxiliary_head.state_dict()
    assert all(torch.equal(heads[0][name], heads[1][name]) for name in heads[0])
    assert heads[0]["product.weight"].std() == pytest.approx(0.02, rel=0.2)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_the_stage_that_has_it_pays_for_it(recompute: str) -> None:
    config = replace(tiny(layers=4), vocabulary=997)
    with_it = headed(config, pp=2, schedule="1f1b", recompute=recompute)
    without = with_it.model_copy(update={"methods": ()})
    graphs = [trained_graph(config, plan.methods) for plan in (with_it, without)]
    programs = [make_program(config, plan) for plan in (with_it, without)]
    more, less = (
        price(CostModel(graph=graph, cluster=CLUSTER), one, plan).costs
        for one, plan, graph in zip(programs, (with_it, without), graphs, strict=True)
    )
    columns = programs[0].columns
    assert np.array_equal(columns.kind, programs[1].columns.kind)
    longer = more.occupancy > less.occupancy
    assert set(columns.stage[longer].tolist()) == {0}
    assert longer[(columns.stage == 0) & np.isin(columns.kind, [FORWARD, BACKWARD])].all()
    added = 2 * config.hidden + config.hidden * config.vocabulary
    [held] = {own_parameters(graphs[0], with_it.stages[0].layers, with_it.shape(0))}
    assert held - own_parameters(graphs[1], with_it.stages[0].layers, with_it.shape(0)) == added
    states = plan_states(with_it).total * added
    assert more.base_bytes[0] - less.base_bytes[0] >= with_slack(np.array([states]))[0] - 1
    assert more.base_bytes[1] == less.base_bytes[1]
    forward = int(np.flatnonzero((columns.stage == 0) & (columns.kind == FORWARD))[0])
    # Fully recomputed, a block keeps its input alone, head or not.
    assert (more.live_bytes[forward] > less.live_bytes[forward]) == (recompute != "full")


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_programs_with_a_head_are_proven(schedule: str) -> None:
    require_valid(program(schedule))


def test_an_evaluation_owes_nothing() -> None:
    config = tiny(layers=4)
    plan = headed(config, pp=2)
    require_valid(compile_evaluation(plan, trained_graph(config, plan.methods)))


@pytest.mark.parametrize("kind", [FORWARD, BACKWARD])
def test_a_loss_that_is_made_or_gone_back_from_twice_or_never_is_refused(kind: int) -> None:
    whole = program()
    row = int(np.flatnonzero((whole.columns.kind == kind) & (whole.columns.stage == 0))[0])
    for broken in (twice(whole, row), without_row(whole, row), with_value(whole, "micro_batch", row, 3)):
        assert any("'auxiliary_loss'" in str(one) for one in verify(broken))


def test_a_head_of_a_stage_that_nobody_steps_is_refused() -> None:
    whole = program()
    methods = {"auxiliary-head": HasHead(stage=9)}
    broken = replace(whole, obligations=replace(whole.obligations, methods=methods))
    assert any("stage 9 has it, and no rank steps" in str(one) for one in verify(broken))


@pytest.mark.parametrize(
    ("model", "options", "words"),
    [
        ("gpt-1m", {"after_block": 9, "weight": 0.3}, "auxiliary-head.after_block: 9; gpt-1m has 4 blocks"),
        ("resnet-50", {"after_block": 1, "weight": 0.3}, "is of the family 'resnet'"),
        ("bert-base", {"after_block": 1, "weight": 0.3}, "heads are known for gpt and llama models"),
        ("gpt-1m", {"after_block": 1, "weight": 0.0}, "weight"),
    ],
)
def test_what_cannot_have_a_head_is_refused_in_one_line(model: str, options: dict, words: str) -> None:
    config = resolve_model(model)
    with pytest.raises(InputError) as refused:
        trained_graph(config, [Choice(name="auxiliary-head", options=options)])
    [line] = str(refused.value).splitlines()
    assert words in line


def run_text(head: str, plan: str = "pp = 2") -> str:
    return f"""
[model]
preset = "gpt-1m"
[train]
global_batch = 8
[cluster]
use = "4xa100-80gb"
[plan]
{plan}
[auxiliary-head]
{head}
"""


@pytest.mark.parametrize(
    ("head", "words"),
    [
        ("after_block = 1\nweight = 0.0", "auxiliary-head: weight: "),
        ("after_block = 0\nweight = 0.3", "auxiliary-head: after_block: 0"),
        ("after_block = 1", "auxiliary-head: weight: "),
        ("after_block = 1\nweight = 0.3\nwidth = 3", "auxiliary-head: width: unknown key"),
    ],
)
def test_a_table_that_means_nothing_is_refused(head: str, words: str) -> None:
    with pytest.raises(InputError) as refused:
        parse_run(parse_toml(run_text(head), "run"))
    [line] = str(refused.value).splitlines()
    assert words in line


@pytest.mark.parametrize("degree", ["tp = 2", "cp = 2"])
def test_ranks_that_divide_the_head_are_refused(degree: str) -> None:
    run = parse_run(parse_toml(run_text("after_block = 1\nweight = 0.3", f"dp = 1\n{degree}"), "run"))
    with pytest.raises(InputError, match="its head is whole on one rank"):
        plan_run(run)


def test_stacks_that_do_not_train_it_say_so() -> None:
    planned = plan_run(parse_run(parse_toml(run_text("after_block = 1\nweight = 0.3"), "run")))
    assert any(
        "auxiliary-head, which is no part of the model" in str(one)
        for one in emit(planned, "deepspeed").losses
    )


def test_a_plan_for_other_heads_is_refused() -> None:
    config = tiny(layers=4)
    plan, graph = headed(config, pp=2), trained_graph(config, [with_head(AFTER)])
    for methods in ((), (with_head(1),)):
        edited = plan.model_copy(update={"methods": methods})
        found = [str(one) for one in check_plan(edited, graph, CLUSTER)]
        assert any("plan: methods: the plan's head is behind block" in one for one in found)


def test_the_problem_of_a_run_has_the_head_in_its_layers() -> None:
    run = parse_run(parse_toml(run_text("after_block = 3\nweight = 0.3"), "run"))
    graph = problem_of_run(run).job.graph
    assert [layer.name for layer in graph.layers if "auxiliary" in layer.name] == ["block.2+auxiliary_head"]
    assert graph.fingerprint != trained_graph(resolve_model("gpt-1m"), []).fingerprint
    assert graph.knows_products


def test_layers_stay_where_they_are() -> None:
    config = tiny(layers=4)
    plain = trained_graph(config, [])
    with_it = add_head(plain, config, with_head(AFTER))
    assert with_it.edges == plain.edges
    assert [
        index for index, (a, b) in enumerate(zip(plain.layers, with_it.layers, strict=True)) if a != b
    ] == [2]
