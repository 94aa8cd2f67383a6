"""Tensor ranks go in step: folded, slow and unequal lanes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from filled_plans import kfac
from hypothesis import given, settings
from hypothesis import strategies as st
from predict.cost.machines import cluster
from predict.plans import plan_of

from weft.describe.cluster import Cluster
from weft.describe.families import layer_graph
from weft.describe.models import resolve_model
from weft.errors import InputError
from weft.planning.compile import compile_folded, compile_plan
from weft.predict.cost.placed_plan import CostModel
from weft.predict.predict import PredictedStep, predict
from weft.program.fold import fold_lanes
from weft.program.kinds import BACKWARD_WEIGHT, FORWARD, STEP
from weft.program.program import Edges, Program
from weft.program.verify import verify

GPT_1M = resolve_model("gpt-1m")
GRAPH = layer_graph(GPT_1M)
WHOLE_BACKWARD = ("gpipe", "1f1b", "breadth-first", "depth-first")

shapes = st.fixed_dictionaries(
    {
        "pp": st.sampled_from([1, 2, 4]),
        "dp": st.integers(1, 2),
        "tp": st.sampled_from([2, 4]),
        "micro_batches": st.sampled_from([4, 8]),
        "schedule": st.sampled_from([*WHOLE_BACKWARD, "zb-h1"]),
    }
)
speeds_of_four = st.tuples(*[st.sampled_from([0.5, 0.75, 1.0, 1.25])] * 4)


def with_speeds(where: Cluster, speeds: tuple[float, ...]) -> Cluster:
    (group,) = where.groups
    return replace(where, groups=(replace(group, speeds=speeds),))


def shaped(shape: dict[str, object], where: Cluster):
    loops = 2 if shape["schedule"] in ("breadth-first", "depth-first") and shape["pp"] == 2 else 1
    return plan_of(GRAPH, where, loops=loops, **shape)


def predicted(plan, program: Program, where: Cluster) -> PredictedStep:
    return predict(CostModel(graph=GRAPH, cluster=where), plan, program)


def ends_of(step: PredictedStep, rank: int) -> list[int]:
    timeline = step.simulation.timeline
    return timeline.end_ns[timeline.rank == rank].tolist()


@given(shapes, st.sampled_from([1.0, 0.8]))
@settings(max_examples=30)
def test_one_lane_predicts_what_all_equal_lanes_do(shape, speed) -> None:
    """Lanes that share their node's link divide its time instead of being counted on it, to a rounding."""
    where = with_speeds(cluster(nodes=8, devices=shape["tp"]), (speed,) * shape["tp"])
    plan = shaped(shape, where)
    program = compile_plan(plan, GRAPH)
    whole, folded = (predicted(plan, one, where) for one in (program, fold_lanes(program)))
    assert folded.simulation.steady
    assert whole.simulation.steady
    assert folded.simulation.instructions * shape["tp"] == whole.simulation.instructions
    assert folded.prediction.peak_bytes == whole.prediction.peak_bytes
    assert ends_of(folded, 0) == pytest.approx(ends_of(whole, 0), abs=len(program))
    if shape["pp"] == 1:
        assert ends_of(folded, 0) == pytest.approx(ends_of(whole, 0), abs=shape["tp"])


@given(shapes)
@settings(max_examples=10)
def test_lanes_do_the_work_of_each_layer_together(shape) -> None:
    where = cluster(nodes=8, devices=shape["tp"])
    plan = shaped(shape, where).model_copy(update={"methods": (kfac(GPT_1M, every=2),)})
    program = compile_plan(plan, GRAPH)
    whole, folded = (predicted(plan, one, where) for one in (program, fold_lanes(program)))
    assert folded.simulation.instructions * shape["tp"] == whole.simulation.instructions
    assert ends_of(folded, 0) == pytest.approx(ends_of(whole, 0), abs=len(program))


@given(shapes.filter(lambda shape: shape["schedule"] in WHOLE_BACKWARD), st.data())
@settings(max_examples=30)
def test_a_slow_lane_slows_its_replica_as_if_all_its_lanes_were_slow(shape, data) -> None:
    lanes = shape["tp"]
    slow = data.draw(st.integers(0, lanes - 1))
    some, every = (
        with_speeds(cluster(nodes=8, devices=lanes), speeds)
        for speeds in (tuple(0.6 if lane == slow else 1.0 for lane in range(lanes)), (0.6,) * lanes)
    )
    plan = shaped(shape, some)
    program = compile_plan(plan, GRAPH)
    one, all_of_them = (predicted(plan, program, where) for where in (some, every))
    assert one.simulation.steady
    assert one.prediction == all_of_them.prediction
    assert ends_of(one, slow) == ends_of(all_of_them, slow)


