"""Laws of the optimizer in predictions: states and updates cost what it keeps and moves, AdamW's as ever."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from predict.cost.machines import CPU, MACHINE, profile_of
from predict.cost.steps import GRAPH, SLOW, machine, plans, step_of
from predict.plans import plan_of

from weft.describe.amount import Shape
from weft.describe.optimizers import ADAMW, FOREACH_ADAMW, MOMENTUM_SGD, PLAIN_SGD, OptimizerWork
from weft.describe.plan import Plan
from weft.describe.plan_file import PlanFile, parse_plan_file
from weft.describe.plan_versions import former_ids
from weft.planning.compile import compile_plan
from weft.predict.cost.compute import ComputeModel
from weft.predict.cost.memory import ALLOCATOR_SLACK, shared_parameters, stage_parameters, state_bytes
from weft.predict.cost.placed_plan import CostModel
from weft.predict.cost.price import price
from weft.program.kinds import STEP

RISING = (PLAIN_SGD, MOMENTUM_SGD, ADAMW)
PEAK = tuple[int, ...]
# Stack, precision and sharding of two stages of two replicas; id, step and peaks of plans without optimizers.
ADAMW_PREDICTIONS: tuple[tuple[str, str, str, str, float, PEAK], ...] = (
    (
        "weft",
        "fp32",
        "zero-0",
        "8be432475712b79b",
        0.0022894620000000004,
        (3528567, 2943724, 3528567, 2943724),
    ),
    ("weft", "fp32", "zero-1", "11c80f0002e9f130", 0.002357774, (3074510, 2497577, 3074510, 2497577)),
    ("weft", "fp32", "zero-3", "7dc85f2598242d5f", 0.002357774, (3528567, 2943724, 3528567, 2943724)),
    (
        "weft",
        "bf16",
        "zero-0",
        "459aee7c31ee195d",
        0.0022561160000000003,
        (3198703, 2879913, 3198703, 2879913),
    ),
    ("weft", "bf16", "zero-1", "761d21b511c9a57a", 0.002323748, (2517618, 2210693, 2517618, 2210693)),
    ("weft", "bf16", "zero-3", "c4354de8e9529c83", 0.002323748, (2858161, 2545303, 2858161, 2545303)),
    (
        "megatron-lm",
        "fp32",
        "zero-0",
        "e16941cc3147ab31",
        0.0022894620000000004,
        (3074510, 2497577, 3074510, 2497577),
    ),
    ("megatron-lm", "fp32", "zero-1", "b059f4b390ed5445", 0.002357774, (2620453, 2051431, 2620453, 2051431)),
    ("megatron-lm", "fp32", "zero-3", "a419d899019de21b", 0.002357774, (2166396, 1605284, 2166396, 1605284)),
    (
        "megatron-lm",
        "bf16",
        "zero-0",
        "fe9b46f5b040c4ce",
        0.0022561160000000003,
        (2744646, 2433767, 2744646, 2433767),
    ),
    ("megatron-lm", "bf16", "zero-1", "086d6930b8f8b2fa", 0.002323748, (2063561, 1764547, 2063561, 1764547)),
    ("megatron-lm", "bf16", "zero-3", "58f3db7ec405af34", 0.002323748, (1723018, 1429937, 1723018, 1429937)),
    (
        "deepspeed",
        "fp32",
        "zero-0",
        "843f0e7307d87fbb",
        0.0022894620000000004,
        (3528567, 2943724, 3528567, 2943724),
    ),
    ("deepspeed", "fp32", "zero-1", "89c12283be995f7c", 0.002357774, (3074510, 2497577, 3074510, 2497577)),
    ("deepspeed", "fp32", "zero-3", "f27e94f289d85b49", 0.002357774, (3528567, 2943724, 3528567, 2943724)),
    ("deepspeed", "bf16", "zero-0", "1c2e2a8b317be900", 0.002255435, (2744646, 2433767, 2744646, 2433767)),
    (
        "deepspeed",
        "bf16",
        "zero-1",
        "66f006c49454fc6e",
        0.002323578,
        (2063561, 1764547, 2063561, 1764547),
    ),
    (
        "deepspeed",
        "bf16",
        "zero-3",
        "2d8e80262748eaf5",
        0.002323578,
        (2290589, 1987620, 2290589, 1987620),
    ),
)


def with_optimizer(plan: Plan, work: OptimizerWork) -> Plan:
    return plan.model_copy(update={"optimizer": work})


def share_of(parameters: int, sharers: int) -> int:
    return -(-parameters // sharers)


@pytest.mark.parametrize(
    ("stack", "precision", "sharding", "plan_id", "step_s", "peak_bytes"), ADAMW_PREDICTIONS
)
def test_plans_of_adamw_are_predicted_as_ever(
    stack: str, precision: str, sharding: str, plan_id: str, step_s: float, peak_bytes: PEAK
) -> None:
    where = machine(nodes=1)
    plan = plan_of(GRAPH, where, pp=2, dp=2, precision=precision)
    plan = plan.model_copy(update={"sharding": sharding, "stack": stack})
    prediction = step_of(plan, where).prediction
    assert (prediction.step_s, prediction.peak_bytes) == (step_s, peak_bytes)
    assert former_ids(plan.model_copy(update={"launch": "eager"})) == {plan_id}


def test_a_plan_file_names_the_optimizer_unless_it_is_adamw() -> None:
    plan = plan_of(GRAPH, machine())
    assert "optimizer" not in PlanFile(plan).to_json()
    other = with_optimizer(plan, MOMENTUM_SGD)
    assert other.plan_id != plan.plan_id
    assert parse_plan_file(other.model_dump(mode="json")).plan == other


@settings(max_examples=20)
@given(plans(), st.sampled_from(["fp32", "bf16"]))
def test_peaks_differ_by_the_states_that_ranks_keep(plan: Plan, precision: str) -> None:
    plan = plan.model_copy(update={"precision": precision})
    none, one, two = (
        np.array(step_of(with_optimizer(plan, work), SLOW).prediction.peak_bytes) for work in RISING
    )
    held = np.zeros(plan.ranks)
    for index, stage in enumerate(plan.stages):
        parameters = stage_parameters(GRAPH, stage.layers, plan.shape(index))
        # Holders of tied weights share nothing of them out.
        tied = [round(one.parameters(plan.shape(index))) for one in shared_parameters(GRAPH, stage.layers)]
        whole = sum(count - share_of(count, plan.sharers(index)) for count in tied)
        for replica in stage.replicas:
            held[list(replica.ranks)] += 4 * (share_of(parameters, plan.sharers(index)) + whole)
    assert one - none == pytest.approx(held * (1 + ALLOCATOR_SLACK), abs=1)
    assert two - one == pytest.approx(one - none, abs=1)


@settings(max_examples=10)
@given(plans(), st.sampled_from(["fp32", "bf16"]))
def test_tensors_of_a_step_exist_during_steps_only(plan: Plan, precision: str) -> None:
    """One for each stepped parameter of a stage: a rank's share of the stage; peaks never fall."""
    plan = plan.model_copy(update={"precision": precision})
    lists = with_optimizer(plan, FOREACH_ADAMW)
    program, model = compile_plan(lists, GRAPH), CostModel(graph=GRAPH, cluster=SLOW)
    columns, costs = program.columns, price(model, program, lists).costs
    steps = columns.kind == STEP
    shares = [
        share_of(stage_parameters(GRAPH, stage.layers, plan.shape(index)), plan.sharers(index))
        for index, stage in enumerate(plan.stages)
    ]
    held = 4 * np.array(shares)[columns.stage[steps]] * (1 + ALLOCATOR_SLACK)
    assert costs.working[steps] == pytest.approx(held, abs=1)
    fused = price(model, program, plan).costs
    assert not fused.working[steps].any()
    assert np.array_equal(costs.working[~steps], fused.working[~steps])
    with_lists, without = (step_of(one, SLOW).prediction.peak_bytes for one in (lists, plan))
    assert all(more >= less for more, less in zip(with_lists, without, strict=True))
    assert "step_states" not in plan.model_copy(update={"optimizer": MOMENTUM_SGD}).record()["optimizer"]


