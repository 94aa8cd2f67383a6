"""Offload adds copies that are waited for, and the device holds no more than they leave."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from moves.contexts import context
from predict.cost.machines import CPU, GPU, MODEL, cluster
from predict.plans import plan_of
from program.layouts import asked, pipelines, schedule_layout
from program.mutations import without_edge, without_row
from program.rendezvous import stuck_rows

from weft.cli.shown import simulation_record
from weft.cli.tables.plan import host_memory_text
from weft.describe.families import layer_graph
from weft.describe.optimizers import PLAIN_SGD
from weft.describe.plan import Blocking, Choice, Plan, Sharding
from weft.describe.plan_file import check_plan
from weft.describe.plan_subject import subject_of
from weft.describe.request import request_of_subject
from weft.describe.run_file import parse_run
from weft.errors import InputError
from weft.methods.offload.kinds import (
    LOAD_ACTIVATIONS,
    LOAD_STATES,
    RELEASE,
    ROOM,
    STORE_ACTIVATIONS,
    STORE_STATES,
    Offloads,
)
from weft.methods.offload.options import Offloaded
from weft.methods.offload.program import OffloadOptions
from weft.methods.offload.verify import RESIDENT_STATES
from weft.moves.registry import all_moves
from weft.planning.compile import compile_plan
from weft.planning.planned import plan_run
from weft.predict.cost.host_link import EFFICIENCY, LATENCY_S
from weft.predict.cost.memory import stage_kept_bytes
from weft.predict.cost.placed_plan import CostModel
from weft.predict.cost.price import Priced, price
from weft.predict.simulator import simulate
from weft.program.build import build_training_program
from weft.program.kinds import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, COMPUTATIONS, FORWARD
from weft.program.program import NONE, Program
from weft.program.schedules import get_schedule
from weft.program.verify import verify
from weft.timeline.figures import COPIES

GRAPH = layer_graph(MODEL)
HOST_BYTES_PER_S = 32e9
MACHINES = cluster(device=replace(GPU, host_bytes_per_s=HOST_BYTES_PER_S))
ADDED = (STORE_ACTIVATIONS, LOAD_ACTIVATIONS, STORE_STATES, LOAD_STATES, RELEASE, ROOM)
Case = tuple[str, int, int, tuple[int, ...], int]


@st.composite
def chosen(draw: st.DrawFn) -> tuple[Case, Offloaded, Sharding]:
    case = draw(pipelines())
    name, devices, stages, micro_batches, lanes = case
    some = st.lists(st.integers(0, stages - 1), unique=True).map(lambda one: tuple(sorted(one)))
    level = draw(st.sampled_from(("zero-0", "zero-1", "zero-3")))
    if level == "zero-3":
        case = name, devices, stages, micro_batches[:1] * len(micro_batches), lanes
    # Some laws are about plans that offload the activations of all stages.
    activations = draw(some | st.just(tuple(range(stages))))
    return case, Offloaded(states=draw(some), activations=activations), level


def program_of(
    case: Case, stages: Offloaded, sharding: Sharding = "zero-0", blocking: tuple[Blocking, ...] = ()
) -> Program:
    name, *sizes = case
    layout = schedule_layout(name, *sizes)
    count = len(layout.stages)
    options = OffloadOptions(stages, tuple(range(100, 100 + count)), tuple(range(10, 10 + count)))
    methods = asked(sharding, blocking=blocking) | {"offload": options}
    return build_training_program(layout, get_schedule(name), {}, methods=methods)


@given(chosen())
def test_every_offloading_program_is_proved_and_runs_to_its_end(
    drawn: tuple[Case, Offloaded, Sharding],
) -> None:
    program = program_of(*drawn)
    assert verify(program) == []
    assert not stuck_rows(program)


@given(chosen())
def test_offload_adds_no_deadlock_where_devices_wait_for_messages(
    drawn: tuple[Case, Offloaded, Sharding],
) -> None:
    case, stages, sharding = drawn
    plain, moved = (program_of(case, one, sharding, ("messages",)) for one in (Offloaded(), stages))
    assert bool(verify(plain)) == bool(verify(moved))


@given(chosen())
def test_computations_and_their_order_are_those_without_offload(
    drawn: tuple[Case, Offloaded, Sharding],
) -> None:
    case, stages, sharding = drawn
    moved, plain = program_of(case, stages, sharding), program_of(case, Offloaded(), sharding)
    assert moved.ids[~np.isin(moved.columns.kind, ADDED)].tolist() == plain.ids.tolist()


@given(chosen())
def test_states_are_loaded_for_each_step_and_stored_after_it(
    drawn: tuple[Case, Offloaded, Sharding],
) -> None:
    program = program_of(*drawn)
    columns = program.columns
    for kind in (LOAD_STATES, STORE_STATES):
        rows = columns.kind == kind
        assert sorted(set(columns.stage[rows].tolist())) == list(drawn[1].states)
        assert (columns.bytes[rows] == 100 + columns.stage[rows]).all()
    resident = [len(held) for _, held in _residents(program, states=True)]
    assert max(resident, default=0) <= RESIDENT_STATES


@given(chosen())
def test_activations_leave_unless_their_backward_pass_comes_soon_or_the_device_holds_as_many(
    drawn: tuple[Case, Offloaded, Sharding],
) -> None:
    case, stages, sharding = drawn
    program, plain = program_of(case, stages, sharding), program_of(case, Offloaded(), sharding)
    columns = program.columns
    for rank, (first, end) in enumerate(pairwise(program.rank_starts.tolist())):
        place = 0
        began: dict[tuple[int, ...], int] = {}
        late = set()
        for row in range(first, end):
            if columns.kind[row] not in COMPUTATIONS:
                continue
            key = tuple(int(one[row]) for one in (columns.stage, columns.replica, columns.micro_batch))
            if columns.kind[row] == FORWARD:
                began[key] = place
            elif columns.kind[row] in (BACKWARD, BACKWARD_INPUT) and place - began[key] >= 4:
                late.add(key)
            place += 1
        mine = np.arange(first, end)
        stored = mine[columns.kind[mine] == STORE_ACTIVATIONS]
        keys = zip(columns.stage[stored], columns.replica[stored], columns.micro_batch[stored], strict=True)
        leave = {tuple(map(int, key)) for key in keys}
        assert leave in (set(), {key for key in late if key[0] in stages.activations})
        kept, moved = (_most(one, rank) for one in (plain, program))
        assert moved < kept if leave else moved == kept
        if not leave and late and stages.activations == tuple(range(case[2])) and "zb" not in case[0]:
            assert kept <= 4


def _most(program: Program, rank: int) -> int:
    return max(len(held) for one, held in _residents(program, states=False) if one == rank)


@given(st.sampled_from(("gpipe", "1f1b")), st.integers(1, 4), st.integers(1, 12))
def test_a_device_holds_few_micro_batches_however_many_it_has_in_flight(
    schedule: str, devices: int, micro_batches: int
) -> None:
    case = schedule, devices, devices, (micro_batches,), 1
    program = program_of(case, Offloaded(activations=tuple(range(devices))))
    assert max(len(held) for _, held in _residents(program, states=False)) <= 4


def _residents(program: Program, *, states: bool) -> Iterator[tuple[int, set[tuple[int, ...]]]]:
    """What is in each rank's memory after each of its computations, of offloaded states or of activations."""
    columns = program.columns
    for rank, (first, end) in enumerate(pairwise(program.rank_starts.tolist())):
        held: set[tuple[int, ...]] = set()
        for _ in range(2):
            for row in range(first, end):
                kind, number = int(columns.kind[row]), int(columns.micro_batch[row])
                key = (int(columns.stage[row]), int(columns.replica[row]), number)
                if kind in (RELEASE, ROOM) and (number == NONE) == states:
                    (held.add if kind == ROOM else held.discard)(key)
                elif not states and kind == FORWARD:
                    held.add(key)
                elif not states and kind in (BACKWARD, BACKWARD_WEIGHT):
                    held.discard(key)
                yield rank, held


