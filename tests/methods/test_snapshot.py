"""Laws of snapshots in bubbles: before the next step of their stage, with the bits of a save."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from filled_plans import fills, kfac, placed
from hypothesis import given, settings
from hypothesis import strategies as st
from methods.test_evaluate import GPT, ORDERS, planned
from methods.test_evaluate_runs import PLAN
from pool import WorkerPool
from pooled_runs import trained
from program.mutations import moved, without_row
from small_plans import make_plan, make_program
from stopped_runs import saved, text_run

from weft.methods.snapshot.program import PIECES, SNAPSHOT
from weft.planning.job_rules import refused_by_methods
from weft.predict.cost.host_link import host_copy_s
from weft.program.kinds import STEP
from weft.program.verify import require_valid, verify
from weft.training.directory.run_directory import RunDirectory


@given(ORDERS, st.sampled_from([1, 2]), st.booleans(), st.data())
@settings(max_examples=15)
def test_snapshots_come_before_the_step_of_their_stage(
    order: tuple[str, int, int, int], dp: int, curvature: bool, data: st.DataObject
) -> None:
    schedule, pp, loops, micro_batches = order
    plan = make_plan(GPT, schedule=schedule, pp=pp, loops=loops, dp=dp, micro_batches=micro_batches)
    work = "kfac,snapshot" if curvature else "snapshot"
    methods = (*([kfac(GPT)] if curvature else []), fills(work=work))
    program = make_program(GPT, placed(GPT, plan.model_copy(update={"methods": methods})))
    require_valid(program)
    columns = program.columns
    rows = np.flatnonzero(columns.kind == SNAPSHOT)
    assert len(rows) == PIECES * program.steps_per_cycle * len(plan.stages) * dp
    row = data.draw(st.sampled_from(rows.tolist()))
    assert verify(without_row(program, row))
    steps = np.flatnonzero((columns.kind == STEP) & (columns.rank == columns.rank[row]))
    own = steps[columns.stage[steps] == columns.stage[row]]
    [step] = own[columns.iteration[own] == columns.iteration[row]].tolist()
    assert row < step
    assert verify(moved(program, row, step))


def test_pieces_cost_their_bytes_over_the_host_link() -> None:
    job = planned(bubble={"work": ["snapshot"]})
    timeline, device = job.predicted.simulation.timeline, job.problem.job.cluster.device_of(0)
    own = (timeline.kind == SNAPSHOT) & (timeline.stage == 1)
    [part] = [one.value for one in job.memory_parts(1) if one.name == "weights"]
    parameters = part / job.plan.element_bytes
    # A master and two averages of AdamW.
    expected_s = host_copy_s(device, -(-round(12 * parameters) // PIECES))
    taken_s = (timeline.end_ns - timeline.start_ns)[own] / 1e9
    assert taken_s == pytest.approx([expected_s] * PIECES, rel=1e-3)


def test_a_run_without_checkpoints_before_its_end_is_refused() -> None:
    [problem] = refused_by_methods(planned(bubble={"work": ["snapshot"]}, checkpoint={"every": 100}))
    assert "checkpoint.every: 100; no step follows the only checkpoint" in str(problem)
    assert not refused_by_methods(planned(bubble={"work": ["snapshot"]}, checkpoint={"every": 99}))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_checkpoints_have_the_bits_of_saves_between_steps(
    worker_pool: WorkerPool, tmp_path: Path, precision: str
) -> None:
    directories = []
    for name, more in (("between", ""), ("bubbles", "[bubble]\nwork = ['snapshot']\n")):
        text = text_run(tmp_path, PLAN + more, steps=5)
        text = text.replace("every = 1", "every = 2").replace(
            "steps = 5", f'steps = 5\nprecision = "{precision}"'
        )
        (tmp_path / f"{name}.toml").write_text(text)
        directories.append(trained(worker_pool, tmp_path / f"{name}.toml", directory=tmp_path / name))
    for place in range(3):
        expected, found = (saved(one, place) for one in directories)
        assert expected.keys() == found.keys()
        assert all(torch.equal(one, found[name]) for name, one in expected.items())
    told = [one["step"] for one in RunDirectory(directories[1]).events() if one["event"] == "checkpoint"]
    assert told == [2, 4, 5]
