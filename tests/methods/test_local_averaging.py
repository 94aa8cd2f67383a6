"""Laws: replicas exchange nothing but weights, once in every K steps; a program that does else is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from program.mutations import without_edge, without_row
from small_plans import make_plan, make_program, tiny

from weft.describe.amount import Shape
from weft.describe.cluster_file import parse_cluster
from weft.describe.families import layer_graph
from weft.describe.layer_graph import LayerGraph
from weft.describe.models import resolve_model
from weft.describe.plan import Choice, Plan
from weft.describe.reading import parse_toml
from weft.describe.run_file import parse_run
from weft.describe.synchronisation import wire_of
from weft.errors import InputError
from weft.methods.gradient_norm.kinds import NORM
from weft.methods.local_averaging.kinds import AVERAGE_WEIGHTS, AveragesWeights
from weft.methods.local_averaging.options import LocalAveragingOptions
from weft.methods.local_averaging.program import decide
from weft.planning.compile import compile_evaluation, compile_folded, compile_part, compile_plan
from weft.planning.job_rules import refused_by_methods
from weft.planning.planned import plan_run
from weft.predict.cost.network import Network
from weft.predict.cost.placed_plan import CostModel
from weft.predict.predict import predict
from weft.predict.simulator import Simulation
from weft.program.kinds import STEP, is_collective
from weft.program.program import Columns, Program
from weft.program.rank_program import digests
from weft.program.verify import require_valid, verify
from weft.timeline.figures import step_breakdown

CONFIG = tiny(layers=2)
ORDERS = [("gpipe", 1, 1), ("1f1b", 2, 1), ("breadth-first", 2, 2), ("zb-h1", 2, 1), ("chimera", 2, 1)]


def averaging(every: int, *order: str | int, method: str = "local-averaging", **options: float | str) -> Plan:
    schedule, pp, loops = order or ORDERS[1]
    plan = make_plan(CONFIG, pp=pp, dp=2, loops=loops, schedule=schedule, precision="fp32")
    sync = Choice(name=method, options={"every": every, **options})
    return plan.model_copy(update={"sync": sync})


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("every", [1, 2, 3])
def test_every_stage_is_averaged_by_all_its_replicas_after_its_last_step(
    every: int, order: tuple[str, int, int]
) -> None:
    plan = averaging(every, *order)
    program = make_program(CONFIG, plan)
    require_valid(program)
    columns = program.columns
    assert program.steps_per_cycle == every
    rows = np.flatnonzero(is_collective(columns.kind))
    assert set(columns.kind[rows]) == {AVERAGE_WEIGHTS}
    assert set(columns.iteration[rows]) == {every - 1}
    steps = np.flatnonzero(columns.kind == STEP)
    assert len(steps) == every * len(rows)
    holders = [{rank for copy in stage.replicas for rank in copy.ranks} for stage in plan.stages]
    for row in rows.tolist():
        assert set(program.groups[columns.group[row]]) == holders[columns.stage[row]]


def test_steps_and_forwards_of_a_cycle_are_those_of_one_step_each() -> None:
    one, three = (make_program(CONFIG, averaging(every)) for every in (1, 3))
    for iteration in range(3):
        mine = np.flatnonzero(three.columns.iteration == iteration)
        kinds = three.columns.kind[mine]
        others = one.columns.kind[one.columns.kind != AVERAGE_WEIGHTS]
        assert np.array_equal(kinds[kinds != AVERAGE_WEIGHTS], others)


def test_an_evaluation_averages_nothing() -> None:
    program = compile_evaluation(averaging(3), layer_graph(CONFIG))
    require_valid(program)
    assert program.steps_per_cycle == 1
    assert not (program.columns.kind == AVERAGE_WEIGHTS).any()


@given(every=st.integers(1, 40), data=st.data())
def test_the_steps_that_a_replica_takes_are_spread_evenly_and_end_with_the_cycle(
    every: int, data: st.DataObject
) -> None:
    own = data.draw(st.integers(1, every))
    options = LocalAveragingOptions(every=every, replica_steps=f"{every} {own}")
    whole, taken = options.taken(2)
    assert whole == tuple(range(every))
    assert len(taken) == own
    assert taken[-1] == every - 1
    gaps = {later - step for step, later in pairwise((-1, *taken))}
    assert gaps <= {every // own, -(-every // own)}


@given(
    order=st.sampled_from([*ORDERS[:4], ("gpipe", 2, 1)]),
    steps=st.lists(st.integers(1, 4), min_size=2, max_size=2).filter(lambda steps: 4 in steps),
    clips=st.booleans(),
)
def test_a_replica_that_rests_has_no_instructions_and_all_parts_are_those_of_the_whole(
    order: tuple[str, int, int], steps: list[int], clips: bool
) -> None:
    plan = averaging(4, *order, replica_steps=" ".join(map(str, steps)))
    if clips:
        plan = plan.model_copy(update={"methods": (Choice(name="gradient-norm"),)})
    program, graph = make_program(CONFIG, plan), layer_graph(CONFIG)
    require_valid(program)
    columns = program.columns
    for replica, own in enumerate(LocalAveragingOptions(**plan.sync.options).taken(2)):
        mine = columns.replica == replica
        assert set(columns.iteration[mine].tolist()) == set(own)
        assert set(columns.iteration[mine & (columns.kind == STEP)].tolist()) == set(own)
        assert set(columns.iteration[mine & (columns.kind == AVERAGE_WEIGHTS)].tolist()) == {3}
    parts = [compile_part(plan, graph, rank) for rank in range(plan.ranks)]
    assert [part.digest for part in parts] == digests(program).tolist()


def _average_of(program: Program) -> int:
    return int(np.flatnonzero(program.columns.kind == AVERAGE_WEIGHTS)[0])


def _doubled(program: Program) -> Program:
    """The same averaging once more, under the number of another part."""
    row = _average_of(program)
    order = np.insert(np.arange(len(program)), row + 1, row)
    columns = program.columns.take(order)
    part = columns.part.copy()
    part[row + 1] = 1
    edges = program.edges
    moved = (edges.source + (edges.source > row), edges.target + (edges.target > row))
    return replace(
        program,
        columns=Columns(**{**vars(columns), "part": part}),
        edges=replace(edges, source=moved[0], target=moved[1]),
    )


def _in_another_step(program: Program) -> Program:
    iteration = program.columns.iteration.copy()
    iteration[_average_of(program)] = 0
    return replace(program, columns=replace(program.columns, iteration=iteration))


def _alone(program: Program) -> Program:
    group = program.columns.group.copy()
    row = _average_of(program)
    group[row] = len(program.groups)
    groups = (*program.groups, (int(program.columns.rank[row]),))
    return replace(program, columns=replace(program.columns, group=group), groups=groups)


def _not_awaited(program: Program) -> Program:
    """Without the edges from the averaging to what reads the weights in the next cycle."""
    while True:
        edges = program.edges
        reaching = (edges.source == _average_of(program)) & (edges.distance == 1)
        if not reaching.any():
            return program
        program = without_edge(program, int(np.flatnonzero(reaching)[0]))


def _too_early(program: Program) -> Program:
    edges = program.edges
    return without_edge(program, int(np.flatnonzero(edges.target == _average_of(program))[0]))


def _swapped(program: Program, ranks: int) -> Program:
    """The first two steps of the cycle in each other's place, on so many ranks."""
    columns = program.columns
    other = np.array([1, 0, 2])[columns.iteration]
    iteration = np.where(columns.rank < ranks, other, columns.iteration)
    return replace(program, columns=replace(columns, iteration=iteration))


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (
            lambda program: _swapped(program, 1),
            "rank 0 SF0.0 to rank 1 of step 1 -> rank 0 SF0.0 to rank 1 of",
        ),
        (lambda program: _swapped(program, program.ranks), "does not wait for rank 0 O0 of step 0"),
        (lambda program: without_row(program, _average_of(program)), "runs 0 times on rank 0, not 1"),
        (_doubled, "runs 2 times on rank 0, not 1"),
        (_in_another_step, "step 0 of replica 0 runs 1 times on rank 0, not 0"),
        (_alone, "is not with all replicas of its stage"),
        (_not_awaited, "does not wait for rank 0 AW0 of step 2, which makes its 'weights'"),
        (_too_early, "rank 0 AW0 of step 2 does not wait for rank 0 O0 of step 2"),
    ],
)
def test_a_program_that_averages_otherwise_is_refused(
    broken: Callable[[Program], Program], said: str
) -> None:
    program = make_program(CONFIG, averaging(3))
    assert said in "; ".join(str(one) for one in verify(broken(program)))