SMALL = ("breadth-first", 2, 6, (3,), 1)
ALL = Offloaded(states=tuple(range(6)), activations=tuple(range(6)))


def test_a_program_without_one_wait_of_a_copy_is_refused() -> None:
    program = program_of(SMALL, ALL)
    columns, edges = program.columns, program.edges
    added = np.isin(columns.kind, ADDED)
    waits = np.flatnonzero(added[edges.source] | added[edges.target])
    assert len(waits) > 100
    for edge in waits.tolist():
        ends = (program.instruction(int(row)) for row in (edges.source[edge], edges.target[edge]))
        assert verify(without_edge(program, edge)), " to ".join(map(str, ends))


@pytest.mark.parametrize("owed", [Offloads(states=(1,)), Offloads(activations=(1,))])
def test_a_program_that_keeps_what_it_owes_to_the_host_is_refused(owed: Offloads) -> None:
    program = program_of(SMALL, Offloaded())
    methods = {**program.obligations.methods, "offload": owed}
    assert verify(replace(program, obligations=replace(program.obligations, methods=methods)))


def test_a_program_without_one_copy_is_refused() -> None:
    program = program_of(SMALL, ALL)
    assert verify(program) == []
    for row in np.flatnonzero(np.isin(program.columns.kind, ADDED)).tolist():
        assert verify(without_row(program, row)), program.instruction(row)


