"""Windows of attention: laws of their price, of their keys, and of the plans that have them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.describe.amount import Shape
from weft.describe.layer_choices import with_choices
from weft.describe.layout import Layout
from weft.describe.plan import LayerChoice, Plan
from weft.describe.plan_file import PlanFile, check_plan, load_plan
from weft.describe.plan_subject import subject_of
from weft.describe.run_file import parse_run
from weft.errors import InputError
from weft.methods.attention_window.options import NAME, AttentionWindowTable, choices_of
from weft.moves.layout import build_plan, flops_per_layer, refuse
from weft.planning.compile import compile_plan
from weft.planning.planned import plan_run, planned_for
from weft.planning.problem import Problem, problem_of
from weft.predict.measurements import Measurements
from weft.predict.predict import predict
from weft.predict.profile import LayerProfile, LayerTiming

PROBLEM = problem_of(model="gpt-1m", on="4xa100-40gb", global_batch=16)
GRAPH = PROBLEM.job.graph
SEQUENCE, BLOCKS = PROBLEM.job.sequence, len(GRAPH.layers) - 2
LAYOUT = Layout(pp=2, dp=2, loops=1, micro_batch_size=2, schedule="1f1b")


def windows(tokens: int, layers: tuple[int, ...] = tuple(range(1, BLOCKS + 1))) -> tuple[LayerChoice, ...]:
    return (LayerChoice(name=NAME, layers=layers, value=tokens),)


def plan_of(problem: Problem, layout: Layout = LAYOUT) -> Plan:
    return build_plan(problem.job, layout, flops_per_layer(problem.job))


def step_s(problem: Problem, layout: Layout = LAYOUT) -> float:
    job, plan = problem.job, plan_of(problem, layout)
    program = compile_plan(plan, job.graph)
    return predict(problem.cost_model, plan, program).prediction.step_s


@given(window=st.integers(1, 4 * SEQUENCE), size=st.integers(1, 4), tensor=st.sampled_from([1, 2]))
def test_scores_are_those_of_chunks_and_the_windows_before_them(window: int, size: int, tensor: int) -> None:
    shape = Shape(size, SEQUENCE, tensor)
    plain, cut = GRAPH.layers[1], with_choices(GRAPH, windows(window)).layers[1]
    if window >= SEQUENCE:
        assert replace(cut, unchanged=None) == plain
        return
    products = [(one, other) for one, other in zip(plain.forward.matmuls, cut.forward.matmuls, strict=True)]
    for one, other in products[-2:]:
        assert one.kernel == "flash2-causal"
        assert other.kernel == "flash2"
        chunks = -(-SEQUENCE // window)
        scores = window * window + (chunks - 1) * window * (2 * window - 1)
        assert other.flops(shape) == pytest.approx(one.flops(shape) * scores / SEQUENCE**2)
    assert all(one == other for one, other in products[:-2])
    assert cut.parameters(shape) == plain.parameters(shape)
    assert cut.kept(shape) > plain.kept(shape)


def test_a_wider_window_is_never_cheaper_and_one_of_all_tokens_is_none() -> None:
    longer = problem_of(model="gpt-1m", on="4xa100-40gb", global_batch=16)
    flops = [
        with_choices(longer.job.graph, windows(2**power)).layers[1].flops(Shape(1, SEQUENCE))
        for power in range(SEQUENCE.bit_length() - 1)
    ]
    assert flops == sorted(flops)
    assert step_s(PROBLEM.choosing(windows(SEQUENCE))) == step_s(PROBLEM)
    one, all_blocks = (PROBLEM.choosing(windows(8, layers)) for layers in ((1,), tuple(range(1, BLOCKS + 1))))
    assert len({step_s(PROBLEM), step_s(one), step_s(all_blocks)}) == 3


def test_layers_with_the_same_window_stay_alike() -> None:
    graph = with_choices(GRAPH, windows(8, tuple(range(2, BLOCKS + 1))))
    assert graph.alike[1] == 1
    assert set(graph.alike[2 : BLOCKS + 1]) == {2}
    assert with_choices(graph, ()) is GRAPH
    assert with_choices(graph, windows(8, (1,))).layers[2] == GRAPH.layers[2]


def test_a_measured_block_takes_as_much_less_as_it_does_by_the_speeds() -> None:
    (group,) = PROBLEM.job.cluster.groups
    timings = tuple(
        LayerTiming(
            layer=kind,
            device=group.device.name,
            tp=1,
            micro_batch_size=2,
            forward_s=1e-3,
            backward_s=2e-3,
            update_s=1e-4,
            activation_bytes=1e6,
        )
        for kind in ("embedding", "block", "head")
    )
    profile = LayerProfile(
        model_fingerprint=GRAPH.fingerprint,
        sequence=SEQUENCE,
        precision=PROBLEM.job.precision,
        timings=timings,
        spread=0.0,
    )
    measured = replace(PROBLEM, measurements=Measurements(profile=profile))
    wide, narrow = (step_s(measured.choosing(windows(tokens))) for tokens in (SEQUENCE, SEQUENCE // 8))
    assert wide == step_s(measured)
    assert narrow != wide


def test_plans_keep_windows_and_others_their_id(tmp_path: Path) -> None:
    plain, windowed = plan_of(PROBLEM), plan_of(PROBLEM.choosing(windows(8)))
    assert "layer_choices" not in PlanFile(plain).to_json()
    assert windowed.plan_id != plain.plan_id
    assert windowed.model_fingerprint == plain.model_fingerprint
    (tmp_path / "plan.json").write_text(PlanFile(windowed).to_json())
    assert load_plan(tmp_path / "plan.json") == windowed
    # Another cut keeps them, because they are of the model's layers.
    other = plan_of(PROBLEM.choosing(windows(8)), replace(LAYOUT, pp=4, dp=1))
    assert other.layer_choices == windowed.layer_choices


@pytest.mark.parametrize(
    ("choice", "problem"),
    [
        ({"name": "attention-windows"}, "'attention-windows' is not one of attention-window"),
        ({"layers": (0,)}, "attention-window of layer 0: embedding has no attention to the tokens before"),
        ({"layers": (99,)}, f"attention-window of layer 99: layers 0 to {BLOCKS + 1} exist"),
        ({"value": 0}, "attention-window of layer 1: 0 tokens; at least 1 is needed"),
        ({"value": "wide"}, "attention-window of layer 1: 'wide' tokens; at least 1 is needed"),
        ({"layers": (1, 1)}, "attention-window of layer 1 is chosen more than once"),
    ],
)
def test_plans_that_choose_wrongly_are_refused(choice: dict[str, Any], problem: str) -> None:
    broken = LayerChoice(**{"name": NAME, "layers": (1,), "value": 8} | choice)
    plan = plan_of(PROBLEM).model_copy(update={"layer_choices": (broken,)})
    found = [str(one) for one in check_plan(plan, GRAPH, PROBLEM.job.cluster)]
    assert len(found) == 1
    assert found[0].startswith(f"plan: layer_choices: {problem}")
    with pytest.raises(InputError, match="plan: layer_choices"):
        PROBLEM.choosing((broken,))


def test_context_ranks_are_refused() -> None:
    problem, layout = PROBLEM.choosing(windows(8)), replace(LAYOUT, cp=2, dp=1)
    assert refuse(PROBLEM.job, layout) is None
    assert "windows leave most of them out; nearest cp: 1" in str(refuse(problem.job, layout))
    plan = plan_of(PROBLEM, layout).model_copy(update={"layer_choices": windows(8)})
    assert [str(one) for one in check_plan(plan, problem.job.graph, problem.job.cluster)] == [
        "plan: mesh.cp: context ranks attend to the keys of all tokens, and windows leave most of them out "
        "(nearest valid: 1)"
    ]


def run_with(model: str = "gpt-1m", contract: str = "empirical", **table: Any) -> Any:
    return parse_run(
        {
            "model": {"preset": model},
            "train": {"global_batch": 8},
            "cluster": {"use": "2xa100-40gb"},
            "goal": {"contract": contract},
            "plan": {"pp": 2, "dp": 1, "tp": 1, "schedule": "1f1b"},
            NAME: table,
        }
    )


def test_a_run_file_says_it_of_all_blocks_or_of_some() -> None:
    choices = choices_of(AttentionWindowTable(tokens=16, blocks={"1-2": 8, "0": 4}), GRAPH)
    assert choices == (
        LayerChoice(name=NAME, layers=(1,), value=4),
        LayerChoice(name=NAME, layers=(2, 3), value=8),
        *((LayerChoice(name=NAME, layers=tuple(range(4, BLOCKS + 1)), value=16),) if BLOCKS > 3 else ()),
    )
    run = run_with(tokens=16)
    job = plan_run(run)
    assert job.plan.layer_choices == windows(16)
    assert planned_for(subject_of(run), job.plan).plan == job.plan
    # A plan file says it by itself.
    plain = run.model_copy(update={"methods": {}})
    assert planned_for(subject_of(plain), job.plan).problem.job.graph.layers == job.problem.job.graph.layers


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({}, "attention-window: needs tokens, or blocks"),
        ({"blocks": {"x": 4}}, "attention-window.blocks: 'x' is no block and no range of blocks"),
        ({"blocks": {"2-1": 4}}, "attention-window.blocks: '2-1' is no block and no range of blocks"),
        ({"blocks": {"0-99": 4}}, f"attention-window.blocks: '0-99': blocks 0 to {BLOCKS - 1} exist"),
        ({"blocks": {"0-1": 4, "1": 8}}, "attention-window.blocks: block 1 is named more than once"),
        ({"tokens": 4, "contract": "exact"}, "goal.contract: 'exact' keeps out [attention-window]"),
        ({"tokens": 4, "model": "alexnet-tiny"}, "attention-window: the model has no blocks with attention"),
        ({"tokens": 4, "model": "resnet-tiny"}, "block.0 has no attention to the tokens before"),
        ({"tokens": 4, "model": "vit-digits"}, "block.0 has no attention to the tokens before"),
    ],
)
def test_run_files_that_ask_wrongly_are_refused_in_one_line(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        plan_run(run_with(**asked))
    assert message in str(caught.value).splitlines()[0]
