"""Exposed codecs in answers: lines for terminals, and a record for JSON."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from weft.cli.output import console
from weft.describe.synchronisation import DENSE
from weft.planning.exposed_codecs import codec_change, codec_rows, exposed_codecs
from weft.planning.planned_job import PlannedJob
from weft.timeline.timeline import Timeline
from weft.training.directory.run_directory import RunDirectory
from weft.training.session import reopen


def codecs_of_run(path: Path) -> tuple[PlannedJob, Timeline] | None:
    """Return a run's job and its measured timeline; None where replicas send plain sums, without codecs."""
    directory = RunDirectory(path)
    return None if directory.plan().sync.name == DENSE else (reopen(path), directory.measured())


def print_codecs(job: PlannedJob, measured: Timeline | None = None) -> None:
    """Print which piece's codecs delay the step most, and the codec that would shorten it."""
    for label, words in codec_rows(job, measured):
        console().print(f"{label}: {words}", soft_wrap=True, highlight=False, markup=False)


def codec_record(job: PlannedJob, measured: Timeline | None = None) -> dict[str, Any]:
    """Return `exposed_codecs`, in seconds by piece, and `codec_change`; empty without exposed codecs."""
    found = exposed_codecs(job, measured)
    if not found:
        return {}
    change = codec_change(job, found)
    told = None if change is None else {**change.keys, "predicted_step_s": change.prediction.step_s}
    return {"exposed_codecs": [asdict(one) for one in found], "codec_change": told}
