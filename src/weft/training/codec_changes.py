"""Changes of codecs while a run trains: rank 0 finds them in the measured steps, and all ranks follow."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from weft.describe.synchronisation import changes_codecs_every, with_keys
from weft.errors import RunError
from weft.planning.exposed_codecs import codec_change, exposed_codecs
from weft.planning.planned import PlannedJob, changed_to
from weft.run.record.recorder import collect_timeline
from weft.timeline.critical_path import MOST_CYCLES
from weft.training.coordination.agreement import from_first_rank, together
from weft.training.directory.run_directory import RunDirectory
from weft.training.open_run import OpenRun

# Fewer steps than these say too little.
LEAST_MEASURED = 2


class CodecChanges:
    """The points at which a run may change a codec; every rank makes one, and asks after the same steps.

    `begun` is the number of steps before those of this plan.
    """

    def __init__(self, run: OpenRun, begun: int) -> None:
        self._run, self._begun = run, begun
        self._every, self._due = changes_codecs_every(run.job.plan.sync), False

    def after(self, done: int) -> PlannedJob | None:
        """Return the job with another codec for one piece, if that is due and shortens the predicted step.

        It is due at the end of a cycle.

        Raises:
            InputError, RunError: on every rank, if rank 0 cannot decide.
        """
        self._due |= bool(self._every) and done % self._every == 0 and done > self._begun
        if not self._due or done % self._run.program.steps_per_cycle:
            return None
        self._due = False
        told: dict[str, Any] | None = None
        with together():
            if self._run.runtime.rank == 0:
                told = self._decided(done)
        told = from_first_rank(told)
        if told is None:
            return None
        self._run.journal.event(told["event"], step=done, **told["words"])
        if told["keys"] is None:
            return None
        plan = self._run.job.plan
        sync = with_keys(plan.sync, told["keys"])
        job = changed_to(self._run.job, plan.model_copy(update={"sync": sync}), None)
        with together():
            if self._run.runtime.rank == 0:
                RunDirectory(self._run.directory.path).prepare_turn(job)
        return job

    def _decided(self, done: int) -> dict[str, Any] | None:
        """Return the event of a decision, its words, and the changed keys, None where codecs stay."""
        job, directory = self._run.job, self._run.directory
        # Rings of slots may not have the end of the last step yet.
        steps = range(max(self._begun + 1, done - MOST_CYCLES * job.program.steps_per_cycle), done - 1)
        if len(steps) < LEAST_MEASURED:
            return None
        try:
            plan_id = job.plan.plan_id
            measured = collect_timeline(directory.path, job.program, plan_id, directory.name, steps=steps)
        except RunError as error:
            return {"event": "codec not measured", "words": {"reason": str(error)}, "keys": None}
        found = exposed_codecs(job, measured)
        if not found:
            return None
        change = codec_change(job, found)
        one = found[0] if change is None else change.exposed
        words: dict[str, Any] = {"exposed": str(one), **asdict(one)}
        if change is None:
            return {"event": "codec exposed", "words": words, "keys": None}
        words |= {"former": plan_id, "now": change.plan.plan_id, "change": str(change)}
        return {"event": "codec changed", "words": words, "keys": dict(change.keys)}
