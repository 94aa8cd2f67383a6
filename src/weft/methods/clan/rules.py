"""The rules of CLAN, and the move to it: replicas that each step all weights."""

from __future__ import annotations

from collections.abc import Iterator

from weft.describe.contract import Contract
from weft.describe.job import Job
from weft.describe.layout import Layout
from weft.describe.plan import SCALED, SERVERS, Plan
from weft.describe.synchronisation import options_in
from weft.errors import Violation
from weft.methods.clan.options import NAME, ClanOptions
from weft.moves.composition import Composition
from weft.moves.synchronisation import NOBODY, Replication, SyncChoice, SyncRefusal
from weft.planning.exposed_codecs import codec_decision
from weft.planning.job_rules import JobRule
from weft.planning.measured_changes import MeasuredChange
from weft.planning.planned_job import PlannedJob

SHARDED = "all replicas pull all gradients, and {} wants shares of them only"
SCALE = "errors have the scale of earlier losses, and {} changes it"
WHOLE = "servers add up whole stages, and replicas of {} ranks hold parts of them"
THROUGH_HOSTS = "servers have no accelerator, and the transport 'device' needs one on both ends"


def _refuse(options: ClanOptions, of: Replication) -> SyncRefusal | None:
    if of.replicas == 1:
        return SyncRefusal(NOBODY)
    if of.sharding != "zero-0":
        return SyncRefusal(SHARDED.format(of.sharding), "sharding", "zero-0")
    if options.keeps_errors and of.precision in SCALED:
        return SyncRefusal(SCALE.format(of.precision), "precision", "bf16")
    if options.servers and of.width > 1:
        return SyncRefusal(WHOLE.format(of.width), "tp", "1")
    return None


def _refuse_transport(job: Job, servers: int) -> str | None:
    """Return why servers cannot exchange with the devices of a job, or None."""
    accelerated = any(not group.device.synchronous for group in job.cluster.groups)
    usual = "device" if accelerated else "host"
    return THROUGH_HOSTS if servers and (job.transport or usual) != "host" else None


def _of_layout(job: Job, layout: Layout) -> str | None:
    servers = int(layout.sync_options.get(SERVERS, job.servers)) if layout.sync == NAME else 0
    reason = _refuse_transport(job, servers)
    return None if reason is None else f"{NAME}: {reason}; nearest run.transport: host"


def _of_run(planned: PlannedJob) -> Iterator[Violation]:
    """Yield the same of a plan's run, which may come from an edited file."""
    if (reason := _refuse_transport(planned.problem.job, len(planned.plan.servers))) is not None:
        yield Violation("run.transport", reason, "host")


def _needless(planned: PlannedJob) -> Iterator[Violation]:
    """Yield the keys that nothing reads; a codec that follows later may read them."""
    options = options_in(planned.plan, NAME, ClanOptions)
    if options is not None and not options.change_codec_every:
        for key in options.unread:
            words = ", ".join(sorted(options.codecs))
            yield Violation(f"sync.{key}", f"codec {words} does not read it; leave it out")


def _changes_every(plan: Plan) -> int:
    options = options_in(plan, NAME, ClanOptions)
    return 0 if options is None else options.change_codec_every


_CHOICE = SyncChoice(method=NAME, table=ClanOptions, refuse=_refuse)

RULES = (
    *_CHOICE.rules(
        other="one replica, sharded states, fp16 with errors, servers with tensor ranks",
        reason=f"{NOBODY}; {SHARDED.format('zero-1')}; {SCALE.format('fp16')}; {WHOLE.format(2)}",
    ),
    Composition(
        method=NAME, other="servers with the transport 'device'", reason=THROUGH_HOSTS, refuse=_of_layout
    ),
    JobRule(refuse=_of_run),
    JobRule(refuse=_needless),
    MeasuredChange(
        key="sync.change_codec_every",
        every=_changes_every,
        decide=codec_decision,
        unmeasured="codec not measured",
    ),
)
MOVES = (
    _CHOICE.move(
        name="compress both ways",
        contract=Contract.EMPIRICAL,
        summary="Replicas encode gradients, owners add them up and encode the sums; both keep their errors.",
        source="Zhong et al., CLAN, arXiv 2105.07829",
        verify="weights equal those of one process that encodes the same numbers (bit for bit)",
    ),
)
