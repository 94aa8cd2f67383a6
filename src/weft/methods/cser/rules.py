"""The rules of CSER, and the move to it: several replicas, losses of one scale, a run with a reset."""

from __future__ import annotations

from collections.abc import Iterator

from weft.describe.contract import Contract
from weft.describe.plan import SCALED
from weft.describe.synchronisation import options_in
from weft.errors import Violation
from weft.methods.cser.options import NAME, CserOptions
from weft.methods.cser.program import owed_by
from weft.methods.local_averaging.program import NOBODY
from weft.methods.local_averaging.rules import SCALES
from weft.moves.synchronisation import Replication, SyncChoice, SyncRefusal
from weft.planning.job_rules import JobRule
from weft.planning.planned_job import PlannedJob


def _refuse(options: CserOptions, of: Replication) -> SyncRefusal | None:
    if of.replicas == 1:
        return SyncRefusal(NOBODY)
    if of.precision in SCALED:
        return SyncRefusal(SCALES, "precision", "bf16")
    if (problem := options.absences.problem(of.replicas)) is not None:
        return SyncRefusal(problem, "sync.absent", "no absence")
    return None


def _no_reset(planned: PlannedJob) -> Iterator[Violation]:
    """Yield a violation for a run that ends before its first reset, so that no error would be reset."""
    options = options_in(planned.plan, NAME, CserOptions)
    every, steps = 0 if options is None else owed_by(options).every, planned.run.train.steps
    if every > steps:
        problem = f"{steps}; errors are reset every {every} steps, so they never would be"
        yield Violation("train.steps", problem, str(every))


_CHOICE = SyncChoice(method=NAME, table=CserOptions, refuse=_refuse, moved_options={"ratio": 32.0})

RULES = (
    *_CHOICE.rules(other="one replica, fp16", reason=f"{NOBODY}; {SCALES}"),
    JobRule(refuse=_no_reset),
)
MOVES = (
    _CHOICE.move(
        name="reset errors",
        contract=Contract.EMPIRICAL,
        summary="Replicas apply whole updates, average a few blocks of them, and of errors at resets.",
        source="Xie et al., CSER, arXiv 2007.13221",
        verify="weights equal those of one process that steps every replica by itself (float64 1e-9)",
    ),
)
