"""`train_rolls`: one rank's way through a run that goes on where replicas are lost, roll by roll."""

from __future__ import annotations

import gc
import os
from pathlib import Path

from weft.errors import InputError, Violation
from weft.planning.lost_replicas import job_among
from weft.planning.planned_job import PlannedJob
from weft.run.launch.rolls import REPLACES
from weft.run.launch.worker_main import AGENT_PID
from weft.run.launch.worker_start import own_context
from weft.training.coordination.membership import Membership, connect_store
from weft.training.directory.process_memory import ProcessMemory
from weft.training.directory.run_directory import RunDirectory
from weft.training.loop import train_plan
from weft.training.worker import load, meet


def train_rolls(job: PlannedJob, run_dir: Path) -> int:
    """Train to the last step of the run file as `weft.training.loop.train`, with whoever is present.

    The first processes begin together. A process that replaces another one joins a later roll.

    Raises:
        InputError, RunError: as `train` does; also under another launcher than weft's.
    """
    if AGENT_PID not in os.environ:
        problem = "'go-on' needs an agent that replaces processes, and only weft train starts one"
        raise InputError(Violation("run.on_death", problem, "stop"))
    gc.freeze()
    joins = REPLACES in os.environ
    if joins:
        # The others wait while it opens its run, and the agent has loaded nothing for this process.
        load(run_dir)
    context = own_context(job.run.run.used_transport) if joins else meet(job)
    membership = Membership(job, RunDirectory(run_dir), context, connect_store(), joins=joins)
    memory: ProcessMemory | None = None
    if joins:
        membership.enter()
    while True:
        now = job_among(job, membership.roll.members)
        try:
            end, memory = train_plan(
                now, run_dir, membership.context, membership.roll.number, memory, membership
            )
        except Exception as error:
            if not membership.is_followed(error):
                raise
        else:
            if end.stopped_by is not None:
                return 128 + end.stopped_by
            if not end.joins:
                return 0
        membership.enter()
