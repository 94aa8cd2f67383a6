"""Loss kernels: laws of their price and memory, of their keys, and of the plans that have them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.describe.amount import Shape
from weft.describe.device import PRECISION_BYTES
from weft.describe.families import layer_graph
from weft.describe.layer import Layer
from weft.describe.layer_choices import with_choices
from weft.describe.layer_pieces import cut_of
from weft.describe.layout import Layout, PartialLayout
from weft.describe.loss_choice import BY_SIZE, CHUNKED, FUSED, loss_choices, loss_of, other_choices
from weft.describe.plan import LayerChoice, Plan
from weft.describe.plan_file import PlanFile, check_plan, load_plan
from weft.describe.plan_subject import subject_of
from weft.describe.run_file import parse_run
from weft.errors import InputError
from weft.methods.loss_kernels.chunks import ENOUGH, FEWEST, chunk_tokens
from weft.moves.layout import build_plan, flops_per_layer, refuse
from weft.moves.layout_of_plan import layout_of
from weft.moves.move import Context, Purpose
from weft.moves.registry import all_moves, moves_for
from weft.planning.compile import compile_plan
from weft.planning.planned import plan_run, planned_for
from weft.planning.planners.bounds import Bounds
from weft.planning.planners.weft import WeftPlanner
from weft.planning.problem import Problem, problem_of
from weft.predict.predict import predict
from weft.run import supported

PROBLEM = problem_of(model="gpt2", on="2xa100-40gb", global_batch=16)
GRAPH = PROBLEM.job.graph
HEAD = len(GRAPH.layers) - 1
LAYOUT = Layout(pp=1, dp=2, loops=1, micro_batch_size=8, schedule="1f1b")
CHUNKS = st.one_of(st.just(BY_SIZE), st.integers(1, 4096))
SHAPES = st.builds(Shape, st.integers(1, 16), st.just(1024), st.sampled_from([1, 2, 4]))


def head(value: int | str, name: str = CHUNKED, family: str = "gpt") -> tuple[Layer, Layer]:
    """The head of a model with all logits, and with a kernel."""
    graph = layer_graph(replace(PROBLEM.model, family=family))
    choice = LayerChoice(name=name, layers=(HEAD,), value=value)
    return graph.layers[HEAD], with_choices(graph, (choice,)).layers[HEAD]


def plan_of(layout: Layout, problem: Problem = PROBLEM) -> Plan:
    return build_plan(problem.job, layout, flops_per_layer(problem.job))


@given(value=CHUNKS, shape=SHAPES, family=st.sampled_from(["gpt", "llama", "bert"]))
def test_chunks_do_the_same_products_and_more_of_them_forward(
    value: int | str, shape: Shape, family: str
) -> None:
    whole, chunked = head(value, family=family)
    assert chunked.flops(shape) == pytest.approx(whole.flops(shape))
    gradients = 2.0 * whole.forward.matmuls[-1].flops(shape)
    assert chunked.forward.flops(shape) == pytest.approx(whole.forward.flops(shape) + gradients)
    assert chunked.tensor_exchanges == whole.tensor_exchanges
    assert cut_of(chunked).borders == cut_of(whole).borders


@given(value=CHUNKS, shape=SHAPES, family=st.sampled_from(["gpt", "llama", "bert"]))
def test_the_gradient_of_the_matrix_stays_in_place_of_the_logits(
    value: int | str, shape: Shape, family: str
) -> None:
    whole, chunked = head(value, family=family)
    product = whole.forward.matmuls[-1]
    logits, matrix = (product.rows * product.columns)(shape), (product.inner * product.columns)(shape)
    for element in set(PRECISION_BYTES.values()):
        kept = [
            element * (one.kept(shape) - one.freed(shape)) + one.kept_bytes(shape) - one.freed_bytes(shape)
            for one in (whole, chunked)
        ]
        assert kept[1] - kept[0] == pytest.approx(4.0 * matrix - 4.0 * logits)


@given(tokens=st.integers(1, 4096), more=st.integers(0, 4096), shape=SHAPES)
def test_larger_chunks_take_more_room_and_move_less(tokens: int, more: int, shape: Shape) -> None:
    (_, small), (_, large) = head(tokens), head(tokens + more)
    for sizes in ((4, 4), (2, 4), (8, 8)):
        assert small.temporary_bytes(shape, *sizes) <= large.temporary_bytes(shape, *sizes)
    assert small.forward.memory(shape) >= large.forward.memory(shape)
    assert small.forward.kernels >= large.forward.kernels


@pytest.mark.parametrize(("width", "tokens"), [(64, FEWEST), (384, 384), (768, ENOUGH), (4096, 2048)])
def test_chunks_by_size_have_half_as_many_logits_as_a_wide_matrix(width: int, tokens: int) -> None:
    assert chunk_tokens(BY_SIZE, width) == tokens
    assert chunk_tokens(7, width) == 7


@given(
    loss=st.sampled_from(["whole", "chunked", "fused"]), tokens=st.one_of(st.none(), st.integers(1, 10**6))
)
def test_a_plan_says_the_loss_of_its_layout(loss: str, tokens: int | None) -> None:
    layout = replace(LAYOUT, loss=loss, loss_chunk_tokens=tokens if loss == "chunked" else None)
    plan = plan_of(layout)
    assert plan.layer_choices == loss_choices(layout, HEAD)
    assert other_choices(plan.layer_choices) == ()
    assert loss_of(plan.layer_choices) == {"loss": loss, "loss_chunk_tokens": layout.loss_chunk_tokens}
    assert layout_of(plan, flops_per_layer(PROBLEM.job)) == layout
    assert str(layout) in str(replace(layout, recompute="none"))


def test_a_whole_loss_leaves_plans_as_they_were() -> None:
    assert "layer_choices" not in plan_of(LAYOUT).record()
    assert "loss" not in LAYOUT.record()
    assert replace(LAYOUT, loss="chunked").record()["loss"] == "chunked"


def test_a_chunked_loss_lowers_the_peak_of_many_tokens() -> None:
    peaks = {}
    for loss in ("whole", "chunked"):
        plan = plan_of(replace(LAYOUT, loss=loss))
        program = compile_plan(plan, GRAPH)
        peaks[loss] = max(predict(PROBLEM.cost_model, plan, program).prediction.peak_bytes)
    assert peaks["chunked"] < 0.8 * peaks["whole"]


def test_bounds_know_the_loss_of_a_layout() -> None:
    bounds, layout = Bounds(PROBLEM), replace(LAYOUT, loss="chunked")
    assert bounds.holding(layout).total < bounds.holding(LAYOUT).total
    plan = plan_of(layout)
    prediction = predict(PROBLEM.cost_model, plan, compile_plan(plan, GRAPH)).prediction
    assert bounds.step_s(layout) <= prediction.step_s
    assert bounds.holding(layout).total <= max(prediction.peak_bytes)


def short_of_memory() -> Problem:
    """A problem with too little memory for the logits of all layouts of one micro-batch size."""
    pins = PartialLayout(pp=1, dp=2, tp=1, micro_batch_size=8, sharding="zero-0", recompute="none")
    problem = replace(PROBLEM, pins=pins)
    needed = [Bounds(problem).holding(replace(LAYOUT, loss=loss)).total for loss in ("whole", "chunked")]
    (group,) = problem.job.cluster.groups
    taken = group.device.memory_bytes - group.device.usable_bytes
    # A stated reserve has room for communicators.
    device = replace(group.device, memory_bytes=sum(needed) // 2 + taken, reserve_bytes=taken)
    tight = replace(problem.job.cluster, groups=(replace(group, device=device),))
    return replace(problem, job=replace(problem.job, cluster=tight))


def test_the_planner_chunks_the_loss_where_memory_is_short() -> None:
    problem = short_of_memory()
    assert WeftPlanner().search(problem).fitting[0].chain.loss == "chunked"
    assert WeftPlanner().search(replace(problem, pins=problem.pins.replaced(loss="whole"))).fitting == []
    roomy = replace(PROBLEM, pins=problem.pins)
    assert {one.chain.loss for one in WeftPlanner().search(roomy).candidates} == {"whole"}


def test_auto_takes_the_loss_with_the_least_step() -> None:
    pins = short_of_memory().pins.replaced(loss="auto")
    fitting = WeftPlanner().search(replace(PROBLEM, pins=pins)).fitting
    assert {one.chain.loss for one in fitting} == {"whole", "chunked"}
    assert fitting[0].step_s == min(one.step_s for one in fitting)


def test_least_memory_means_chunks() -> None:
    pins = PartialLayout(pp=1, dp=2, tp=1, micro_batch_size=8, recompute="none")
    problem = replace(PROBLEM, minimise="memory", pins=pins)
    assert WeftPlanner().search(problem).fitting[0].chain.loss == "chunked"


def test_the_moves_lead_from_one_loss_to_another() -> None:
    moves = all_moves()
    context = Context(plan=plan_of(LAYOUT), graph=GRAPH, cluster=PROBLEM.job.cluster)
    chunked = moves["chunk the loss"].apply(context)
    assert chunked == plan_of(replace(LAYOUT, loss="chunked"))
    again = replace(context, plan=chunked)
    assert moves["chunk the loss"].applies(again) is not None
    assert moves["make all logits at once"].apply(again) == context.plan
    assert moves["chunk the loss"] in moves_for(Purpose.SMALLER, moves["chunk the loss"].contract)


@pytest.mark.parametrize(
    ("model", "on", "changes", "said"),
    [
        ("vit-base", "2xa100-40gb", {"loss": "chunked"}, "head is no head that multiplies every token"),
        ("gpt2", "2xa100-40gb", {"loss": "fused", "tp": 2, "dp": 1}, "the fused kernel needs all columns"),
        ("gpt2", "this-machine", {"loss": "fused"}, "cannot run the fused kernel"),
        ("gpt2", "2xa100-40gb", {"loss_chunk_tokens": 8}, "loss chunk tokens 8 with loss whole"),
    ],
)
def test_a_layout_that_has_no_such_kernel_is_refused_in_one_line(
    model: str, on: str, changes: dict[str, object], said: str
) -> None:
    problem = problem_of(model=model, on=on, global_batch=16)
    reason = refuse(problem.job, replace(LAYOUT, **({"dp": 1} | changes)))
    assert reason is not None
    assert said in reason
    assert "\n" not in reason
    assert "nearest loss: " in reason


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        ({"value": 0}, "0 tokens; at least 1"),
        ({"value": "some"}, "'some' tokens"),
        ({"layers": (1,)}, "block.0 is no head"),
    ],
)
def test_a_broken_choice_of_a_plan_is_refused(choice: dict[str, object], said: str) -> None:
    broken = LayerChoice(**{"name": CHUNKED, "layers": (HEAD,), "value": BY_SIZE} | choice)
    plan = plan_of(LAYOUT).model_copy(update={"layer_choices": (broken,)})
    (problem,) = map(str, check_plan(plan, GRAPH, PROBLEM.job.cluster))
    assert said in problem


def test_a_given_plan_of_a_fused_loss_is_refused_on_tensor_ranks_and_on_cpus() -> None:
    tables = {"model": {"preset": "gpt-1m"}, "cluster": {"use": "this-machine"}, "train": {"global_batch": 4}}
    run = parse_run(tables | {"plan": {"dp": 1, "pp": 1, "micro_batch_size": 2}})
    plan = plan_run(run).plan
    last = max(plan.stages[-1].layers)
    fused = LayerChoice(name=FUSED, layers=(last,), value=BY_SIZE)
    with pytest.raises(InputError, match="cannot run the fused kernel"):
        planned_for(subject_of(run), plan.model_copy(update={"layer_choices": (fused,)}))


def test_a_machine_without_the_fused_kernel_is_told_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = plan_of(replace(LAYOUT, loss="fused"))
    monkeypatch.setattr(supported, "find_spec", lambda name: None)
    assert [str(one) for one in supported.missing_packages(plan)] == [
        'fused-loss: needs the package liger_kernel, which is not installed: pip install ".[liger]" '
        "in the folder of weft"
    ]
    assert supported.missing_packages(plan_of(replace(LAYOUT, loss="chunked"))) == []


def test_keys_reach_the_plan_and_its_file(tmp_path: Path) -> None:
    tables = {"model": {"preset": "gpt-1m"}, "train": {"global_batch": 4}}
    keys = {"dp": 1, "pp": 1, "micro_batch_size": 2, "loss": "chunked", "loss_chunk_tokens": 64}
    job = plan_run(parse_run(tables | {"plan": keys}))
    (choice,) = job.plan.layer_choices
    assert (choice.name, choice.value) == (CHUNKED, 64)
    path = tmp_path / "plan.json"
    path.write_text(PlanFile(job.plan).to_json())
    assert planned_for(subject_of(job.run), load_plan(path)).predicted.prediction == job.predicted.prediction


@pytest.mark.parametrize("loss", [None, "whole", "fused"])
def test_only_a_chunked_loss_has_tokens_of_chunks(loss: str | None) -> None:
    keys = {"loss_chunk_tokens": 64} | ({} if loss is None else {"loss": loss})
    with pytest.raises(InputError, match="loss_chunk_tokens: 64; only a chunked loss has chunks"):
        parse_run({"model": {"preset": "gpt-1m"}, "plan": keys})
