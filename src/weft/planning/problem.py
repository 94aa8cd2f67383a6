"""`Problem`: everything that a planner needs, resolved from a run file or from a few words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TypedDict, Unpack

from weft.describe.added_layers import trained_graph
from weft.describe.cluster import Cluster
from weft.describe.cluster_file import parse_cluster
from weft.describe.contract import Contract
from weft.describe.home import weft_home
from weft.describe.layer_choices import with_choices
from weft.describe.layer_graph import LayerGraph
from weft.describe.layout import OPEN, Layout, PartialLayout
from weft.describe.model import ModelConfig
from weft.describe.models import resolve_model
from weft.describe.one_line import one_line
from weft.describe.optimizers import ADAMW, OptimizerWork, counted_work
from weft.describe.plan import Choice, LayerChoice
from weft.describe.run_file import RunFile
from weft.describe.run_tables.methods import run_tables
from weft.describe.run_tables.training import ANY_PRECISION
from weft.describe.tasks import task_problems
from weft.errors import InputError, Violation
from weft.moves.job import Job
from weft.moves.pins import refused_pins
from weft.predict.corrections import Correction, fit
from weft.predict.corrections_file import load_residuals
from weft.predict.cost.calibration import load_machine, load_profiles
from weft.predict.cost.compute import ComputeModel
from weft.predict.cost.cost_model import CostModel
from weft.predict.profile import LayerProfile, MachineMeasurement

# Samples per device and step when the user gives no global batch.
DEFAULT_SAMPLES_PER_DEVICE = 8


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A job, the user's pins, and the measurements of the devices.

    `pins` are the user's decisions on a layout; `sync` is the user's rule to synchronise replicas, if any.
    Plans must keep at least `contract` of the training. `correction` comes from measured steps and corrects
    predictions from all this. `assumed` lists assumptions in words, made where the user left choices open.
    """

    job: Job
    model: ModelConfig
    pins: PartialLayout = OPEN
    sync: str | None = None
    minimise: str = "time"
    contract: Contract = Contract.EXACT
    machine: MachineMeasurement | None = None
    profile: LayerProfile | None = None
    correction: Correction | None = None
    assumed: Mapping[str, str] = field(default_factory=dict)

    def __repr__(self) -> str:
        return one_line(self, f"{self.job}, least {self.minimise}")

    def admits(self, layout: Layout) -> bool:
        """Return True if a layout has all of the user's decisions."""
        return self.pins.admit(layout) and self.sync in (None, layout.sync)

    def choosing(self, choices: tuple[LayerChoice, ...]) -> Problem:
        """Return the problem with these choices for single layers, and no others.

        Raises:
            InputError: with every fault of the choices.
        """
        if choices == self.job.layer_choices:
            return self
        graph = with_choices(self.job.graph, choices)
        return replace(self, job=replace(self.job, graph=graph, layer_choices=choices))

    @cached_property
    def cost_model(self) -> CostModel:
        """The prices for the plans of every search."""
        return CostModel(
            graph=self.job.graph,
            cluster=self.job.cluster,
            machine=self.machine,
            profile=self.profile,
            correction=self.correction,
        )


class ProblemOptions(TypedDict, total=False):
    """Options of a problem, as in `Problem`; an option that is left out or None is assumed.

    `sync`: the rule to synchronise replicas, with its options. `sequence`: tokens per sample.
    `methods`: the job's methods by name. `optimizer`: the bytes that it keeps and moves (default: AdamW's).
    `home`: the folder of measurements (default: `weft_home()`).
    """

    global_batch: int | None
    sequence: int | None
    precision: str | None
    pins: PartialLayout | None
    sync: Choice | None
    minimise: str
    contract: Contract
    methods: tuple[Choice, ...]
    optimizer: OptimizerWork
    home: Path | None


def problem_of(*, model: str, on: str, **options: Unpack[ProblemOptions]) -> Problem:
    """Resolve names to a problem.

    Raises:
        InputError: for an unknown model, cluster, device or precision.
    """
    config = resolve_model(model, sequence=options.get("sequence"))
    return problem_of_model(config, parse_cluster(on), **options)


def problem_of_model(config: ModelConfig, cluster: Cluster, **options: Unpack[ProblemOptions]) -> Problem:
    """Return the problem of a model of known sizes on a described cluster; see `problem_of`.

    The sequence is the model's.

    Raises:
        InputError: when a device does not compute the precision.
    """
    global_batch, precision = options.get("global_batch"), options.get("precision")
    home = options.get("home") or weft_home()
    assumed: dict[str, str] = {}
    if global_batch is None:
        global_batch = DEFAULT_SAMPLES_PER_DEVICE * cluster.ranks
        assumed["global_batch"] = f"{global_batch} samples, {DEFAULT_SAMPLES_PER_DEVICE} per device"
    if precision is None:
        precision = default_precision(cluster)
        assumed["precision"] = precision
    if options.get("sequence") is None and config.convolutions is None:
        assumed["sequence"] = f"{config.sequence} tokens, the model's longest"
    _require_precision(cluster, precision)
    graph, sync = trained_graph(config, options.get("methods", ())), options.get("sync")
    machine, profile = measurements_for(cluster, graph.fingerprint, config.sequence, precision, home)
    return Problem(
        job=Job(
            graph=graph,
            cluster=cluster,
            global_batch=global_batch,
            sequence=config.sequence,
            precision=precision,
            methods=options.get("methods", ()),
            optimizer=options.get("optimizer", ADAMW),
            sync_options={} if sync is None else sync.options,
        ),
        model=config,
        pins=options.get("pins") or OPEN,
        sync=None if sync is None else sync.name,
        minimise=options.get("minimise", "time"),
        contract=options.get("contract", Contract.EXACT),
        machine=machine,
        profile=profile,
        correction=correction_for(cluster, graph, precision, machine, profile, home),
        assumed=assumed,
    )


