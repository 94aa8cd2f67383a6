"""One rank of a training run, under weft's agent or `torchrun`.

    torchrun --nproc-per-node N -m weft.training.worker RUN_DIR

Exit codes: 0 all steps are done; 1 the run failed; 2 the input was refused; 130 and 143 SIGINT and SIGTERM
stopped it, after a checkpoint. Before the first step these signals kill it at any point.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from weft.bundles import own_runtimes
from weft.describe.units import counted
from weft.errors import InputError, RunError, Violation
from weft.run.launch.worker_main import AGENT_PID
from weft.training.directory.run_lock import only_run

if TYPE_CHECKING:
    from weft.planning.planned_job import PlannedJob
    from weft.run.launch.worker_start import WorkerContext
    from weft.training.directory.node_meeting import ChoosePlan, MetNodes


def main(run_dir: Path) -> int:
    """Train the run of a run directory and return the exit code.

    Raises:
        InputError: if the directory holds no run, something in it is refused, or another process trains it.
        RunError: if the run failed.
    """
    from weft.training.directory.plans_at_hand import take_at_hand

    return with_nodes(run_dir, _train, take_at_hand)


def with_nodes(
    run_dir: Path, work: Callable[[PlannedJob, Path, MetNodes | None], int], choose: ChoosePlan
) -> int:
    """Meet the other nodes, do a rank's part of some work on a run, and return its exit code.

    A rank beyond those of the plan waits instead, and returns the exit code of rank 0. `choose` as of
    `meet_nodes`.

    Raises:
        InputError: if the directory holds no run, or something in it is refused.
        RunError: if the nodes did not meet, or the work failed.
    """
    _end_by_signals()
    from weft.training.directory.node_meeting import meet_nodes

    met = meet_nodes(run_dir, choose)
    if met is not None and met.is_spare:
        return met.wait_as_spare()
    exit_code = work(read(run_dir, ranks=None if met is None else met.ranks), run_dir, met)
    if met is not None:
        met.release_spares(exit_code)
    return exit_code


def _train(job: PlannedJob, run_dir: Path, met: MetNodes | None) -> int:
    from weft.planning.lost_replicas import goes_on

    if goes_on(job):
        from weft.training.rolls import train_rolls

        return train_rolls(read(run_dir, of_all=True), run_dir)
    context = meet(job, met)
    from weft.training.coordination.agreement import together
    from weft.training.directory.node_records import keeping_records
    from weft.training.directory.run_directory import complete_plan
    from weft.training.loop import train

    with ExitStack() as held:
        with together():
            # Else the launcher holds the lock.
            if context.nodes.leads_folder and AGENT_PID not in os.environ:
                held.enter_context(only_run(run_dir))
            if context.nodes.rank == 0:
                complete_plan(run_dir, job)
        with keeping_records(run_dir, context.nodes):
            exit_code = train(job, run_dir, context)
    context.close()
    return exit_code


def load(run_dir: Path) -> None:
    """Import what every rank of the run needs; nothing of the user's, which might start threads.

    Raises:
        InputError: when the directory has no plan file, or a broken one.
    """
    own = ("directory.node_meeting", "directory.node_records", "loop", "session")
    for module in (*(f"weft.training.{name}" for name in own), *own_runtimes()):
        import_module(module)
    from weft.describe.families.own import FAMILY
    from weft.describe.plan_file import load_plan_file
    from weft.run.stage.families import stage_family

    subject = load_plan_file(run_dir / "plan.json").subject
    if subject is not None and subject.model.family != FAMILY:
        stage_family(subject.model.family)


def read(run_dir: Path, *, of_all: bool = False, ranks: int | None = None) -> PlannedJob:
    """Read the run of a run directory; `of_all` and `ranks` as `weft.training.session.reopen`.

    Raises:
        InputError: if the directory holds no run, or something in it is refused.
    """
    from weft.training.session import reopen

    job = reopen(run_dir, of_all=of_all, ranks=ranks)
    if job.elsewhere:
        raise InputError(job.elsewhere)
    return job


def _end_by_signals() -> None:
    """Let stop signals end this process; call it before imports that take seconds.

    Before the loop takes stop requests, there is nothing to save. Python calls no handler while a rank is
    stuck in a call that waits for a file or for others.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


def meet(job: PlannedJob, met: MetNodes | None = None) -> WorkerContext:
    """Join the other ranks of a job; `met` are its nodes, if there are several.

    Raises:
        InputError: if other ranks were started than the plan uses, or a node lacks the cluster's interface.
        RunError: if the ranks did not meet.
    """
    from weft.run.launch.worker_start import start_worker

    store, nodes, ranks = (met.store, met.nodes, met.ranks) if met else (None, None, None)
    # A rank without the interface joins the others in any other way, to tell them.
    refused = [] if nodes is None else _taken_interface(job, nodes.rank)
    started = start_worker(transport=job.run.run.used_transport, store=store, ranks=ranks)
    context = replace(started, met=nodes)
    given, needed = context.world_size, job.plan.ranks
    if given != needed:
        raise InputError(
            f"started with {counted(given, 'rank')}; the plan uses {needed} "
            f"(torchrun --nproc-per-node {needed})"
        )
    if nodes is not None:
        from weft.training.coordination.agreement import together

        with together():
            if refused:
                raise InputError(refused)
    return context


def _taken_interface(job: PlannedJob, rank: int) -> list[Violation]:
    """Have this rank's sockets use the interface that the cluster states; return why they cannot."""
    from weft.run.launch.interfaces import take_interface

    cluster = job.problem.job.cluster
    stated = cluster.group_of(rank).interface if rank < cluster.ranks else None
    try:
        if stated is not None:
            take_interface(stated)
    except InputError as error:
        return list(error.violations)
    return []


def command(main: Callable[[Path], int], module: str) -> None:
    """Run a worker's `main` as `python -m MODULE RUN_DIR` under torchrun, and exit."""
    if len(sys.argv) != 2:
        sys.exit(f"usage: python -m {module} RUN_DIR")
    try:
        exit_code = main(Path(sys.argv[1]))
    except (InputError, RunError) as error:
        print(f"error: {error}", file=sys.stderr)
        exit_code = 2 if isinstance(error, InputError) else 1
    sys.stdout.flush()
    sys.stderr.flush()
    # All files are closed by now. A normal exit would wait for threads that wait for a lost peer. It would
    # also destroy torch's own threads while they run, which sometimes aborts the process.
    os._exit(exit_code)


if __name__ == "__main__":
    command(main, "weft.training.worker")