@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16", "fp16"])
def test_an_update_touches_gradients_weights_masters_and_states(precision: str) -> None:
    element, mixed = (8 if precision == "fp64" else 4), precision in ("bf16", "fp16")
    weights, masters = (2, 4) if mixed else (element, 0)
    for states, work in enumerate(RISING):
        found = state_bytes(precision, work)
        assert found.total == weights + element + masters + states * element
        assert found.touched == element + 2 * (weights + masters + states * element)


@settings(max_examples=20)
@given(plans())
def test_updates_take_as_long_as_the_bytes_they_touch(plan: Plan) -> None:
    program = compile_plan(plan, GRAPH)
    rows = program.columns.kind == STEP
    none, one, two = (
        price(CostModel(graph=GRAPH, cluster=SLOW), program, with_optimizer(plan, work)).costs.occupancy[rows]
        for work in RISING
    )
    assert (none < one).all()
    assert (one < two).all()
    # 12, 20 and 28 bytes in fp32.
    assert two - one == pytest.approx(one - none, abs=2)


def test_a_profile_has_the_updates_of_adamw() -> None:
    shape, layers = Shape(2, GRAPH.sequence), range(len(GRAPH.layers))
    compute = ComputeModel(profile=profile_of(GRAPH))
    none, one, two = (
        compute.stage_times(GRAPH, layers, shape, "fp32", CPU, optimizer=work) for work in RISING
    )
    assert two == compute.stage_times(GRAPH, layers, shape, "fp32", CPU)
    assert one.update_s == pytest.approx(two.update_s * 20 / 28)
    assert none.update_s == pytest.approx(two.update_s * 12 / 28)
    assert replace(none, update_s=0.0) == replace(two, update_s=0.0)


@pytest.mark.parametrize("measured", [None, MACHINE])
def test_one_model_answers_for_several_optimizers(measured: object) -> None:
    """What was evaluated for one plan is not taken for another optimizer's."""
    shape, layers = Shape(2, GRAPH.sequence), range(len(GRAPH.layers))
    shared = ComputeModel(machine=measured)  # type: ignore[arg-type]
    for work in (*RISING, *reversed(RISING)):
        fresh = ComputeModel(machine=measured)  # type: ignore[arg-type]
        expected = fresh.stage_times(GRAPH, layers, shape, "fp32", CPU, optimizer=work)
        assert shared.stage_times(GRAPH, layers, shape, "fp32", CPU, optimizer=work) == expected