def test_a_step_is_a_part_of_a_predicted_cycle() -> None:
    graph, cluster = layer_graph(CONFIG), parse_cluster("4xa100-80gb")
    steps = {}
    for every in (1, 4):
        plan = averaging(every)
        whole = predict(CostModel(graph=graph, cluster=cluster), plan, make_program(CONFIG, plan))
        folded = predict(CostModel(graph=graph, cluster=cluster), plan, compile_folded(plan, graph, cluster))
        assert folded.prediction.step_s == pytest.approx(whole.prediction.step_s, rel=1e-6)
        assert len(np.unique(whole.simulation.timeline.step)) == every
        steps[every] = whole.prediction.step_s
    assert steps[4] < steps[1]


def test_replicas_that_take_other_numbers_of_steps_than_owed_are_named() -> None:
    program = make_program(CONFIG, averaging(3, replica_steps="3 2"))
    owed = AveragesWeights(every=3, steps=(3, 3))
    methods = {**program.obligations.methods, "local-averaging": owed}
    other = replace(program, obligations=replace(program.obligations, methods=methods))
    said = "; ".join(str(one) for one in verify(other))
    assert "averagings: replica 1 takes 2 steps of stage 0 in a cycle (nearest valid: 3)" in said
    assert "replica 0" not in said


