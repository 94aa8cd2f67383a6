"""Expert ranks: what planners try, what is refused, and bounds that hold."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from described_decoders import described
from hypothesis import assume, given
from hypothesis import strategies as st
from predict.cost.machines import CPU, profile_of

from weft.describe.amount import Shape
from weft.describe.layout import Layout, PartialLayout
from weft.describe.plan import GRADIENT_NORM, Choice, LayerChoice
from weft.describe.plan_file import check_plan
from weft.moves.layout import build_plan, refuse
from weft.planning.compile import compile_plan
from weft.planning.planners.bounds import Bounds
from weft.planning.planners.space import layouts
from weft.planning.problem import Problem, problem_of
from weft.predict.cost.compute import ComputeModel
from weft.predict.cost.exchanges import COUNT_BYTES, LOSS_BYTES, stage_exchanges
from weft.predict.cost.memory import alike_parameters, gradient_element_bytes
from weft.predict.cost.network import Network
from weft.predict.cost.placed_plan import CostModel
from weft.predict.predict import predict

BASE = Layout(pp=1, dp=2, loops=1, micro_batch_size=4, schedule="1f1b", ep=2)


@pytest.fixture(scope="module")
def problem(tmp_path_factory: pytest.TempPathFactory) -> Problem:
    folder = tmp_path_factory.mktemp("mixture")
    described(folder, "mixtral", num_local_experts=8)
    return problem_of(model=str(folder), on="16xa100-40gb", global_batch=16)


def test_planners_try_the_degrees_that_divide_experts_and_samples(problem: Problem) -> None:
    space = list(layouts(problem))
    assert {one.ep for one in space} == {1, 2, 4, 8}
    assert {one.tp for one in space if one.ep > 1} == {one.tp for one in space} > {1}
    assert all(16 % (one.tp * one.ep) == 0 for one in space)
    assert all(one.micro_batch_size % one.ep == 0 for one in space)
    pinned = replace(problem, pins=PartialLayout(ep=4))
    assert {one.ep for one in layouts(pinned)} == {4}


def test_dense_models_have_no_expert_ranks() -> None:
    dense = problem_of(model="llama-1m", on="16xa100-40gb", global_batch=16)
    assert {one.ep for one in layouts(dense)} == {1}
    assert refuse(dense.job, BASE) == "ep 2: the model has no experts; nearest ep: 1"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"ep": 3, "micro_batch_size": 6, "dp": 1}, "16"),
        ({"ep": 16, "micro_batch_size": 16, "dp": 1}, "ep 16 does not divide 8 experts; nearest ep: 8"),
        ({"micro_batch_size": 1}, "ep 2 does not divide 1 samples of a micro-batch; nearest ep: 1"),
        ({"splits": (4,)}, "ep 2 does not divide 1 samples of a micro-batch; nearest ep: 1"),
        ({"sync": "local-averaging"}, "nearest sync: dense"),
        ({"methods": (Choice(name="micro-batch-norms"),)}, "without micro-batch-norms, or nearest ep: 1"),
    ],
)
def test_refused_in_one_line(problem: Problem, changes: dict[str, object], reason: str) -> None:
    # The fields of a layout have several types.
    changed = replace(BASE, **changes)  # type: ignore[arg-type]
    found = refuse(problem.job, changed)
    assert found is not None
    assert reason in found
    assert "\n" not in found


def test_every_stage_s_samples_are_divided(problem: Problem) -> None:
    unlike = replace(BASE, pp=2, dp=1, ep=4, micro_batch_size=12, splits=(3, 2))
    reason = "ep 4 does not divide 6 samples of a micro-batch; nearest ep: 2"
    assert refuse(replace(problem.job, global_batch=24), unlike) == reason


def test_kernels_of_layers_are_refused_and_losses_are_not(problem: Problem) -> None:
    assert refuse(problem.job, replace(BASE, loss="chunked")) is None
    rounded = LayerChoice(name="fp8-linears", layers=(1,), value="tensor")
    found = refuse(replace(problem.job, layer_choices=(rounded,)), BASE)
    assert found is not None
    assert "without fp8-linears, or nearest ep: 1" in found


def test_a_plan_edited_by_hand_is_refused(problem: Problem) -> None:
    job = problem.job
    layer_s = [1.0] * len(job.graph.layers)
    plan = build_plan(job, replace(BASE, methods=(Choice(name=GRADIENT_NORM),)), layer_s)
    assert check_plan(plan, job.graph, job.cluster) == []
    wrong = {
        "three samples": {"micro_batch_size": 1, "global_batch": 4},
        "another method": {"methods": (Choice(name="micro-batch-norms"),)},
        "four ranks": {"mesh": {"pp": 1, "dp": 1, "ep": 4}},
    }
    for name, update in wrong.items():
        edited = plan.model_copy(update=update)
        assert check_plan(edited, job.graph, job.cluster), name
    divided = build_plan(job, replace(BASE, tp=2), layer_s)
    assert check_plan(divided, job.graph, job.cluster) == []


@given(data=st.data())
def test_no_step_is_shorter_and_no_peak_lower_than_its_bound(problem: Problem, data: st.DataObject) -> None:
    bounds, job = Bounds(problem), problem.job
    ep = data.draw(st.sampled_from([1, 2, 4, 8]))
    layout = Layout(
        tp=data.draw(st.sampled_from([1, 2])),
        cp=data.draw(st.sampled_from([1, 2])),
        pp=data.draw(st.sampled_from([1, 2])),
        dp=data.draw(st.sampled_from([1, 2])),
        ep=ep,
        loops=data.draw(st.sampled_from([1, 2])),
        micro_batch_size=ep * data.draw(st.sampled_from([1, 2])),
        schedule=data.draw(st.sampled_from(["1f1b", "gpipe", "breadth-first"])),
        sharding=data.draw(st.sampled_from(["zero-0", "zero-1", "zero-2", "zero-3"])),
        recompute=data.draw(st.sampled_from(["none", "full"])),
    )
    assume(refuse(job, layout) is None)
    plan = build_plan(job, layout, bounds.layer_seconds(layout))
    costs = CostModel(graph=job.graph, cluster=job.cluster)
    prediction = predict(costs, plan, compile_plan(plan, job.graph)).prediction
    assert prediction.step_s >= bounds.step_s(layout) * (1 - 1e-6)
    assert bounds.holding(layout).total <= max(prediction.peak_bytes)


def test_more_expert_ranks_hold_less_and_send_more(problem: Problem) -> None:
    job = problem.job
    peaks, steps = [], []
    for ep in (1, 2, 4, 8):
        layout = replace(BASE, ep=ep, dp=16 // ep, micro_batch_size=ep)
        plan = build_plan(job, layout, [1.0] * len(job.graph.layers))
        found = predict(CostModel(graph=job.graph, cluster=job.cluster), plan, compile_plan(plan, job.graph))
        peaks.append(max(found.prediction.peak_bytes))
        steps.append(found.prediction.step_s)
    assert peaks == sorted(peaks, reverse=True)
    assert len(set(peaks)) == len(peaks)
    assert steps[1] > steps[0]


def test_rows_go_to_their_experts_and_back_in_each_pass(problem: Problem) -> None:
    """With equally busy experts, whose counts of rows go first in forward passes.

    The last stage sends the loss, and gradients of experts stay.
    """
    graph, cluster = problem.job.graph, problem.job.cluster
    layout = replace(BASE, dp=1, ep=4, recompute="full")
    plan = build_plan(problem.job, layout, [1.0] * len(graph.layers))
    network, shape, ranks = Network(cluster=cluster), plan.shape(0), (0, 1, 2, 3)
    [found] = stage_exchanges(plan, graph, network, [np.array([ranks])])[0].exchanges
    tokens = shape.micro_batch_size * shape.sequence
    rows_bytes = tokens * 2 * problem.model.hidden * plan.element_bytes
    there_s = problem.model.layers * network.all_to_all(ranks, rows_bytes).seconds
    counts_s = problem.model.layers * network.all_gather(ranks, 4 * graph.experts * COUNT_BYTES).seconds
    assert found.backward_s == pytest.approx(2 * there_s)
    assert found.again_s == pytest.approx(2 * there_s + counts_s)
    loss_s = network.all_gather(ranks, 4 * LOSS_BYTES).seconds
    assert found.forward_s == pytest.approx(2 * there_s + counts_s + loss_s)
    alike = alike_parameters(graph, range(len(graph.layers)), shape)
    experts = sum(
        layer.parameters(replace(shape, expert_parallel=1)) - layer.parameters(shape)
        for layer in graph.layers
    )
    assert alike == graph.parameters() - round(experts * 4 / 3)
    gradient_bytes = gradient_element_bytes(plan) * alike
    assert found.gradient_s == pytest.approx(network.all_reduce_s(ranks, gradient_bytes))


def test_a_rank_updates_its_own_experts_also_by_a_profile(problem: Problem) -> None:
    """A profile has whole layers; passes of a rank's samples take as long as without expert ranks."""
    graph = problem.job.graph
    model, layers = ComputeModel(profile=profile_of(graph)), range(len(graph.layers))
    whole, divided = (
        model.stage_times(graph, layers, Shape(2, graph.sequence, expert_parallel=ep), "fp32", CPU)
        for ep in (1, 4)
    )
    assert divided.forward_s == whole.forward_s
    assert divided.backward_input_s + divided.backward_weight_s == pytest.approx(
        whole.backward_input_s + whole.backward_weight_s
    )
    each = whole.update_s / len(layers)
    shares = (
        layer.parameters(Shape(2, graph.sequence, expert_parallel=4))
        / layer.parameters(Shape(2, graph.sequence))
        for layer in graph.layers
    )
    assert divided.update_s == pytest.approx(each * sum(shares))
