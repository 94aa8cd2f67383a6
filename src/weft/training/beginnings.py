"""The ways in which a rank comes to a plan's steps: anew, from a checkpoint, or without some replicas."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from weft.describe.plan_versions import current_id, former_ids
from weft.describe.servers import server_words
from weft.errors import RunError
from weft.planning.lost_replicas import DIED, WENT_ON, replicas_of
from weft.planning.planned_job import PlannedJob
from weft.run.step_result import StepResult
from weft.training.checkpoint.checkpoints import forget_view, has_rank_tensors
from weft.training.checkpoint.training_state import TrainingState
from weft.training.coordination.agreement import gather, meeting_peers, together
from weft.training.coordination.membership import Change, Membership
from weft.training.directory.event_words import warnings
from weft.training.directory.run_directory import RunDirectory, last_plan_id, recorded_loss
from weft.training.evaluation.held_out import held_out, held_out_samples
from weft.training.open_run import OpenRun, load


def turn_to(job: PlannedJob, run_dir: Path, of_all: PlannedJob) -> None:
    """Write the files of the replicas that are present now."""
    _require_one_plan(job)
    with together():
        if dist.get_rank() == 0:
            RunDirectory(run_dir).turn_to(job, of_all)


def turn(job: PlannedJob, run_dir: Path) -> None:
    """Replace the plan by the later one, which begins with the former's last checkpoint, on all ranks."""
    _require_one_plan(job)
    with together():
        if dist.get_rank() == 0:
            RunDirectory(run_dir).turn()


def _require_one_plan(job: PlannedJob) -> None:
    plan_ids = gather(job.plan.plan_id)
    if len(set(plan_ids)) > 1:
        raise RunError(f"ranks would go on under different plans: {', '.join(plan_ids)}")


def start(run: OpenRun) -> TrainingState:
    """Return the state of a run without a checkpoint, with its loss on held-out samples."""
    first_loss, metrics = held_out(run, held_out_samples(run))
    _tell_plan(run, 0, last_plan_id(run.directory))
    run.journal.event("started", step=0, plan_id=run.begin.plan_id, held_out_loss=first_loss, **metrics)
    return replace(run.begin, first_loss=first_loss)


def resume(run: OpenRun, newest: Path) -> TrainingState:
    """Return the state of the newest checkpoint, which may be of another plan."""
    state, plan_id = load(run, newest), run.begin.plan_id
    _tell_plan(run, state.step, last_plan_id(run.directory) or state.plan_id)
    if current_id(state.plan_id, run.job.plan) != plan_id and has_rank_tensors(newest):
        run.journal.event("began anew", step=state.step, former=state.plan_id)
    forget_view(newest, run.nodes, run.checkpoint_ranks)
    run.journal.event("resumed", step=state.step, plan_id=plan_id, checkpoint=newest.name)
    return replace(state, plan_id=plan_id, precision=run.begin.precision)


def go_on(run: OpenRun, membership: Membership, change: Change) -> TrainingState:
    """Go on behind the last common reset with whoever is present now."""
    state, of_all = membership.restore(run.runtime), membership.job.plan
    lost, back = (replicas_of(of_all, ranks) for ranks in (change.lost, change.back))
    _tell_plan(run, state.step, last_plan_id(run.directory))
    # The ranks of this plan, by the numbers with which the run began; logs and processes keep these.
    ranks = list(membership.roll.members)
    run.journal.event(WENT_ON, step=state.step, plan_id=run.begin.plan_id, ranks=ranks)
    if lost:
        named = f"replica {lost[0]}" if len(lost) == 1 else f"replicas {' and '.join(map(str, lost))}"
        about = {"replicas": lost, "reached": change.reached, "told": named}
        run.journal.event(DIED, step=state.step, **about)
    if back:
        away = {replicas_of(of_all, [rank])[0]: change.away_since[rank] for rank in change.back}
        for method in run.runtime.methods.values():
            if (told := method.returned(away, state.step)) is not None:
                run.journal.event(**told)
    return replace(state, plan_id=run.begin.plan_id, precision=run.begin.precision)


def _tell_plan(run: OpenRun, step: int, former: str | None) -> None:
    plan_id, servers = run.begin.plan_id, run.job.plan.servers
    if servers:
        cluster = run.job.problem.job.cluster
        run.journal.event("servers", step=step, servers=server_words(servers, cluster))
    if former is not None and current_id(former, run.job.plan) != plan_id:
        run.journal.event("plan changed", step=step, former=former, now=plan_id)


def verify_resume(run: OpenRun, result: StepResult) -> None:
    """Compare the loss of the first step after a resume with the recorded loss of the interrupted run."""
    if run.runtime.rank != 0:
        return
    plan_ids = {run.begin.plan_id, *former_ids(run.job.plan)}
    recorded = recorded_loss(run.directory, result.step, plan_ids)
    with meeting_peers():
        loss = result.loss
    if recorded not in (None, loss):
        run.journal.event("resume differs", step=result.step, loss=loss, recorded=recorded)
        print(f"warning: {warnings(run.directory.events(), 0.0)[-1]}", file=sys.stderr)