UNEQUAL = parse_cluster("1xa100-80gb+1xv100-32gb")


def waiting(plan: Plan, graph: LayerGraph) -> float:
    program = compile_plan(plan, graph)
    require_valid(program)
    predicted = predict(CostModel(graph=graph, cluster=UNEQUAL), plan, program)
    breakdown = step_breakdown(
        predicted.simulation.timeline,
        program.columns.peer,
        predicted.simulation.step_s,
        cycle=program.steps_per_cycle,
    )
    return breakdown["waiting"] / sum(breakdown.values())


def test_unequal_devices_take_their_own_steps_and_meet_with_little_idle_time() -> None:
    config = resolve_model("gpt2")
    graph, model = layer_graph(config), CostModel(graph=layer_graph(config), cluster=UNEQUAL)
    plain = make_plan(config, pp=1, dp=2, schedule="gpipe", precision="fp32")
    plan = plain.model_copy(
        update={"sync": Choice(name="local-averaging", options={"every": 32, "replica_steps": "auto"})}
    )

    def predicted(plan: Plan) -> tuple[Program, Simulation]:
        program = compile_plan(plan, graph)
        return program, predict(model, plan, program).simulation

    decided = decide(plan, graph, predicted)
    assert decide(decided, graph, predicted) == decided
    fast, slow = map(int, decided.sync.options["replica_steps"].split())
    assert fast == 32 > slow
    idle, own_idle = waiting(plan, graph), waiting(decided, graph)
    assert own_idle < 0.03 < 0.1 < idle

    def step_s(own: int) -> float:
        options = {**decided.sync.options, "replica_steps": f"32 {own}"}
        other = plan.model_copy(update={"sync": Choice(name="local-averaging", options=options)})
        return predict(model, other, compile_plan(other, graph)).prediction.step_s

    # The fast replica alone decides how long a cycle takes, until the slow one takes one step more.
    assert step_s(slow - 1) == step_s(slow) < step_s(slow + 1)