def problem_of_run(run: RunFile, *, home: Path | None = None) -> Problem:
    """Return the problem that a run file poses.

    Raises:
        InputError: see `problem_of`; also when the task cannot train the model, when a pin keeps less than
            the goal's contract, and when the precision is left to a search.
    """
    if run.train.precision == ANY_PRECISION:
        problem = f"{ANY_PRECISION!r} is for a search of one best plan; say which one"
        raise InputError(Violation("train.precision", problem, "bf16"))
    if refused := refused_pins(run):
        raise InputError(refused)
    table = run.optimizer
    counted = counted_work(table.name, momentum=table.momentum, state_bytes=table.state_bytes)
    posed = problem_of(
        model=run.model.preset or run.model.hf or run.model.build or "",
        on=run.cluster.use,
        global_batch=run.train.global_batch,
        sequence=run.task.sequence,
        precision=run.train.precision,
        pins=run.plan,
        sync=run.sync.choice,
        minimise=run.goal.minimise,
        contract=Contract.of(run.goal.contract),
        methods=(*table.methods, *run.report.methods, *method_choices(run)),
        optimizer=counted.work,
        home=home,
    )
    if choices := _layer_choices(run, posed.job.graph):
        posed = posed.choosing(choices)
    if counted.assumed:
        posed = replace(posed, assumed={**posed.assumed, "optimizer": counted.assumed})
    if problems := task_problems(run.task.kind, posed.model):
        raise InputError(problems)
    return posed


def _layer_choices(run: RunFile, graph: LayerGraph) -> tuple[LayerChoice, ...]:
    """Return the choices for single layers in a run file's tables."""
    tables = run_tables()
    return tuple(one for name, table in run.methods.items() for one in tables[name].choices(table, graph))


def method_choices(run: RunFile) -> tuple[Choice, ...]:
    """Return the methods in a run file's tables, each with its options."""
    tables = run_tables()
    found = {name: tables[name].options(table) for name, table in run.methods.items()}
    return tuple(
        Choice(name=name, options=dict(options)) for name, options in found.items() if options is not None
    )


def default_precision(cluster: Cluster) -> str:
    """Return bf16 where every device has it and computes apart from its host, else fp32."""
    capable = all("bf16" in group.device.flops_per_s for group in cluster.groups)
    synchronous = any(group.device.synchronous for group in cluster.groups)
    return "bf16" if capable and not synchronous else "fp32"


def measurements_for(
    cluster: Cluster, model_fingerprint: str, sequence: int, precision: str, home: Path
) -> tuple[MachineMeasurement | None, LayerProfile | None]:
    """Return the measurements of the cluster's kinds of devices.

    Layer times are of all kinds. Speeds of a machine need one kind: devices of a mixed cluster are several
    machines.
    """
    names = list(dict.fromkeys(group.device.name for group in cluster.groups))
    machine = load_machine(names[0], home) if len(names) == 1 else None
    return machine, load_profiles(model_fingerprint, names, sequence, precision, home)


def sources_of(
    cluster: Cluster, precision: str, machine: MachineMeasurement | None, profile: LayerProfile | None
) -> dict[str, str]:
    """Return the source of compute times for each kind of device of the cluster."""
    compute = ComputeModel(machine=machine, profile=profile)
    devices = [group.device for group in cluster.groups]
    return {device.name: compute.source_of(device, precision) for device in devices}


def correction_for(
    cluster: Cluster,
    graph: LayerGraph,
    precision: str,
    machine: MachineMeasurement | None,
    profile: LayerProfile | None,
    home: Path,
) -> Correction | None:
    """Return the correction from measured steps of the model on this cluster, for the same sources.

    Raises:
        InputError: when their file is broken, or is of something else.
    """
    residuals = load_residuals(graph, precision, cluster, home)
    return fit(residuals.of(sources_of(cluster, precision, machine, profile)))


def _require_precision(cluster: Cluster, precision: str) -> None:
    for group in cluster.groups:
        if precision not in group.device.flops_per_s:
            able = ", ".join(group.device.flops_per_s)
            problem = f"{precision!r} is not supported by {group.device.name}; it has {able}"
            raise InputError(Violation("precision", problem))
