"""`Request`: a job and the user's decisions about its plan, from a run file or from a few words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TypedDict, Unpack

from weft.bundles import parts
from weft.describe.added_layers import trained_graph
from weft.describe.cluster import Cluster
from weft.describe.cluster_file import parse_cluster
from weft.describe.contract import Contract
from weft.describe.job import Job
from weft.describe.layout import OPEN, Layout, PartialLayout
from weft.describe.model import ModelConfig
from weft.describe.models import USUAL_SEQUENCE, resolve_model
from weft.describe.one_line import one_line
from weft.describe.optimizers import ADAMW, OptimizerWork, counted_work
from weft.describe.plan import GRADIENT_NORM, MICRO_BATCH_NORMS, SCALED, SERVERS, Choice, Launch
from weft.describe.plan_subject import PlanSubject
from weft.describe.run_tables.methods import RunTable, requested_methods, run_tables
from weft.describe.run_tables.planning import MEMORY_RISK
from weft.describe.run_tables.training import ANY_PRECISION
from weft.describe.servers import without_servers
from weft.describe.synchronisation import AUTO, DENSE, reduction_problem
from weft.describe.tasks import packing_problems, task_problems
from weft.errors import InputError, Violation

# Samples per device and step when the user gives no global batch.
DEFAULT_SAMPLES_PER_DEVICE = 8


@dataclass(frozen=True, kw_only=True)
class Request:
    """A job with its names resolved, and the user's decisions about its plan.

    `pins` are the user's decisions on a layout; `sync` is the user's rule to synchronise replicas, if any.
    Plans must keep at least `contract` of the training, and may not fit with at most the probability
    `memory_risk`. `assumed` lists assumptions in words, made where the
    user left choices open.
    """

    job: Job
    model: ModelConfig
    pins: PartialLayout = OPEN
    sync: str | None = None
    minimise: str = "time"
    contract: Contract = Contract.EXACT
    memory_risk: float = MEMORY_RISK
    assumed: Mapping[str, str] = field(default_factory=dict)

    def __repr__(self) -> str:
        return one_line(self, f"{self.job}, least {self.minimise}")

    def admits(self, layout: Layout) -> bool:
        """Return True if a layout has all of the user's decisions."""
        return self.pins.admit(layout) and self.sync in (None, layout.sync)


class RequestOptions(TypedDict, total=False):
    """Options of a request, as in `Request`; an option that is left out or None is assumed.

    `sync`: the rule to synchronise replicas, with its options. `sequence`: tokens per sample.
    `methods`: the job's methods by name. `optimizer`: the bytes that it keeps and moves (default: AdamW's).
    """

    global_batch: int | None
    sequence: int | None
    precision: str | None
    reduce_precision: str | None
    pins: PartialLayout | None
    sync: Choice | None
    minimise: str
    contract: Contract
    memory_risk: float
    methods: tuple[Choice, ...]
    optimizer: OptimizerWork
    transport: str | None
    launch: Launch


def request_of(config: ModelConfig, cluster: Cluster, **options: Unpack[RequestOptions]) -> Request:
    """Return the request to train a model of known sizes on a described cluster.

    The sequence is the model's.

    Raises:
        InputError: when a device does not compute the precision, or replicas cannot reduce in theirs.
    """
    global_batch, precision = options.get("global_batch"), options.get("precision")
    methods, sync = options.get("methods", ()), options.get("sync")
    servers = 0 if sync is None else int(sync.options.get(SERVERS, 0))
    computing = without_servers(cluster, servers)
    assumed: dict[str, str] = {}
    if global_batch is None:
        global_batch = DEFAULT_SAMPLES_PER_DEVICE * max(1, cluster.ranks - servers)
        assumed["global_batch"] = f"{global_batch} samples, {DEFAULT_SAMPLES_PER_DEVICE} per device"
    if precision is None:
        unscaled = {MICRO_BATCH_NORMS, *(one.method for one in parts(RunTable) if not one.scales)}
        scales = all(one.name not in unscaled for one in methods) and (sync is None or sync.name == DENSE)
        precision = default_precision(computing, scales=scales)
        assumed["precision"] = precision + _why_not_bf16(computing)
    if options.get("sequence") is None and config.convolutions is None:
        capped = config.decoder is not None and config.sequence == USUAL_SEQUENCE
        usual = "the usual length of samples" if capped else "the model's longest"
        assumed["sequence"] = f"{config.sequence} tokens, {usual}"
    if precision in SCALED:
        methods = with_gradient_norm(methods)
    require_precision(computing, precision)
    reduced = options.get("reduce_precision")
    if refused := reduction_problem(reduced, precision, DENSE if sync is None else sync.name):
        raise InputError(refused)
    return Request(
        job=Job(
            graph=trained_graph(config, methods),
            cluster=cluster,
            global_batch=global_batch,
            sequence=config.sequence,
            precision=precision,
            reduce_precision=reduced,
            methods=methods,
            optimizer=options.get("optimizer", ADAMW),
            sync_options={} if sync is None else sync.options,
            transport=options.get("transport"),
            launch=options.get("launch", "eager"),
        ),
        model=config,
        pins=options.get("pins") or OPEN,
        sync=None if sync is None else sync.name,
        minimise=options.get("minimise", "time"),
        contract=options.get("contract", Contract.EXACT),
        memory_risk=options.get("memory_risk", MEMORY_RISK),
        assumed=assumed,
    )