def test_the_planner_decides_own_steps_and_the_plan_records_them() -> None:
    text = (
        '[model]\npreset = "gpt2"\n[cluster]\nuse = "1xa100-80gb+1xv100-32gb"\n[goal]\n'
        'contract = "empirical"\n[sync]\nmethod = "diloco"\nevery = 8\nreplica_steps = "auto"\n'
        '[plan]\npp = 1\ndp = 2\n[train]\nglobal_batch = 2\nprecision = "fp32"\n'
    )
    job = plan_run(parse_run(parse_toml(text, "run")))
    steps = str(job.plan.sync.options["replica_steps"]).split()
    assert len(steps) == 2
    assert max(map(int, steps)) == 8 > min(map(int, steps))
    assert job.program.steps_per_cycle == 8


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ("3 4", "replica_steps: '4' is not one of 1 to 3, the steps of a cycle (nearest valid: auto)"),
        ("3 many", "replica_steps: 'many' is not one of 1 to 3, the steps of a cycle"),
        ("3 0", "replica_steps: '0' is not one of 1 to 3"),
        ("2 1", "replica_steps: no replica takes all 3 steps of a cycle"),
        ("3 2 1", "sync.replica_steps: 3 numbers for 2 replicas"),
    ],
)
def test_wrong_numbers_of_steps_are_refused_in_one_line(steps: str, said: str) -> None:
    with pytest.raises(InputError) as refused:
        make_program(CONFIG, averaging(3, replica_steps=steps))
    [line] = refused.value.violations
    assert said in str(line)


def test_numbers_of_all_replicas_in_every_step_refuse_rests() -> None:
    plan = averaging(3, replica_steps="3 2")
    told = plan.model_copy(update={"methods": (Choice(name="micro-batch-norms"),)})
    with pytest.raises(InputError, match="no replica rests in a step with micro-batch-norms"):
        make_program(CONFIG, told)
    with pytest.raises(InputError, match="no replica rests in a step with two paths on the same ranks"):
        make_program(CONFIG, averaging(3, *ORDERS[4], replica_steps="3 3 2 2"))


@pytest.mark.parametrize(
    ("method", "numbers"), [("slow-momentum", 1.0), ("diloco", 1.0), ("sign-momentum", 1.5)]
)
def test_two_replicas_share_out_what_an_outer_step_keeps(method: str, numbers: float) -> None:
    graph, cluster = layer_graph(CONFIG), parse_cluster("4xa100-80gb")
    plain, outer = (
        predict(CostModel(graph=graph, cluster=cluster), plan, make_program(CONFIG, plan)).prediction
        for plan in (averaging(2), averaging(2, method=method))
    )
    shape = Shape(1, CONFIG.sequence)
    parameters = sum(layer.parameters(shape) for layer in graph.layers)
    more = sum(outer.peak_bytes) - sum(plain.peak_bytes)
    assert more == pytest.approx(numbers * 2 * 4 * parameters * 1.03, rel=0.01)
    assert outer.step_s > plain.step_s


def test_signs_come_down_in_two_bits_of_each_number_of_32() -> None:
    network = Network(cluster=parse_cluster("2xa100-80gb+2xt4"))
    whole_s, signs_s = (
        network.carrying(wire_of(averaging(1, method="sign-momentum", download=download)))
        .all_reduce((0, 2), 10**9)
        .seconds
        for download in ("weights", "signs")
    )
    assert signs_s == pytest.approx(whole_s * (1 + 1 / 16) / 2, rel=1e-3)


