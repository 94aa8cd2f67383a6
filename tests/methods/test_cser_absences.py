"""Laws: replicas that miss resets run nothing meanwhile, and come back with all who are there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from program.mutations import without_row
from small_plans import make_plan, make_program, tiny

from weft.describe.families import layer_graph
from weft.describe.plan import Plan
from weft.describe.reading import parse_toml
from weft.describe.run_file import parse_run
from weft.describe.synchronisation import micro_batches_of_steps, sync_options
from weft.errors import InputError
from weft.methods.cser.absences import Absence, Absences, absences_in, first_problem
from weft.methods.cser.kinds import REJOIN, RESET_ERROR, SYNCHRONISE_UPDATE
from weft.methods.cser.options import ABSENCES, RETURNED
from weft.planning.compile import compile_part, compile_plan
from weft.planning.job_rules import refused_by_methods
from weft.planning.lost_replicas import DIED
from weft.planning.planned import plan_run
from weft.planning.report_sections import sections_of
from weft.program.kinds import STEP
from weft.program.program import Program
from weft.program.rank_program import digests
from weft.program.verify import require_valid, verify
from weft.training.directory.event_words import event_words

CONFIG = tiny(layers=2, tied=True)
KEYS = {"update_ratio": 8.0, "reset_ratio": 2.0, "every": 2, "keep_errors": True}


def absent_plan(
    absent: str, rounds: int, *, pp: int = 1, dp: int = 3, schedule: str = "1f1b", **options: Any
) -> Plan:
    plan = make_plan(CONFIG, pp=pp, dp=dp, schedule=schedule, precision="fp32")
    sync = {"name": "cser", "options": {**KEYS, **options, "absent": absent, "rounds": rounds}}
    return plan.model_validate({**plan.model_dump(), "sync": sync})


@st.composite
def absences(draw: st.DrawFn) -> tuple[int, Absences]:
    """A number of replicas, and absences that they may have."""
    replicas, rounds = draw(st.integers(2, 4)), draw(st.integers(3, 8))
    resets = st.integers(1, rounds - 2)
    drawn = draw(st.lists(st.tuples(st.integers(0, replicas - 1), resets, resets), min_size=1, max_size=4))
    missed = sorted(Absence(replica, min(pair), max(pair)) for replica, *pair in drawn)
    found = Absences(draw(st.integers(1, 3)), rounds, tuple(missed))
    assume(first_problem(missed, rounds) is None)
    assume(found.problem(replicas) is None)
    return replicas, found


@given(absences())
@settings(max_examples=15, deadline=None)
def test_a_program_meets_with_those_that_are_there_and_with_nobody_else(drawn: tuple[int, Absences]) -> None:
    replicas, away = drawn
    text = ", ".join(f"{one.replica}: {one.first}-{one.last}" for one in away.missed)
    assert tuple(absences_in(text)) == away.missed
    plan = absent_plan(text, away.rounds, dp=replicas, every=away.every)
    program = make_program(CONFIG, plan)
    require_valid(program)
    columns, missed = program.columns, set()
    for one in away.missed:
        missed |= {(one.replica, number) for number in range(one.first, one.last + 1)}
    for number in range(away.rounds):
        end = (number + 1) * away.every - 1
        there = {one for one in range(replicas) if (one, number) not in missed}
        # Who comes back by this reset has not stepped in its round.
        stepped = {one for one in there if (one, number - 1) not in missed}
        for kind, expected in (
            (STEP, stepped),
            (SYNCHRONISE_UPDATE, stepped),
            (RESET_ERROR, there),
            (REJOIN, there if there != stepped else set()),
        ):
            rows = (columns.kind == kind) & (columns.iteration == end)
            assert set(columns.rank[rows].tolist()) == expected
            assert kind == STEP or all(
                set(program.groups[group]) == expected for group in columns.group[rows].tolist()
            )
        # Nobody else computes, and nobody's samples are drawn.
        inside = (columns.iteration // away.every == number) & (columns.micro_batch >= 0)
        assert set(columns.rank[inside].tolist()) == stepped
        assert {one // 4 for one in micro_batches_of_steps(plan)[end]} == stepped


@given(absences(), st.integers(0, 60))
def test_a_replica_waits_for_its_next_reset_also_while_it_is_away(
    drawn: tuple[int, Absences], step: int
) -> None:
    replicas, away = drawn
    for replica in range(replicas):
        due = away.next_reset(replica, step)
        assert step <= due
        assert (due + 1) % away.every == 0
        assert away.meets(replica, due)
        assert not any(away.meets(replica, one) for one in range(step, due) if (one + 1) % away.every == 0)
        assert away.returns(replica, due) == (not away.computes(replica, due))


def _first(program: Program, kind: int, replica: int) -> int:
    columns = program.columns
    return int(np.flatnonzero((columns.kind == kind) & (columns.replica == replica))[0])


def _without_me(program: Program) -> Program:
    """Where replica 2 comes back, the others run their return with a group that it is not in."""
    group, rows = program.columns.group.copy(), program.columns.kind == REJOIN
    group[rows & (program.columns.replica != 2)] = len(program.groups)
    changed = replace(program.columns, group=group)
    return replace(program, columns=changed, groups=(*program.groups, (0, 1)))


def _other(program: Program) -> Program:
    """The same, where another replica is said to be absent."""
    owed = program.obligations.methods["cser"]
    changed = replace(owed, absences=Absences(2, 4, (Absence(1, 1, 1),)))
    return replace(program, obligations=replace(program.obligations, methods={"cser": changed}))


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (
            lambda program: without_row(program, _first(program, REJOIN, 2)),
            "returns: stage 0, step 5 of replica 2",
        ),
        (
            lambda program: without_row(program, _first(program, REJOIN, 0)),
            "returns: stage 0, step 5 of replica 0",
        ),
        (_without_me, "is not with all replicas of its stage"),
        (_other, "replica 1 steps stage 0 while it is away, or rests while it is not, in step 2"),
    ],
)
def test_a_program_that_brings_nobody_back_is_refused(
    broken: Callable[[Program], Program], said: str
) -> None:
    program = make_program(CONFIG, absent_plan("2: 1", 4))
    assert said in "; ".join(str(one) for one in verify(broken(program)))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"absent": "2: 1"}, "rounds: missing; it is the resets after which absences come again"),
        ({"rounds": 3}, "rounds: no replica is absent; leave it out"),
        ({"absent": "two: 1", "rounds": 3}, "absent: two: 1: names no replica and the resets that it misses"),
        ({"absent": "2: 0", "rounds": 3}, "replica 2 misses reset 0, and all replicas begin together"),
        ({"absent": "2: 3-1", "rounds": 5}, "replica 2: reset 1 comes before reset 3"),
        ({"absent": "2: 1-2", "rounds": 3}, "replica 2 misses reset 2, and all meet at reset 2, the last"),
        ({"absent": "2: 1, 2: 3", "rounds": 5}, "replica 2 is away again before it has stepped"),
        ({"absent": "2: 1", "rounds": 3, "keep_errors": False}, "keep_errors: a replica that comes back"),
        (
            {"absent": "2: 1", "rounds": 3, "keep_errors": False, "variant": "code"},
            "absent: variant 'code': a replica that comes back brings its error",
        ),
    ],
)
def test_absences_that_cannot_be_are_refused_in_one_line(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError) as refused:
        sync_options("cser", {**KEYS, **options})
    [line] = refused.value.violations
    assert said in str(line)


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (absent_plan("3: 1", 4), "replica 3 is not one of 0 to 2"),
        (absent_plan("0: 1, 1: 1-2, 2: 2", 5), "no replica steps before reset 2"),
        (absent_plan("2: 1", 3000), "a program has at most 4096"),
        (absent_plan("1: 1", 4, pp=2, dp=1, schedule="chimera"), "no replica rests in a step with two paths"),
    ],
)
def test_plans_without_such_replicas_are_refused(plan: Plan, said: str) -> None:
    with pytest.raises(InputError) as refused:
        make_program(CONFIG, plan)
    # Tied weights refuse two paths, too.
    *_, line = refused.value.violations
    assert said in str(line)


def _run(keys: str, steps: int) -> str:
    return (
        '[model]\npreset = "gpt-1m"\n[cluster]\nuse = "2xa100-80gb"\n[goal]\ncontract = "empirical"\n'
        f'[sync]\nmethod = "cser"\n{keys}\n[plan]\npp = 1\ndp = 2\n'
        f"[train]\nglobal_batch = 8\nsteps = {steps}\n"
    )


@pytest.mark.parametrize(
    ("keys", "steps", "said"),
    [
        ("ratio = 32.0", 15, ["train.steps: 15; errors are reset every 16 steps, so they never would be"]),
        ("ratio = 32.0", 16, []),
        ('variant = "error-feedback"\nratio = 32.0', 1, []),
    ],
)
def test_a_run_without_a_reset_is_refused_before_its_start(keys: str, steps: int, said: list[str]) -> None:
    planned = plan_run(parse_run(parse_toml(_run(keys, steps), "run")))
    found = [str(one) for one in refused_by_methods(planned)]
    assert [line in one for line, one in zip(said, found, strict=True)] == [True] * len(said)


def test_a_layout_without_the_absent_replica_is_refused() -> None:
    keys = 'reset_ratio = 2\nevery = 2\nkeep_errors = true\nabsent = "2: 1"\nrounds = 4'
    with pytest.raises(InputError, match="cser: replica 2 is not one of 0 to 1"):
        plan_run(parse_run(parse_toml(_run(keys, 40), "run")))


@pytest.mark.parametrize("absent", ["1: 1", "1: 1-2, 2: 2", "2: 2"])
def test_parts_of_ranks_are_those_of_the_whole_program_where_a_replica_returns_last(absent: str) -> None:
    """With the last reset of a cycle, it has meetings behind its last step."""
    plan, graph = absent_plan(absent, 4, pp=2), layer_graph(CONFIG)
    expected = digests(compile_plan(plan, graph)).tolist()
    assert [compile_part(plan, graph, rank).digest for rank in range(plan.ranks)] == expected


def test_a_report_and_events_tell_who_missed_which_resets() -> None:
    absent = (
        'update_ratio = 8\nreset_ratio = 2\nevery = 2\nkeep_errors = true\nabsent = "1: 4-6"\nrounds = 10'
    )
    planned = plan_run(parse_run(parse_toml(_run(absent, 40), "run")))
    assert planned.program.obligations.methods["cser"].facts["replica 1"] == str(Absence(1, 4, 6))
    [back] = Absences(2, 10, (Absence(1, 4, 6),)).ended_by(35)
    told = {"event": ABSENCES, "step": 36, RETURNED: [back._asdict()], "told": f"replica 1 {back}"}
    assert event_words(told) == ("step 36: replica 1 missed resets 14 to 16, rejoined at 17", False)
    [rows] = [dict(one.rows) for one in sections_of(planned, [], events=[told]) if one.name == "cser"]
    assert rows["replica 1"] == "missed resets 14 to 16, rejoined at 17"


def test_a_report_names_replicas_that_died_and_those_that_came_back() -> None:
    planned = plan_run(
        parse_run(parse_toml(_run("reset_ratio = 2\nevery = 2\nkeep_errors = true", 40), "run"))
    )
    died = {"event": DIED, "step": 8, "reached": 9, "replicas": [1, 2], "told": "replicas 1 and 2"}
    text = "replicas 1 and 2 died in step 9; the others go on from the state after 8 steps"
    assert event_words(died) == (text, True)
    back = {"event": ABSENCES, "step": 12, RETURNED: [Absence(1, 4, 5)._asdict()], "told": ""}
    [rows] = [dict(one.rows) for one in sections_of(planned, [], events=[died, back]) if one.name == "cser"]
    assert rows["replica 1"] == "missed resets 4 to 5, rejoined at 6"
    assert rows["replica 2"] == "died in step 9, and is away since 8 steps were done"
