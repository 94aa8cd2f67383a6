"""Law: reductions have as many bytes as elements of their precision, and nothing else of a plan changes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_plans import make_plan, make_program, tiny

from weft.describe.cluster_file import parse_cluster
from weft.describe.device import PRECISION_BYTES
from weft.describe.families import layer_graph
from weft.describe.layout import Layout
from weft.describe.plan import Choice, Plan
from weft.describe.plan_file import PlanFile, check_plan, parse_plan_file
from weft.describe.run_file import RunFile, parse_run
from weft.errors import InputError
from weft.methods.sharding.kinds import REDUCE, REDUCE_ACROSS
from weft.methods.tying.kinds import REDUCE_TIED
from weft.moves.layout import build_plan
from weft.moves.move import Context
from weft.planning.compile import compile_plan
from weft.planning.planned import plan_run
from weft.planning.planners.amp.inputs import amp_inputs
from weft.planning.planners.bounds import Bounds
from weft.planning.problem import Problem, problem_of_run
from weft.predict.cost.memory import STEPPED_BYTES, reduced_parameters
from weft.predict.cost.price import price
from weft.program.program import Program

REDUCTIONS = (REDUCE, REDUCE_ACROSS, REDUCE_TIED)
SHARDINGS = ("zero-0", "zero-1", "zero-2", "zero-3")


def expected_bytes(plan: Plan, program: Program, element: int) -> list[int]:
    """What every reduction sends: the elements of a stage's or a tied gradient, or of a share of it."""
    config = tiny(tied=True)
    graph, columns = layer_graph(config), program.columns
    found = []
    for kind, stage in zip(columns.kind.tolist(), columns.stage.tolist(), strict=True):
        if kind in REDUCTIONS:
            own = reduced_parameters(plan, graph, stage)
            tied = config.vocabulary * config.hidden
            if kind == REDUCE_TIED and plan.sharding != "zero-0":
                shares = (-(-reduced_parameters(plan, graph, one) // plan.sharers(one)) for one in (0, 1))
                tied = min(tied, max(shares))
            whole = element * (tied if kind == REDUCE_TIED else own)
            found.append(-(-whole // plan.sharers(stage)) if kind == REDUCE_ACROSS else whole)
    return found


@given(
    sharding=st.sampled_from(SHARDINGS),
    dp=st.integers(1, 4),
    pp=st.integers(1, 2),
    in_islands=st.booleans(),
    precision=st.sampled_from(sorted(STEPPED_BYTES)),
    reduced=st.sampled_from([None, "fp32", "bf16", "fp16"]),
)
def test_reductions_send_elements_of_their_precision(
    sharding: Any, dp: int, pp: int, in_islands: bool, precision: str, reduced: Any
) -> None:
    sharding = sharding if dp > 1 else "zero-0"
    island = 2 if in_islands and dp == 4 and sharding != "zero-0" else None
    config = tiny(tied=True)
    plain = make_plan(config, pp=pp, dp=dp, precision=precision)
    plain = plain.model_copy(update={"sharding": sharding, "island": island})
    plan = plain.model_copy(update={"reduce_precision": reduced})
    program, same = make_program(config, plan), make_program(config, plain)
    element = STEPPED_BYTES[precision] if reduced is None else PRECISION_BYTES[reduced]
    columns, others = program.columns, same.columns
    reductions = [kind in REDUCTIONS for kind in columns.kind.tolist()]
    sent = columns.bytes[reductions].tolist()
    assert sent == expected_bytes(plan, program, element)
    assert bool(sent) == (dp > 1 or pp > 1)
    # Gathers, messages and the order of everything are as without it.
    assert program.ids.tolist() == same.ids.tolist()
    rest = [not one for one in reductions]
    assert columns.bytes[rest].tolist() == others.bytes[rest].tolist()


TABLES = {
    "model": {"preset": "gpt-10m"},
    "train": {"global_batch": 16, "precision": "bf16"},
    "cluster": {"use": "16xa100-80gb"},
    "plan": {"planner": "weft"},
}


def run_of(reduced: str | None, precision: str = "bf16", **tables: dict[str, Any]) -> RunFile:
    train = {**TABLES["train"], "precision": precision, "reduce_precision": reduced}
    given = {**TABLES, "train": {key: value for key, value in train.items() if value is not None}}
    return parse_run({**given, **tables})


def problems(*precisions: str | None) -> list[Problem]:
    return [problem_of_run(run_of(one)) for one in precisions]


def planned(problem: Problem, **choices: Any) -> Plan:
    graph = problem.job.graph
    given = {"pp": 1, "dp": 16, "loops": 1, "micro_batch_size": 1, "schedule": "1f1b", **choices}
    return build_plan(problem.job, Layout(**given), [1.0] * len(graph.layers))


@pytest.mark.parametrize("choices", [{"sharding": one} for one in SHARDINGS], ids=str)
def test_fewer_bytes_take_less_time_and_as_much_memory(choices: dict[str, Any]) -> None:
    usual, wide, narrow = problems(None, "fp32", "bf16")
    costs = []
    for problem in (usual, wide, narrow):
        plan = planned(problem, **choices)
        program = compile_plan(plan, problem.job.graph)
        priced = price(problem.cost_model, program, plan).costs
        costs.append((priced.occupancy[program.columns.kind == REDUCE], priced.base_bytes.tolist()))
    (seconds, held), (same, same_held), (less, less_held) = costs
    assert (seconds == same).all()
    assert (less < seconds).all()
    assert held == same_held == less_held


def reduction_s(kind: int, reduced: str, **choices: Any) -> float:
    [problem] = problems(reduced)
    plan = planned(problem, **choices)
    program = compile_plan(plan, problem.job.graph)
    row = int((program.columns.kind == kind).argmax())
    return float(price(problem.cost_model, program, plan).costs.occupancy[row]) / 1e9


def test_both_ends_of_a_reduction_cast(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = (
        (REDUCE, "bf16", {}),
        (REDUCE, "fp32", {}),
        (REDUCE, "bf16", {"sharding": "zero-1"}),
        (REDUCE_ACROSS, "bf16", {"sharding": "zero-3", "island": 8}),
    )
    priced = [reduction_s(kind, reduced, **choices) for kind, reduced, choices in cases]
    monkeypatch.setattr("weft.methods.sharding.costs.gradient_pass_s", lambda _, rows: np.zeros(len(rows)))
    free = [reduction_s(kind, reduced, **choices) for kind, reduced, choices in cases]
    whole_s, same_s, share_s, across_s = (one - other for one, other in zip(priced, free, strict=True))
    # Reads of 4 bytes and writes of 2, and back, at 2.04 TB/s at the most.
    assert whole_s > 12 * problems(None)[0].job.graph.parameters() / 2.04e12
    assert same_s == 0.0
    # Back comes a shard of the sum; across islands, a shard is sent and comes back.
    assert share_s == pytest.approx(whole_s * (1 + 1 / 16) / 2, rel=0.01)
    assert across_s == pytest.approx(whole_s / 8, rel=0.01)


def test_planners_count_the_bytes_that_are_sent() -> None:
    usual, narrow = problems(None, "bf16")
    layout = Layout(pp=1, dp=16, loops=1, micro_batch_size=1, schedule="1f1b")
    (gradients, weights), (halves, same) = (Bounds(one).exchanged_bytes(layout) for one in (usual, narrow))
    assert (gradients == 2 * halves).all()
    assert (weights == same).all()
    amp, amp_narrow = (amp_inputs(one, [1]).gradient_bytes[1] for one in (usual, narrow))
    assert amp == tuple(2 * size for size in amp_narrow)


def test_a_search_asks_for_it_in_every_plan_and_never_by_itself() -> None:
    for reduced in (None, "bf16"):
        ranking = plan_run(run_of(reduced)).ranking
        assert ranking is not None
        assert {one.plan.reduce_precision for one in ranking.fitting if one.plan} == {reduced}


def test_the_file_of_a_plan_keeps_it_and_a_plan_without_keeps_its_id() -> None:
    usual, narrow = (planned(one) for one in problems(None, "bf16"))
    assert "reduce_precision" not in usual.record()
    assert usual.plan_id != narrow.plan_id
    record = narrow.record()
    assert parse_plan_file(record).plan == narrow
    assert '"reduce_precision": "bf16"' in PlanFile(narrow).to_json()
    with pytest.raises(InputError, match="reduce_precision"):
        parse_plan_file({**record, "reduce_precision": "fp64"})
    graph, cluster = problems(None)[0].job.graph, parse_cluster("16xa100-80gb")
    assert Context(plan=narrow, graph=graph, cluster=cluster).job.reduce_precision == "bf16"


def test_what_cannot_be_reduced_in_is_refused_in_one_line() -> None:
    local = {"method": "local-averaging", "every": 2}
    cases = (
        (run_of("fp16"), "fp16 has room for gradients of scaled losses, and bf16 scales none"),
        (
            run_of("bf16", sync=local, goal={"contract": "empirical"}),
            "with sync 'local-averaging' replicas do not send each other plain gradients",
        ),
    )
    for run, text in cases:
        with pytest.raises(InputError, match=text) as refused:
            problem_of_run(run)
        assert len(refused.value.violations) == 1
    problem_of_run(run_of("fp16", "fp16"))
    [usual] = problems(None)
    edited = planned(usual).model_copy(update={"reduce_precision": "fp16"})
    [found] = check_plan(edited, usual.job.graph, usual.job.cluster)
    assert str(found).startswith("plan: reduce_precision: fp16 has room")
    edited = edited.model_copy(
        update={"reduce_precision": "bf16", "sync": Choice(name="local-averaging", options={"every": 2})}
    )
    [found] = check_plan(edited, usual.job.graph, usual.job.cluster)
    assert str(found).startswith("plan: reduce_precision: bf16: with sync 'local-averaging'")


def test_no_search_goes_on_to_another_way_to_agree() -> None:
    [problem] = problems("bf16")
    with pytest.raises(InputError, match="do not send each other plain gradients"):
        planned(problem, sync="local-averaging")