def request_of_names(*, model: str, on: str, **options: Unpack[RequestOptions]) -> Request:
    """Resolve the names of a model and a cluster; see `request_of`.

    Raises:
        InputError: for an unknown model, cluster, device or precision.
    """
    config = resolve_model(model, sequence=options.get("sequence"))
    return request_of(config, parse_cluster(on), **options)


def request_of_subject(subject: PlanSubject) -> Request:
    """Return the request in a run file for its model and cluster.

    Raises:
        InputError: see `request_of`; also when the task cannot train the model, and when the precision or the
            synchronisation is left to a search.
    """
    run = subject.run
    if run.train.precision == ANY_PRECISION:
        problem = f"{ANY_PRECISION!r} is for a search of one best plan; say which one"
        raise InputError(Violation("train.precision", problem, "bf16"))
    if run.sync.method == AUTO:
        problem = f"{AUTO!r} is for a search of one best plan; say which one"
        raise InputError(Violation("sync.method", problem, DENSE))
    table = run.optimizer
    counted = counted_work(table.name, momentum=table.momentum, state_bytes=table.state_bytes)
    # Of the `[optimizer]` table, or of a scaled gradient.
    scaled = (Choice(name=GRADIENT_NORM),) if counted.work.unit_gradient else ()
    found = request_of(
        subject.model,
        subject.cluster,
        global_batch=run.train.global_batch,
        sequence=run.task.sequence,
        precision=run.train.precision,
        reduce_precision=run.train.reduce_precision,
        pins=run.plan,
        sync=run.sync.choice,
        minimise=run.goal.minimise,
        contract=Contract.of(run.goal.contract),
        memory_risk=run.goal.memory_risk,
        methods=(
            *(run.optimizer.methods or scaled),
            *run.report.methods,
            *run.task.methods,
            *requested_methods(run.methods, subject.model),
        ),
        optimizer=counted.work,
        transport=run.run.used_transport,
        launch="compiled" if run.train.compile else "eager",
    )
    tables, graph = run_tables(), found.job.graph
    choices = (one for name, table in run.methods.items() for one in tables[name].choices(table, graph))
    found = replace(found, job=found.job.choosing(tuple(choices)))
    if counted.assumed:
        found = replace(found, assumed={**found.assumed, "optimizer": counted.assumed})
    problems = task_problems(run.task.kind, found.model)
    if problems := problems or (packing_problems(found.model) if run.task.packing else []):
        raise InputError(problems)
    return found


def with_gradient_norm(methods: tuple[Choice, ...]) -> tuple[Choice, ...]:
    """Return methods with the norm of the whole gradient among them."""
    if any(one.name == GRADIENT_NORM for one in methods):
        return methods
    return (Choice(name=GRADIENT_NORM), *methods)


def default_precision(cluster: Cluster, *, scales: bool = True) -> str:
    """Return bf16 where every device has it and computes apart from its host, else fp16 likewise, else fp32.

    `scales`: losses may be scaled, as fp16 needs.
    """
    if any(group.device.synchronous for group in cluster.groups):
        return "fp32"
    wanted: list[str] = ["bf16", *SCALED] if scales else ["bf16"]
    able = (name for name in wanted if all(name in one.device.flops_per_s for one in cluster.groups))
    return next(able, "fp32")


def _why_not_bf16(cluster: Cluster) -> str:
    """Return which devices keep others, which have bf16, from computing in it; empty if none does."""
    devices = {group.device.name: group.device for group in cluster.groups}
    without = [name for name, device in devices.items() if "bf16" not in device.flops_per_s]
    if not without or len(without) == len(devices):
        return ""
    return f", since {' and '.join(without)} cannot compute in bf16; leave them out, or give --precision"


def require_precision(cluster: Cluster, precision: str) -> None:
    """Check that every device computes in a precision.

    Raises:
        InputError: with the precisions that a device has.
    """
    for group in cluster.groups:
        if precision not in group.device.flops_per_s:
            able = ", ".join(group.device.flops_per_s)
            problem = f"{precision!r} is not supported by {group.device.name}; it has {able}"
            raise InputError(Violation("precision", problem))