@given(shapes, speeds_of_four)
@settings(max_examples=30)
def test_unequal_lanes_become_steady_and_meet_in_every_pass(shape, speeds) -> None:
    where = with_speeds(cluster(nodes=8, devices=4), speeds)
    plan = shaped(shape, where)
    step = predicted(plan, compile_plan(plan, GRAPH), where)
    timeline = step.simulation.timeline
    assert step.simulation.steady
    mine = np.flatnonzero(timeline.kind == FORWARD)
    replica = timeline.rank[mine] // shape["tp"]
    when: dict[tuple[int, ...], set[tuple[int, int]]] = {}
    places = zip(
        timeline.stage[mine].tolist(), timeline.micro_batch[mine].tolist(), replica.tolist(), strict=True
    )
    for row, place in zip(mine.tolist(), places, strict=True):
        when.setdefault(place, set()).add((int(timeline.start_ns[row]), int(timeline.end_ns[row])))
    assert all(len(times) == 1 for times in when.values())


def test_a_device_takes_its_speeds_share_for_every_computation() -> None:
    where = cluster(nodes=1, devices=2)
    slower = with_speeds(where, (1.0, 0.5))
    plan = plan_of(GRAPH, where, pp=2, schedule="zb-h1")
    program = compile_plan(plan, GRAPH)
    usual, uneven = (predicted(plan, program, one).priced.costs.occupancy for one in (where, slower))
    computes = np.isin(program.columns.kind, [FORWARD, BACKWARD_WEIGHT, STEP])
    half = computes & (program.columns.rank == 1)
    assert half.sum() == 9
    assert uneven[half] == pytest.approx(2 * usual[half], abs=1)
    assert uneven[computes & ~half].tolist() == usual[computes & ~half].tolist()


def test_a_folded_replica_is_as_slow_as_the_slowest() -> None:
    """Two replicas of two devices on one node, of which the last device is slow."""
    where = with_speeds(cluster(nodes=1, devices=4), (1.0, 1.0, 1.0, 0.5))
    plan = plan_of(GRAPH, where, pp=2, dp=2)
    whole = predicted(plan, compile_plan(plan, GRAPH), where).prediction
    folded = predicted(plan, compile_folded(plan, GRAPH, where), where).prediction
    assert folded.step_s == whole.step_s
    assert folded.peak_bytes == whole.peak_bytes


@pytest.mark.parametrize(
    ("devices", "speeds", "folds"),
    [(4, (), True), (4, (0.5, 0.5, 1.0, 1.0), True), (4, (1.0, 1.0, 1.0, 0.5), False), (1, (), False)],
)
def test_lanes_are_folded_only_where_they_are_provably_equal(devices, speeds, folds) -> None:
    where = with_speeds(cluster(nodes=8, devices=devices), speeds)
    plan = plan_of(GRAPH, where, pp=2, dp=2, tp=2)
    program = compile_folded(plan, GRAPH, where)
    assert (program.kept_lane is not None) == folds
    assert program.kept_replica == 0
    assert len(np.unique(program.columns.rank)) == (2 if folds else 4)
    assert verify(program) == []
    whole = predicted(plan, compile_plan(plan, GRAPH), where).prediction
    assert predicted(plan, program, where).prediction.peak_bytes == whole.peak_bytes


def test_a_program_without_tensor_ranks_has_nothing_to_fold() -> None:
    program = compile_plan(plan_of(GRAPH, cluster(), pp=2), GRAPH)
    assert fold_lanes(program) is program


def test_ids_of_the_kept_lane_are_those_of_the_whole_program() -> None:
    program = compile_plan(plan_of(GRAPH, cluster(), pp=2, dp=2, tp=2), GRAPH)
    folded = fold_lanes(program)
    assert len(set(program.ids.tolist())) == len(program)
    kept = np.isin(program.columns.rank, np.unique(folded.columns.rank))
    assert folded.ids.tolist() == program.ids[kept].tolist()


def test_lanes_that_wait_for_each_other_are_not_folded() -> None:
    program = compile_plan(plan_of(GRAPH, cluster(), tp=2, pp=1), GRAPH)
    start = program.rank_starts
    joined = replace(program, edges=Edges.join([program.edges, Edges.of(start[:1], start[1:2])]))
    with pytest.raises(InputError, match="edges between tensor lanes"):
        fold_lanes(joined)
