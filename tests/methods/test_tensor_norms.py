"""Laws: all ranks of a stage exchange its sums in turn, after its gradient is whole and before it steps."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from predict.cost.machines import MODEL, cluster
from predict.plans import plan_of
from program.layouts import asked, schedule_layout

from weft.describe.families import layer_graph
from weft.describe.layer_graph import LayerGraph
from weft.describe.optimizers import LAMB, LANS, OptimizerWork
from weft.methods.tensor_norms.kinds import NAME, TENSOR_NORMS
from weft.methods.tensor_norms.program import Exchanged
from weft.methods.tying.program import TiedWeights
from weft.planning.compile import compile_plan
from weft.predict.cost.placed_plan import CostModel
from weft.predict.cost.price import price
from weft.program.build import build_evaluation_program, build_training_program
from weft.program.checks.report import name
from weft.program.kinds import STEP
from weft.program.program import Edges, Program
from weft.program.schedules import get_schedule
from weft.program.verify import require_valid, verify

ORDERS = (("1f1b", 1), ("zb-h1", 1), ("breadth-first", 2), ("zb-v", 2))


def built(
    order: tuple[str, int],
    pipelines: int,
    lanes: int = 1,
    *,
    numbers: tuple[int, ...] = (1, 3),
    sharding: str = "zero-0",
    norm: bool = False,
    tied: bool = False,
    frozen: int = 0,
    local: bool = False,
) -> Program:
    schedule, loops = order
    layout = schedule_layout(schedule, 2, 2 * loops, (4,) * pipelines, lanes, frozen_stages=frozen)
    weights = [TiedWeights((0, 2 * loops - 1), 96)] if tied else []
    methods = asked(sharding, norm=norm, tied=weights)
    if local:
        methods["sharding"] = replace(methods["sharding"], local=True)
    if numbers:
        methods[NAME] = Exchanged(numbers, (1,) * len(layout.stages), local)
    return build_training_program(layout, get_schedule(schedule), {}, methods=methods)


def rows_of(program: Program) -> np.ndarray:
    return np.flatnonzero(program.columns.kind == TENSOR_NORMS)


@given(
    order=st.sampled_from(ORDERS),
    pipelines=st.integers(1, 3),
    lanes=st.integers(1, 2),
    numbers=st.sampled_from([(2,), (1, 3), (1, 1, 1)]),
    sharding=st.sampled_from(["zero-0", "zero-1", "zero-2", "zero-3"]),
    norm=st.booleans(),
    frozen=st.integers(0, 1),
)
def test_every_step_follows_the_exchanges_of_all_ranks_of_its_stage(
    order: tuple[str, int],
    pipelines: int,
    lanes: int,
    numbers: tuple[int, ...],
    sharding: str,
    norm: bool,
    frozen: int,
) -> None:
    program = built(order, pipelines, lanes, numbers=numbers, sharding=sharding, norm=norm, frozen=frozen)
    require_valid(program)
    columns = program.columns
    steps = np.flatnonzero(columns.kind == STEP)
    several = pipelines * lanes > 1
    assert len(rows_of(program)) == several * len(numbers) * len(steps)
    for step in steps.tolist() if several else ():
        before = np.arange(step - len(numbers), step)
        assert (columns.kind[before] == TENSOR_NORMS).all()
        assert (columns.stage[before] == columns.stage[step]).all()
        assert columns.part[before].tolist() == list(range(len(numbers)))
        # They have bytes in proportion to the numbers.
        assert (columns.bytes[before] * numbers[0] == columns.bytes[before[0]] * np.array(numbers)).all()
        holders = program.obligations.owners.items()
        everyone = {rank for (stage, _), ranks in holders if stage == columns.stage[step] for rank in ranks}
        assert {program.groups[group] for group in columns.group[before]} == {tuple(sorted(everyone))}


def test_replicas_that_step_by_themselves_exchange_apart() -> None:
    program = built(("1f1b", 1), 2, 2, local=True)
    require_valid(program)
    groups = {program.groups[group] for group in program.columns.group[rows_of(program)].tolist()}
    assert groups == set(program.obligations.owners.values())
    assert not len(rows_of(built(("1f1b", 1), 2, local=True)))


def test_nothing_else_of_a_program_changes() -> None:
    exchanging, plain = (built(("1f1b", 1), 2, numbers=numbers, tied=True) for numbers in ((2,), ()))
    kept = exchanging.columns.kind != TENSOR_NORMS
    assert np.array_equal(exchanging.ids[kept], plain.ids)
    assert exchanging.obligations.methods.keys() - plain.obligations.methods.keys() == {NAME}


def test_an_evaluation_exchanges_nothing() -> None:
    layout = schedule_layout("1f1b", 2, 2, (4, 4))
    program = build_evaluation_program(layout, methods={NAME: Exchanged((2,), (1, 1))})
    assert not len(rows_of(program))


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("sharding", ["zero-0", "zero-1"])
def test_a_part_needs_what_a_step_needs(sharding: str, norm: bool) -> None:
    program = built(("zb-h1", 1), 2, sharding=sharding, norm=norm, tied=True)
    edges, kind = program.edges, program.columns.kind
    own = np.flatnonzero((kind[edges.source] == TENSOR_NORMS) | (kind[edges.target] == TENSOR_NORMS))
    for dropped in own.tolist():
        kept = np.arange(len(edges)) != dropped
        without = Edges(source=edges.source[kept], target=edges.target[kept], distance=edges.distance[kept])
        problems = " ".join(map(str, verify(replace(program, edges=without))))
        ends = edges.source[dropped], edges.target[dropped]
        source, target = (name(program, int(row)) for row in ends)
        assert f"{target} does not wait for {source}" in problems


def test_an_exchange_without_a_rank_of_its_stage_is_refused() -> None:
    program = built(("1f1b", 1), 3)
    groups = tuple(group[:-1] if len(group) == 3 else group for group in program.groups)
    assert "TN0 does not add up the sums of all ranks of its stage" in " ".join(
        map(str, verify(replace(program, groups=groups)))
    )


def test_sums_that_nobody_owes_are_refused() -> None:
    program = built(("1f1b", 1), 2, numbers=(2,))
    lighter = replace(program, obligations=replace(program.obligations, methods={}))
    assert "nothing reads the 'whole_sums' that rank 0 TN0 makes" in " ".join(map(str, verify(lighter)))


def seconds(graph: LayerGraph, replicas: int, work: OptimizerWork) -> tuple[float, float]:
    """Of a step and of its exchanges, in ticks, on ranks of one stage."""
    where = cluster(nodes=1, devices=2)
    plan = plan_of(graph, where, pp=1, dp=replicas, micro_batches=1)
    plan = plan.model_copy(update={"optimizer": work})
    program = compile_plan(plan, graph)
    occupancy, kind = (
        price(CostModel(graph=graph, cluster=where), program, plan).costs.occupancy,
        program.columns.kind,
    )
    mine = program.columns.rank == 0
    return occupancy[mine & (kind == STEP)].sum(), occupancy[mine & (kind == TENSOR_NORMS)].sum()


@pytest.mark.parametrize("work", [LAMB, LANS])
def test_exchanges_take_over_equal_parts_of_the_update(work: OptimizerWork) -> None:
    graph, exchanges = layer_graph(MODEL), len(work.whole_sums)
    (alone, nothing), (step, exchanged) = (seconds(graph, replicas, work) for replicas in (1, 2))
    assert nothing == 0
    assert step == pytest.approx(alone / (1 + exchanges), rel=0.02)
    # The rest are sums of a few kilobytes.
    assert alone * exchanges / (1 + exchanges) < exchanged
    slower, _ = seconds(graph, 1, LAMB.model_copy(update={"moved_bytes": 2 * LAMB.moved_bytes}))
    assert slower > seconds(graph, 1, LAMB)[0]
