"""`verified.json`: the digests of the programs that a launcher has verified for the ranks that it starts.

It is in the run directory and has one digest per rank. Without a launcher, as under `torchrun`, rank 0
compiles and verifies the programs itself.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np

from weft.errors import InputError, Violation
from weft.files import write_whole
from weft.planning.planned_job import PlannedJob
from weft.program.arrays import Ids
from weft.program.rank_program import digests
from weft.run.launch.worker_main import AGENT_PID

NAME = "verified.json"
_PROGRAMS = ("training", "evaluation")


def write_verified(run_dir: Path, job: PlannedJob) -> None:
    """Compile and verify a job's whole programs and write their digests for its ranks.

    Raises:
        InputError: if a program is refused.
    """
    shown = {name: [f"{digest:016x}" for digest in found.tolist()] for name, found in _verified(job).items()}
    record = {"plan_id": job.plan.plan_id, **shown}
    write_whole(run_dir / NAME, json.dumps(record, indent=1) + "\n")


def verified_digests(run_dir: Path, job: PlannedJob) -> list[Ids]:
    """Return, on rank 0, the digests of training and evaluation, the launcher's if there is one.

    Raises:
        InputError: if a program is refused, or the launcher's digests are for another plan.
    """
    path = run_dir / NAME
    if AGENT_PID not in os.environ or not path.exists():
        return list(_verified(job).values())
    record = json.loads(path.read_text())
    if record["plan_id"] != job.plan.plan_id:
        problem = f"is of plan {record['plan_id']}, and the ranks were started for {job.plan.plan_id}"
        raise InputError(Violation(str(path), problem))
    return [np.array([int(one, 16) for one in record[name]], dtype=np.uint64) for name in _PROGRAMS]


def _verified(job: PlannedJob) -> dict[str, Ids]:
    return dict(zip(_PROGRAMS, (digests(job.program), digests(job.evaluation)), strict=True))
