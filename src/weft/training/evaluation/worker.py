"""One rank of the evaluation of a run, under weft's agent or `torchrun`.

torchrun --nproc-per-node N -m weft.training.evaluation.worker RUN_DIR
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from weft.progress import progress_file, unwatched
from weft.training.worker import command, load, meet, with_nodes

if TYPE_CHECKING:
    from weft.planning.planned_job import PlannedJob
    from weft.training.directory.node_meeting import MetNodes

__all__ = ["load", "main"]


def main(run_dir: Path) -> int:
    """Evaluate the run of a run directory and return the exit code.

    Raises:
        InputError: if the directory holds no run or no checkpoint, or something in it is refused.
        RunError: if the evaluation failed.
    """
    from weft.training.directory.plans_at_hand import largest_at_hand

    # The plan of the run stays that of its training.
    return with_nodes(run_dir, _evaluate, largest_at_hand)


def _evaluate(job: PlannedJob, run_dir: Path, met: MetNodes | None) -> int:
    context = meet(job, met)
    from weft.training.evaluation.held_out import evaluate

    evaluate(job, run_dir, context, progress_file(run_dir).write if context.rank == 0 else unwatched)
    context.close()
    return 0


if __name__ == "__main__":
    command(main, "weft.training.evaluation.worker")