def test_an_outer_step_of_averages_is_asked_for_by_its_own_name() -> None:
    with pytest.raises(InputError, match=r"local averaging has no outer step; sync\.method diloco has one"):
        make_program(CONFIG, averaging(2, outer_momentum=0.9))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"sharding": "zero-1"}, "zero-1: replicas that step by themselves share nothing out"),
        ({"sync": Choice(name="local-averaging")}, "sync: every: missing"),
        ({"sync": Choice(name="local-averaging", options={"every": 0})}, "sync: every: 0"),
    ],
)
def test_what_does_not_go_together_is_refused(change: dict[str, object], said: str) -> None:
    with pytest.raises(InputError) as refused:
        make_program(CONFIG, averaging(2).model_copy(update=change))
    [line] = refused.value.violations
    assert said in str(line)


def test_one_replica_has_nobody_to_average_with() -> None:
    plan = make_plan(CONFIG).model_copy(update={"sync": averaging(2).sync})
    with pytest.raises(InputError, match="one replica has nobody to average with"):
        make_program(CONFIG, plan)


@pytest.mark.parametrize("method", ["local-averaging", "sign-momentum", "diloco", "slow-momentum"])
def test_a_run_that_ends_before_replicas_agree_is_refused_before_its_start(method: str) -> None:
    text = (
        '[model]\npreset = "gpt-1m"\n[cluster]\nuse = "2xa100-80gb"\n[goal]\ncontract = "empirical"\n'
        f'[sync]\nmethod = "{method}"\nevery = 8\n[plan]\npp = 1\ndp = 2\n'
        "[train]\nglobal_batch = 8\nsteps = "
    )
    few, enough = (plan_run(parse_run(parse_toml(f"{text}{steps}\n", "run"))) for steps in (7, 8))
    [problem] = refused_by_methods(few)
    assert str(problem).startswith("train.steps: 7; replicas average every 8 steps, so they never would")
    assert not refused_by_methods(enough)


@pytest.mark.parametrize("method", ["local-averaging", "sign-momentum"])
def test_losses_of_replicas_that_step_by_themselves_are_not_scaled(method: str) -> None:
    text = (
        '[model]\npreset = "gpt-1m"\n[cluster]\nuse = "2xv100-16gb"\n[goal]\ncontract = "empirical"\n'
        f'[sync]\nmethod = "{method}"\nevery = 2\n[plan]\npp = 1\ndp = 2\n'
        '[train]\nglobal_batch = 8\nprecision = "fp16"\n'
    )
    with pytest.raises(InputError, match=f"{method}: replicas .* have no common factor of their losses"):
        plan_run(parse_run(parse_toml(text, "run")))


def test_the_norm_of_a_replica_is_taken_by_its_own_ranks() -> None:
    plan = averaging(2, "1f1b", 2, 1).model_copy(update={"methods": (Choice(name="gradient-norm"),)})
    program = make_program(CONFIG, plan)
    require_valid(program)
    columns = program.columns
    rows = np.flatnonzero(columns.kind == NORM)
    assert len(rows) == 2 * plan.ranks
    pairs = {(int(columns.replica[row]), program.groups[columns.group[row]]) for row in rows}
    assert pairs == {(0, (0, 1)), (1, (2, 3))}
    graph, cluster = layer_graph(CONFIG), parse_cluster("4xa100-80gb")
    whole = predict(CostModel(graph=graph, cluster=cluster), plan, program)
    folded = predict(CostModel(graph=graph, cluster=cluster), plan, compile_folded(plan, graph, cluster))
    assert folded.prediction.step_s == pytest.approx(whole.prediction.step_s, rel=1e-6)


def test_replicas_on_the_same_ranks_have_no_norms_of_their_own() -> None:
    chimera = averaging(2, "chimera", 2, 1).model_copy(update={"methods": (Choice(name="gradient-norm"),)})
    with pytest.raises(InputError, match="a rank holds stages of several replicas"):
        make_program(CONFIG, chimera)
