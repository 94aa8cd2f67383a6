"""Products in 8 bits: laws of their price, and what is refused before anything starts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.describe.amount import Shape
from weft.describe.catalogue import find_device
from weft.describe.cluster_file import parse_cluster
from weft.describe.device import FP8
from weft.describe.layer import FP8_PRODUCT, PLAIN_PRODUCT
from weft.describe.layer_choices import with_choices
from weft.describe.layout import Layout
from weft.describe.plan import LayerChoice, Plan
from weft.describe.plan_file import check_plan
from weft.describe.plan_subject import subject_of
from weft.describe.run_file import parse_run
from weft.errors import InputError
from weft.methods.fp8_linears.options import NAME, RECIPES, Fp8LinearsTable, choices_of
from weft.methods.fp8_linears.products import converted
from weft.moves.layout import build_plan, flops_per_layer, refuse
from weft.planning.compile import compile_plan
from weft.planning.planned import plan_run, planned_for
from weft.planning.problem import Problem, problem_of
from weft.predict.cost.layer_times import DataSheetSpeeds, MeasuredSpeeds, roofline
from weft.predict.predict import predict
from weft.predict.profile import MachineMeasurement
from weft.run.supported import missing_packages

PROBLEM = problem_of(model="llama-1b", on="8xh100-80gb", global_batch=16, precision="bf16")
GRAPH = PROBLEM.job.graph
LAYOUT = Layout(pp=2, dp=4, loops=1, micro_batch_size=2, schedule="1f1b")
recipes = st.sampled_from(RECIPES)


def eight_bits(recipe: str = "tensorwise", problem: Problem = PROBLEM) -> Problem:
    return problem.choosing(choices_of(Fp8LinearsTable(recipe=recipe), problem.job.graph))


def plan_of(problem: Problem, layout: Layout = LAYOUT) -> Plan:
    return build_plan(problem.job, layout, flops_per_layer(problem.job))


def step_s(problem: Problem) -> float:
    plan = plan_of(problem)
    return predict(problem.cost_model, plan, compile_plan(plan, problem.job.graph)).prediction.step_s


@given(recipe=recipes, size=st.integers(1, 4))
def test_products_of_blocks_and_only_these_are_converted(recipe: str, size: int) -> None:
    shape, graph = Shape(size, GRAPH.sequence), eight_bits(recipe).job.graph
    assert graph.layers[0] == GRAPH.layers[0]
    assert graph.layers[-1] == GRAPH.layers[-1]
    plain, block = GRAPH.layers[1], graph.layers[1]
    for name, count in (("forward", 4), ("backward_input", 4), ("backward_weight", 4)):
        before, after = getattr(plain, name), getattr(block, name)
        kernels = [one.kernel for one in after.matmuls]
        assert kernels[:count] == [FP8_PRODUCT] * count
        assert kernels[count:] == [one.kernel for one in before.matmuls[count:]]
        assert after.flops(shape) == before.flops(shape)
        # Every operand of a product is written in 8 bits at least, in 2 bytes per counted element.
        operands = [one.rows * one.inner + one.inner * one.columns for one in after.matmuls[:count]]
        least = sum(amount(shape) for amount in operands) / 2 * (1 - 1e-9)
        assert after.memory(shape) - before.memory(shape) >= least
    assert block.parameters == plain.parameters
    assert (block.kept, block.kept_bytes) == (plain.kept, plain.kept_bytes)


def test_casts_move_the_bytes_of_torchaos_roofline() -> None:
    shape, plain = Shape(2, GRAPH.sequence), GRAPH.layers[1]
    for recipe, factors in (("tensorwise", (5, 5, 5, 3, 1, 1)), ("rowwise", (3, 3, 3, 7, 5, 5))):
        block = eight_bits(recipe).job.graph.layers[1]
        passes = ("forward", "backward_input", "backward_weight")
        for name, left, right in zip(passes, factors[::2], factors[1::2], strict=True):
            work = getattr(plain, name)
            expected = sum(
                (one.rows * one.inner)(shape) * left + (one.inner * one.columns)(shape) * right
                for one in work.matmuls
                if one.kernel == PLAIN_PRODUCT
            )
            added = getattr(block, name).memory(shape) - work.memory(shape)
            assert 2 * added == pytest.approx(expected)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", ["h100-80gb", "h200-141gb", "l4", "b200"])
def test_large_products_are_faster_and_small_ones_slower(name: str, recipe: str) -> None:
    device = find_device(name, "test").device
    speeds = DataSheetSpeeds(device)

    def seconds(model: str, size: int) -> tuple[float, float]:
        graph = problem_of(model=model, on="1xh100-80gb", global_batch=8, precision="bf16").job.graph
        changed = with_choices(graph, choices_of(Fp8LinearsTable(recipe=recipe), graph))
        shape = Shape(size, graph.sequence)
        times = [roofline(one.layers[1], shape, "bf16", device, speeds) for one in (graph, changed)]
        plain, found = (one.forward_s + one.backward_s for one in times)
        return plain, found

    plain, found = seconds("llama-3-70b", 4)
    assert plain / 2 < found < plain
    plain, found = seconds("gpt-1m", 1)
    assert found > plain


def test_a_step_of_large_layers_is_faster_and_keeps_as_much() -> None:
    large = problem_of(model="llama-3-8b", on="8xh100-80gb", global_batch=16, precision="bf16")
    assert step_s(eight_bits(problem=large)) < step_s(large)
    for problem in (PROBLEM, large):
        peaks = []
        for one in (problem, eight_bits(problem=problem)):
            plan = plan_of(one)
            predicted = predict(one.cost_model, plan, compile_plan(plan, one.job.graph)).prediction
            peaks.append(predicted.peak_bytes)
        assert peaks[0] == peaks[1]


def test_a_measured_device_is_faster_by_the_quotient_of_its_peaks() -> None:
    device = find_device("h100-80gb", "test").device
    machine = MachineMeasurement(
        device=device.name,
        matmul={"bf16": ((1e9, 1e14), (1e13, 6e14))},
        memory=((1e6, 1e12), (1e9, 2e12)),
        launch_s=0.0,
        instruction_s=0.0,
        compute_slowdown=1.0,
        communication_slowdown=1.0,
        message=(),
        collectives={},
        spread=0.0,
    )
    speeds = MeasuredSpeeds(machine, device)
    quotient = device.flops_per_s[FP8] / device.flops_per_s["bf16"]
    plain, found = (speeds.matmul_s(1e12, "bf16", kernel) for kernel in (PLAIN_PRODUCT, FP8_PRODUCT))
    assert plain == pytest.approx(quotient * found)
    # A CPU multiplies what it has rounded as before.
    emulated = MeasuredSpeeds(machine, replace(device, synchronous=True, flops_per_s={"bf16": 1e12}))
    assert emulated.matmul_s(1e12, "bf16", FP8_PRODUCT) == plain


@pytest.mark.parametrize("name", ["embedding", "head"])
def test_embeddings_heads_and_convolutions_are_never_converted(name: str) -> None:
    for family in ("gpt-1m", "llama-1m", "resnet-tiny", "alexnet-tiny"):
        graph = problem_of(model=family, on="1xh100-80gb", global_batch=8).job.graph
        index = 0 if name == "embedding" else len(graph.layers) - 1
        assert not converted(graph.layers[index])
        choice = LayerChoice(name=NAME, layers=(index,), value="tensorwise")
        with pytest.raises(InputError, match="is no block with linear products of multiples of 16"):
            with_choices(graph, (choice,))


def run_with(
    model: str = "llama-1m",
    on: str = "2xh100-80gb",
    contract: str = "empirical",
    precision: str = "bf16",
    sequence: int | None = None,
    plan: dict[str, Any] | None = None,
    **table: Any,
) -> Any:
    return parse_run(
        {
            "model": {"preset": model},
            "train": {"global_batch": 8, "precision": precision},
            "cluster": {"use": on},
            "goal": {"contract": contract},
            "plan": {"pp": 2, "dp": 1, "tp": 1, "schedule": "1f1b", **(plan or {})},
            NAME: table,
            **({"task": {"sequence": sequence}} if sequence else {}),
        }
    )


def test_a_run_file_asks_for_all_blocks_and_plans_keep_it() -> None:
    run = run_with(recipe="rowwise")
    job = plan_run(run)
    blocks = tuple(range(1, len(job.problem.job.graph.layers) - 1))
    assert job.plan.layer_choices == (LayerChoice(name=NAME, layers=blocks, value="rowwise"),)
    assert planned_for(subject_of(run), job.plan).plan == job.plan
    assert plan_run(run_with()).plan.layer_choices[0].value == "tensorwise"


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"contract": "unbiased"}, "goal.contract: 'unbiased' keeps out [fp8-linears]"),
        ({"on": "2xa100-40gb"}, "fp8-linears: a100-40gb cannot multiply in fp8; leave the table out"),
        ({"precision": "fp32"}, "fp8-linears: operands are cast from bf16, and not from fp32"),
        ({"precision": "fp16"}, "fp8-linears: operands are cast from bf16, and not from fp16"),
        ({"model": "resnet-tiny"}, "fp8-linears: the model has no blocks with linear products"),
        ({"plan": {"tp": 2, "pp": 1}}, "layers of weft's own that are not converted; nearest tp: 1"),
        ({"plan": {"cp": 2, "pp": 1}}, "context ranks would scale their tokens apart; nearest cp: 1"),
        ({"plan": {"schedule": "zb-h1"}}, "and a split backward pass would do so twice"),
        ({"plan": {"micro_batch_size": 1}, "sequence": 8}, "no multiple of 16; nearest micro-batch size: 2"),
        ({"plan": {"splits": [2, 1], "micro_batch_size": 2}}, "stages that split micro-batches would scale"),
    ],
)
def test_run_files_that_ask_wrongly_are_refused_in_one_line(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        plan_run(run_with(**asked))
    assert message in str(caught.value).splitlines()[0]


def test_a_recipe_is_one_of_two() -> None:
    with pytest.raises(InputError, match=r"fp8-linears: recipe: .*'tensorwise' or 'rowwise'"):
        run_with(recipe="blockwise")
    choice = LayerChoice(name=NAME, layers=(1,), value="blockwise")
    with pytest.raises(InputError, match="'blockwise' is not one of tensorwise, rowwise"):
        with_choices(GRAPH, (choice,))


def test_cpus_emulate_beside_no_other_device() -> None:
    emulated = problem_of(model="llama-1m", on="this-machine", global_batch=8, precision="fp32")
    chosen = eight_bits(problem=emulated)
    assert step_s_alone(chosen) > step_s_alone(emulated)
    mixed = replace(emulated.job, cluster=parse_cluster("1xv100-16gb+1xh100-80gb"), precision="bf16")
    with pytest.raises(InputError, match="fp8-linears: v100-16gb cannot multiply in fp8"):
        mixed.choosing(chosen.job.layer_choices)


def step_s_alone(problem: Problem) -> float:
    cluster, layout = problem.job.cluster, Layout(pp=1, dp=1, loops=1, micro_batch_size=2, schedule="1f1b")
    layout = replace(layout, dp=cluster.ranks)
    plan = build_plan(problem.job, layout, flops_per_layer(problem.job))
    return predict(problem.cost_model, plan, compile_plan(plan, problem.job.graph)).prediction.step_s


@pytest.mark.parametrize(
    ("change", "key"), [({"tp": 2}, "mesh.tp"), ({"cp": 2}, "mesh.cp"), ({"schedule": "zb-h1"}, "schedule")]
)
def test_plans_are_refused_as_layouts_are(change: dict[str, Any], key: str) -> None:
    problem, layout = eight_bits(), replace(LAYOUT, dp=2 if "schedule" not in change else 4, **change)
    assert refuse(PROBLEM.job, layout) is None
    assert str(refuse(problem.job, layout)).startswith(NAME)
    plan = plan_of(PROBLEM, layout).model_copy(update={"layer_choices": problem.job.layer_choices})
    found = check_plan(plan, problem.job.graph, problem.job.cluster)
    assert [one.where for one in found] == [f"plan: {key}"]


def test_a_missing_torchao_is_named_before_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of(eight_bits())
    monkeypatch.setattr("weft.run.supported.find_spec", lambda name: None)
    assert [str(one) for one in missing_packages(plan)] == [
        'fp8-linears: needs the package torchao, which is not installed: pip install ".[fp8]" '
        "in the folder of weft"
    ]
    assert missing_packages(plan_of(PROBLEM)) == []
    monkeypatch.setattr("weft.run.supported.find_spec", lambda name: object())
    assert missing_packages(plan) == []