def offloading(plan: Plan, **options: Any) -> Plan:
    return plan.model_copy(update={"methods": (Choice(name="offload", options=options),)})


def priced(plan: Plan) -> tuple[Program, Priced]:
    program = compile_plan(plan, GRAPH)
    return program, price(CostModel(graph=GRAPH, cluster=MACHINES), program, plan)


def test_copies_take_their_bytes_over_the_host_link() -> None:
    plan = offloading(plan_of(GRAPH, MACHINES, pp=2, dp=2, schedule="gpipe"), states=True, activations=True)
    plan = plan.model_copy(update={"sharding": "zero-1"})
    program, found = priced(plan)
    columns = program.columns
    parameters = [GRAPH.amounts("parameters", plan.shape(0))[layer] for layer in plan.stages[0].layers]
    # Two fp32 moments of a half of the stage.
    expected = 2 * 4 * -(-round(sum(parameters)) // 2)
    for kind in (LOAD_STATES, STORE_STATES):
        [first, *_] = np.flatnonzero((columns.kind == kind) & (columns.stage == 0)).tolist()
        assert columns.bytes[first] == expected
        seconds = LATENCY_S + expected / (EFFICIENCY * HOST_BYTES_PER_S)
        assert found.costs.occupancy[first] == round(seconds * 1e9)
    stores = np.flatnonzero((columns.kind == STORE_ACTIVATIONS) & (columns.stage == 1))
    kept_bytes = stage_kept_bytes(GRAPH, plan.stages[1].layers, plan.shape(1), "fp32")
    moved = kept_bytes - 2 * MODEL.sequence * MODEL.hidden * 4
    assert columns.bytes[stores].tolist() == [round(moved)] * len(stores)
    seconds = LATENCY_S + round(moved) / (EFFICIENCY * HOST_BYTES_PER_S)
    assert found.costs.occupancy[stores].tolist() == [round(seconds * 1e9)] * len(stores)
    assert "host links of data sheets" in found.source


@pytest.mark.parametrize(
    ("schedule", "loops"), [("gpipe", 1), ("1f1b", 1), ("zb-h1", 1), ("breadth-first", 3)]
)
@pytest.mark.parametrize("sharding", ["zero-0", "zero-1"])
def test_memory_falls_by_what_is_away(schedule: str, loops: int, sharding: str) -> None:
    """Row by row of a device's computations, it is that without offload less what is in host memory."""
    plan = plan_of(GRAPH, MACHINES, pp=2, dp=2, loops=loops, schedule=schedule, micro_batches=6)
    plan = plan.model_copy(update={"sharding": sharding})
    (plain, without), (program, found) = priced(plan), priced(offloading(plan, states=True, activations=True))
    columns = program.columns
    assert sum(found.costs.live_bytes) == 0
    size = {
        _key(program, row): 1.03 * columns.bytes[row]
        for row in np.flatnonzero(np.isin(columns.kind, (LOAD_STATES, LOAD_ACTIVATIONS))).tolist()
    }
    for rank, (first, end) in enumerate(pairwise(program.rank_starts.tolist())):
        others = iter(range(*plain.rank_starts[rank : rank + 2].tolist()))
        away = {key for key in size if key[0] == rank and _taken_first(program, key)}
        moved, kept = int(found.costs.base_bytes[rank]), int(without.costs.base_bytes[rank])
        for row in range(first, end):
            moved += int(found.costs.live_bytes[row])
            kind = int(columns.kind[row])
            if kind not in ADDED:
                kept += int(without.costs.live_bytes[next(others)])
            elif kind in (RELEASE, ROOM):
                (away.add if kind == RELEASE else away.discard)(_key(program, row))
            assert kept - moved == pytest.approx(sum(size[key] for key in away), abs=end - first)


def _key(program: Program, row: int) -> tuple[int, ...]:
    columns = program.columns
    return tuple(int(one[row]) for one in (columns.rank, columns.stage, columns.replica, columns.micro_batch))


def _taken_first(program: Program, key: tuple[int, ...]) -> bool:
    """Whether a cycle takes memory for something before it frees it: it begins in host memory."""
    marks = np.flatnonzero(np.isin(program.columns.kind, (RELEASE, ROOM))).tolist()
    first = next(row for row in marks if _key(program, row) == key)
    return bool(program.columns.kind[first] == ROOM)


def test_the_peak_falls_alike_over_every_link_and_a_slow_one_lengthens_the_step() -> None:
    plan = plan_of(GRAPH, MACHINES, pp=2, schedule="gpipe", micro_batches=12, micro_batch_size=8)
    program, found = priced(plan)
    kept = simulate(program, found.costs)
    program, found = priced(offloading(plan, activations=True))
    copies = np.isin(program.columns.kind, (STORE_ACTIVATIONS, LOAD_ACTIVATIONS))
    times = found.costs.occupancy
    fast, slow = (
        simulate(program, replace(found.costs, occupancy=np.where(copies, factor * times, times)))
        for factor in (1, 100)
    )
    assert fast.step_s == pytest.approx(kept.step_s, rel=1e-4)
    assert slow.step_s > 1.5 * kept.step_s
    assert (fast.peak_bytes < kept.peak_bytes).all()
    assert fast.peak_bytes.tolist() == slow.peak_bytes.tolist()


def test_a_device_of_its_own_says_its_host_link() -> None:
    plan = offloading(plan_of(GRAPH, cluster(), pp=2), states=True)
    with pytest.raises(InputError, match=r"device.gpu.host_bandwidth: missing"):
        price(CostModel(graph=GRAPH, cluster=cluster()), compile_plan(plan, GRAPH), plan)
    hosts = cluster(device=CPU)
    program = compile_plan(plan, GRAPH)
    times = price(CostModel(graph=GRAPH, cluster=hosts), program, plan).costs.occupancy
    [first, *_] = np.flatnonzero(program.columns.kind == LOAD_STATES).tolist()
    moved = program.columns.bytes[first] / (EFFICIENCY * CPU.memory_bytes_per_s / 2)
    assert times[first] == pytest.approx(1e9 * (LATENCY_S + moved), abs=1)


@pytest.mark.parametrize(
    ("changes", "options", "problem"),
    [
        ({}, {"states": "0,7"}, "offload.states: stages 7: stages 0 to 1 exist (nearest valid: 1)"),
        ({}, {"activations": "x"}, "offload.activations: 'x' names no stages"),
        ({}, {"state": True}, "offload.state: 'state' is not one of states, activations"),
        ({}, {}, "offload: names no stages of states or activations"),
        ({"optimizer": PLAIN_SGD}, {"states": True}, "the optimizer keeps no states"),
        (
            {"schedule": Choice(name="1f1b")},
            {"activations": True},
            "offload.activations: backward passes come so soon",
        ),
        (
            {"recompute": "full"},
            {"activations": True},
            "stages 0, 1 recompute: a stage that",
        ),
        (
            {"sync": Choice(name="local-averaging", options={"every": 2})},
            {"states": True},
            "offload.states: replicas that step by themselves average their states",
        ),
    ],
)
def test_what_cannot_be_offloaded_says_why(
    changes: dict[str, Any], options: dict[str, Any], problem: str
) -> None:
    plan = plan_of(GRAPH, MACHINES, pp=2, dp=2)
    recompute = changes.get("recompute", "none")
    stages = tuple(stage.model_copy(update={"recompute": recompute}) for stage in plan.stages)
    others = {name: value for name, value in changes.items() if name != "recompute"}
    plan = offloading(plan.model_copy(update={"stages": stages, **others}), **options)
    assert any(problem in str(one) for one in check_plan(plan, GRAPH, MACHINES))


def test_a_run_file_names_stages_or_all() -> None:
    text = """
    [model]
    preset = "gpt-1m"
    [task]
    kind = "causal-lm"
    data = "python-stdlib"
    sequence = 64
    [train]
    global_batch = 8
    steps = 2
    [offload]
    states = true
    activations = [1, 0]
    """
    job = request_of_subject(subject_of(parse_run(tomllib.loads(text)))).job
    [choice] = [one for one in job.methods if one.name == "offload"]
    assert choice.options == {"states": True, "activations": "0,1"}


@pytest.mark.parametrize("given", ["x", [1, -1], [True], 3])
def test_a_run_file_that_names_no_stages_says_what_it_may(given: Any) -> None:
    with pytest.raises(InputError, match=r"states: .*: must be true, false or a list of stages") as caught:
        parse_run({**JOB, "cluster": {"use": "8xh100-80gb"}, "offload": {"states": given}})
    assert len(caught.value.violations) == 1


def test_moves_offload_what_stays_and_only_that() -> None:
    before = context(schedule="gpipe")
    for name, word in (("offload optimizer states", "states"), ("offload activations", "activations")):
        move = all_moves()[name]
        assert move.applies(before) is None
        plan = move.apply(before)
        assert plan.methods == (Choice(name="offload", options={word: True}),)
        assert plan.model_copy(update={"methods": ()}) == before.plan
        after = replace(before, plan=plan)
        assert "all stages" in (move.applies(after) or "")
        [other] = [one for one in ("offload optimizer states", "offload activations") if one != name]
        both = all_moves()[other].apply(after)
        assert dict(both.methods[0].options) == {"states": True, "activations": True}


PAGE = Path(__file__).parents[2] / "docs" / "offload.md"
JOB = {
    "model": {"preset": "llama-3-8b"},
    "task": {"kind": "causal-lm", "data": "python-stdlib", "sequence": 4096},
    "train": {"global_batch": 64, "steps": 1, "precision": "bf16"},
    "plan": {"pp": 8, "dp": 1, "tp": 1, "schedule": "1f1b", "micro_batch_size": 1, "recompute": "none"},
}


@pytest.mark.parametrize("machines", ["8xh100-80gb", "8xgh200-96gb"])
def test_the_page_has_these_figures(machines: str) -> None:
    rows = [
        line.strip("| ").split(" | ") for line in PAGE.read_text().split("<!-- figures -->")[1].splitlines()
    ]
    rows = [row for row in rows if row[0] == machines]
    planned = plan_run(parse_run({**JOB, "cluster": {"use": machines}}))
    assert len(rows) >= 2
    for _, words, step, peak, host in rows:
        options = {} if words == "nothing" else dict.fromkeys(words.split(", "), True)
        plan = offloading(planned.plan, **options) if options else planned.plan
        job = replace(planned, plan=plan)
        held = sum(job.in_host_memory.values()) if options else np.zeros(1)
        prediction = job.predicted.prediction
        found = (prediction.step_s, max(prediction.peak_bytes) / 1e9, held.max() / 1e9)
        shown = f"{found[0]:.2f} s", f"{found[1]:.1f} GB", f"{found[2]:.3g} GB"
        assert (step, peak, host) == shown


def test_advice_offloads_states_where_memory_lacks() -> None:
    more: dict[str, dict[str, Any]] = {
        "model": {"preset": "llama-13b"},
        "task": {**JOB["task"], "sequence": 12288},
        "plan": {**JOB["plan"], "recompute": "full"},
        "cluster": {"use": "8xa100-40gb"},
    }
    with pytest.raises(InputError, match="fits with offload optimizer states of the first 1 of 8 stages: a"):
        plan_run(parse_run({**JOB, **more}))


def test_host_memory_and_copies_that_nothing_hides_are_told() -> None:
    planned = plan_run(parse_run({**JOB, "cluster": {"use": "8xh100-80gb"}}))
    assert "host_bytes" not in simulation_record(planned, planned.predicted)
    assert COPIES not in planned.step_breakdown
    job = replace(planned, plan=offloading(planned.plan, states=True))
    record = simulation_record(job, job.predicted)
    # Two fp32 moments of every parameter.
    parameters = sum(job.problem.job.graph.amounts("parameters", job.plan.shape(0)))
    assert sum(record["host_bytes"]["states"]) == pytest.approx(8 * parameters, abs=100)
    assert job.step_breakdown[COPIES] > 0.0
    assert sum(job.step_breakdown.values()) == pytest.approx(record["step_s"])
    text = host_memory_text(job.in_host_memory, job.problem.job.cluster)
    assert text == "in host memory, of the fullest rank: states 8.72 GB; of the fullest node: 64.2 GB"
