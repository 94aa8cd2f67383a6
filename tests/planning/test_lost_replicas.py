"""Plans of the replicas that are left, and runs that cannot go on without one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from run_inputs import cluster_text
from small_plans import make_plan, make_program, tiny

from weft.describe.plan import Choice, Plan
from weft.describe.reading import parse_toml
from weft.describe.run_file import parse_run
from weft.describe.synchronisation import micro_batches_of_steps
from weft.planning.lost_replicas import (
    job_among,
    plan_among,
    ranks_of_replicas,
    refused_deaths,
    replicas_of,
)
from weft.planning.planned import plan_run
from weft.planning.planned_job import PlannedJob
from weft.program.verify import verify

CONFIG = tiny(layers=2)
CSER = Choice(name="cser", options={"update_ratio": 8.0, "reset_ratio": 2.0, "every": 2, "keep_errors": True})
RUN = """
[model]
preset = "gpt-1m"
[task]
sequence = 32
[train]
global_batch = {batch}
steps = 40
[goal]
contract = "empirical"
[cluster]
use = "8x l4"
[sync]
{sync}
[plan]
pp = {pp}
dp = {dp}
tp = {tp}
schedule = "1f1b"
micro_batch_size = 2
[run]
{run}
"""


@given(st.sets(st.integers(0, 3), min_size=2), st.lists(st.integers(1, 3), min_size=4, max_size=4))
@settings(max_examples=10, deadline=None)
def test_a_plan_of_some_replicas_is_verified_and_keeps_their_shares(
    ranks: set[int], shares: list[int]
) -> None:
    found = plan_among(plan_with(shares), ranks)
    kept = [shares[rank] for rank in sorted(ranks)]
    assert [copy.micro_batches for copy in found.stages[0].replicas] == kept
    assert [copy.ranks for copy in found.stages[0].replicas] == [(rank,) for rank in range(len(ranks))]
    assert micro_batches_of_steps(found) == (tuple(range(sum(kept))),)
    assert found.ranks == len(ranks)
    assert not verify(make_program(CONFIG, found))


def plan_with(shares: list[int]) -> Plan:
    plan = make_plan(CONFIG, dp=len(shares), micro_batches=4)
    (stage,) = plan.stages
    pairs = zip(stage.replicas, shares, strict=True)
    copies = tuple(copy.model_copy(update={"micro_batches": share}) for copy, share in pairs)
    stages = (stage.model_copy(update={"replicas": copies}),)
    batch = plan.micro_batch_size * sum(shares)
    return plan.model_copy(update={"stages": stages, "global_batch": batch, "sync": CSER})


GOES_ON = 'on_death = "go-on"'


def job(sync: str, *, pp: int = 1, tp: int = 1, dp: int = 3, run: str = GOES_ON) -> PlannedJob:
    text = RUN.format(sync=sync, pp=pp, tp=tp, dp=dp, batch=2 * dp, run=run)
    return plan_run(parse_run(parse_toml(text, "run")))


KEEPS = 'method = "cser"\nreset_ratio = 2\nevery = 4\nkeep_errors = true'


def test_the_job_of_all_ranks_is_the_job_itself_and_that_of_some_is_planned_for_them() -> None:
    whole = job(KEEPS)
    assert not refused_deaths(whole)
    assert job_among(whole, [0, 1, 2]) is whole
    some = job_among(whole, [0, 2])
    assert some.program.ranks == some.plan.ranks == 2
    assert some.plan.global_batch == 4
    assert some.run == whole.run
    assert some.run.run.used_transport == "host"
    assert job(KEEPS, run="").run.run.used_transport is None
    assert [replicas_of(whole.plan, [rank]) for rank in range(3)] == [[0], [1], [2]]


@pytest.mark.parametrize(
    ("sync", "options", "said"),
    [
        ('method = "dense"', {}, "with sync 'dense': all replicas meet, and none can be absent"),
        ('method = "local-averaging"\nevery = 4', {}, "with sync 'local-averaging': all replicas meet"),
        ('method = "cser"\nreset_ratio = 2\nevery = 4', {}, "replicas keep no errors"),
        (f'{KEEPS}\nabsent = "2: 1"\nrounds = 4', {}, "sync.absent states who is absent"),
        (KEEPS, {"dp": 2}, "2 replicas; without one, fewer than 2 are left to meet"),
        (KEEPS, {"pp": 2, "dp": 2}, "2 replicas; without one"),
        (KEEPS, {"run": f'{GOES_ON}\ntransport = "device"'}, "use 'host'"),
    ],
)
def test_a_run_that_cannot_go_on_is_refused_in_one_line(
    sync: str, options: dict[str, Any], said: str
) -> None:
    [problem] = refused_deaths(job(sync, **options))
    assert said in str(problem)
    assert str(problem).startswith("run.on_death: 'go-on' ")
    assert str(problem).endswith("(nearest valid: stop)")
    assert not refused_deaths(job(sync, **{**options, "run": ""}))


def test_states_to_go_back_to_are_counted_and_refused_without_room(tmp_path: Path) -> None:
    parameters = job(KEEPS).problem.job.graph.parameters()
    # Two states of the weights, their errors and two momenta, in fp32.
    assert job(KEEPS).in_host_memory["states to go back to"].tolist() == [2 * 16 * parameters] * 3
    assert job(KEEPS, pp=2).in_host_memory["states to go back to"].sum() == 3 * 2 * 16 * parameters
    assert not job(KEEPS, run="").in_host_memory
    found = {}
    for memory in ("40 MB", "600 MB"):
        cluster = tmp_path / f"{memory.split()[0]}.toml"
        cluster.write_text(cluster_text(3).replace("4 GB", memory))
        text = RUN.format(sync=KEEPS, pp=1, tp=1, dp=3, batch=6, run=GOES_ON).replace("8x l4", str(cluster))
        found[memory] = refused_deaths(plan_run(parse_run(parse_toml(text, "run"))))
    assert not found["600 MB"]
    [problem] = found["40 MB"]
    assert "'go-on' keeps 27.6 MB of whole states on rank 0, which has " in str(problem)


@pytest.mark.parametrize(("pp", "tp"), [(2, 1), (1, 2)])
def test_replicas_of_several_ranks_stay_whole(pp: int, tp: int) -> None:
    job_of_all = job(KEEPS, pp=pp, tp=tp)
    assert not refused_deaths(job_of_all)
    whole = ranks_of_replicas(job_of_all.plan)
    assert whole is not None
    kept = sorted({*whole[0], *whole[2]})
    found = job_among(job_of_all, kept)
    assert found.program.ranks == len(kept) == 4
    own = ranks_of_replicas(found.plan)
    assert own is not None
    assert [tuple(kept[rank] for rank in one) for one in own] == [whole[0], whole[2]]


def test_replicas_that_share_ranks_cannot_be_lost() -> None:
    assert ranks_of_replicas(make_plan(CONFIG, pp=2, loops=1, schedule="chimera")) is None
