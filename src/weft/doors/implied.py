"""Implications of a configuration: a problem that weft can plan, the file's layout, and both predictions."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from weft.describe.cluster import Cluster
from weft.describe.cluster_file import parse_cluster
from weft.describe.layout import Layout
from weft.describe.model import ModelConfig
from weft.describe.models import PRESETS, resolve_model
from weft.describe.plan import AXES, GRADIENT_NORM, Choice, Plan, Recompute
from weft.describe.prediction import Prediction
from weft.describe.request import request_of
from weft.describe.run_tables.methods import requested_methods, split_tables
from weft.describe.units import counted, shown
from weft.doors.configuration import LARGEST_COUNT, LIKE_WEFT, Configuration, StatedMemory
from weft.doors.replicas import on_devices
from weft.errors import InputError, Violation
from weft.moves.layout import build_plan
from weft.moves.sharded_units import unit_by_unit
from weft.moves.sharers import among_replicas, island_on_nodes
from weft.planning.long_steps import predict_long
from weft.planning.planners.bounds import Bounds
from weft.planning.problem import Problem, measured_problem
from weft.predict.cost.places import ClusterPlaces
from weft.predict.memory_parts import MemoryPart, held_parts
from weft.program.schedules import get_schedule

_MOST_SIMULATED = 200_000
# Models elsewhere with the sizes of a preset, by the beginning of their names in small letters.
_SIZES_OF: Mapping[str, str] = {
    "llama-3-8b": "llama-3-8b",
    "llama-3.1-8b": "llama-3-8b",
    "llama-3-70b": "llama-3-70b",
    "llama-3.1-70b": "llama-3-70b",
    "llama-3.3-70b": "llama-3-70b",
    "llama-3-405b": "llama-3-405b",
    "llama-3.1-405b": "llama-3-405b",
    "llama-2-7b": "llama-7b",
    "llama-2-13b": "llama-13b",
    "llama-7b": "llama-7b",
    "llama-13b": "llama-13b",
    "gpt2": "gpt2",
}

# The embedding and the head, beside a model's blocks.
_ENDS = 2
# Endings of names that do not change the sizes.
_SAME_SIZES = re.compile(r"(-(hf|chat|instruct|base|v[\d.]+))*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """The user's own values for a run; they override the file's."""

    model: str | None = None
    on: str | None = None
    global_batch: int | None = None
    sequence: int | None = None
    micro_batch_size: int | None = None
    recompute: Recompute | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Implied:
    """The problem that a configuration poses, its layout, its stack's memory, and the assumptions (a line
    each)."""

    problem: Problem
    layout: Layout
    memory: StatedMemory = LIKE_WEFT
    assumed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PredictedPlan:
    """The plan of a layout with its prediction, for fitting and too big layouts.

    `held` are the parts of memory that the fullest rank holds all the time.
    """

    plan: Plan
    prediction: Prediction
    held: tuple[MemoryPart, ...] = ()

    def overfull_bytes(self, cluster: Cluster, risk: float = 0.5) -> int:
        """Return the excess in bytes over a device's memory that the fullest one exceeds with this risk.

        It is negative where all fits.
        """
        needs = self.prediction.needs_at(risk)
        return int((needs - ClusterPlaces(cluster).usable_bytes[: len(needs)]).max())

    def chance_to_fit(self, cluster: Cluster) -> float:
        """Return the probability that all devices have enough memory."""
        return self.prediction.chance_to_fit(ClusterPlaces(cluster).usable_bytes.tolist())


def with_answers(configuration: Configuration, answers: Answers) -> Configuration:
    """Return the configuration with the user's answers in place of the file's values.

    Raises:
        InputError: for an answer that is no count.
    """
    # Answers on model and cluster are looked up elsewhere.
    given = {name: value for name, value in asdict(answers).items() if name not in ("model", "on")}
    wrong = [
        name for name, value in given.items() if isinstance(value, int) and not 1 <= value <= LARGEST_COUNT
    ]
    if wrong:
        text = f"allowed: counts from 1 to {LARGEST_COUNT}"
        options = ((f"--{name.replace('_', '-')}", f"{given[name]}; {text}") for name in wrong)
        raise InputError([Violation(option, problem, "1") for option, problem in options])
    changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if answers.global_batch or (answers.micro_batch_size and configuration.global_batch):
        # The number of micro-batches follows.
        changes["micro_batches"] = None
    return configuration.saying(changes)


def implied(configuration: Configuration, answers: Answers) -> Implied:
    """Return everything that a prediction needs, from a configuration completed by the answers.

    Raises:
        InputError: with the option for every missing fact, and for conflicting facts.
    """
    cluster = _cluster(configuration, answers)
    configuration, assumed = _on_all(configuration, answers, cluster)
    configuration, more = _supposing(configuration)
    assumed += more
    model, size = configuration.model, configuration.layout.micro_batch_size
    replicas = _replicas(configuration, cluster)
    missing = [
        one for one in (_missing_model(model, configuration.stack), replicas) if isinstance(one, Violation)
    ]
    if size is None:
        what = "the file does not say the samples of a micro-batch; give --micro-batch-size"
        missing.append(Violation(configuration.stack, what))
    if missing:
        raise InputError(missing)
    assert isinstance(model, ModelConfig)
    assert isinstance(replicas, int)
    assert size is not None
    _, tables, problems = split_tables(configuration.tables)
    if problems:
        raise InputError(problems)
    batch = configuration.samples_per_step or replicas * size * (configuration.micro_batches or 1)
    request = request_of(
        model,
        cluster,
        global_batch=batch,
        sequence=configuration.sequence,
        precision=configuration.precision,
        reduce_precision=configuration.reduce_precision,
        optimizer=configuration.optimizer,
        launch=configuration.launch,
        methods=(*requested_methods(tables, model), *((Choice(name=GRADIENT_NORM),) * configuration.clips)),
    )
    problem = measured_problem(request)
    assumed += _assumed(configuration, batch)
    assumed += [f"{key.replace('_', ' ')}: {text}" for key, text in problem.assumed.items()]
    return Implied(
        problem=problem,
        layout=carried_out(configuration, problem, replicas, size),
        memory=configuration.memory,
        assumed=tuple(assumed),
    )


def _supposing(configuration: Configuration) -> tuple[Configuration, list[str]]:
    """Fill in what the file leaves to the program and nobody has given."""
    said = {**configuration.layout.record(), "micro_batches": configuration.micro_batches}
    values = {name: value for name, value in configuration.supposed.items() if said.get(name) is None}
    named = ((name.replace("_", " "), value) for name, value in values.items())
    lines = [f"{name} {value}: what an untold Trainer puts in place of auto" for name, value in named]
    return configuration.saying(values), lines


def _on_all(
    configuration: Configuration, answers: Answers, cluster: Cluster
) -> tuple[Configuration, list[str]]:
    """Use all devices of `--on` if the file starts fewer: scripts for many nodes often say 1."""
    devices = configuration.devices
    if answers.on is None or devices is None or devices >= cluster.ranks or configuration.layout.dp:
        return configuration, []
    line = f"all {counted(cluster.ranks, 'device')} of --on; the file starts {devices}"
    return configuration.saying(on_devices(cluster.ranks)), [line]


def _replicas(configuration: Configuration, cluster: Cluster) -> int | Violation:
    """Return the data-parallel degree; without one in the file, for the whole cluster."""
    if configuration.replicas is not None:
        return configuration.replicas
    ranks, each = configuration.ranks or cluster.ranks, configuration.layout.replica_ranks
    replicas, rest = divmod(ranks, each)
    if replicas and not rest:
        return replicas
    near = each * max(1, round(ranks / each))
    return Violation("devices", f"{ranks} are no multiple of {_degrees(configuration)} = {each}", str(near))


def _assumed(configuration: Configuration, batch: int) -> list[str]:
    """Return the assumed values that neither the file nor the user gives."""
    found = []
    if configuration.samples_per_step is None and configuration.micro_batches is None:
        found.append(f"global batch {batch}: one micro-batch per replica; --global-batch says otherwise")
    if configuration.layout.recompute is None:
        found.append("recompute none: the program decides it, not this file; --recompute says otherwise")
    if configuration.layout.sharding is None:
        found.append("sharding zero-0: the file does not say it")
    if configuration.layout.schedule is None:
        found.append("schedule 1f1b: the file's is not one that weft knows")
    return found


def carried_out(
    configuration: Configuration, problem: Problem, replicas: int, micro_batch_size: int
) -> Layout:
    """Return the layout as the stack carries it out."""
    said = configuration.layout
    plain = Layout(pp=1, dp=1, loops=1, micro_batch_size=1, schedule="1f1b", options=configuration.options)
    wanted = said.replaced(dp=replicas, micro_batch_size=micro_batch_size).complete(plain)
    layout = among_replicas(replace(wanted, schedule=get_schedule(wanted.schedule).name))
    if configuration.inside_nodes and layout.island is None:
        layout = replace(layout, island=island_on_nodes(problem.job.cluster, layout))
    if layout.pp > 1:
        split, graph = configuration.split, problem.job.graph
        if split is None or not graph.is_chain:
            return layout
        layers = split.of(len(graph.layers) - _ENDS, layout.pp, layout.loops)
        return replace(layout, layers_per_stage=layers)
    layout = replace(layout, schedule="1f1b", loops=1, options={})
    return unit_by_unit(layout, len(problem.job.graph.layers), problem.job.global_batch)


def planned_layout(problem: Problem, layout: Layout, memory: StatedMemory) -> PredictedPlan:
    """Plan a layout and predict its step, with the states and buffers of a stack.

    Raises:
        InputError: when the layout cannot run the job.
    """
    job = problem.job
    passes = layout.stages * max(1, job.global_batch // (layout.dp * layout.micro_batch_size))
    if passes > _MOST_SIMULATED:
        text = f"{passes} micro-batches of stages are too many to simulate; at most {_MOST_SIMULATED}"
        raise InputError(Violation(str(layout), text, "a smaller global batch"))
    # Refuse a layout before anything is priced: prices may be impossible for it.
    plan = build_plan(job, layout, [1.0] * len(job.graph.layers))
    plan = build_plan(job, layout, Bounds(problem).layer_seconds(layout))
    plan = plan.model_copy(update={"stack": memory.stack, "buffers": memory.buffers})
    step = predict_long(problem.cost_model, plan)
    peaks = step.prediction.peak_bytes
    held = held_parts(step.held, peaks.index(max(peaks)))
    return PredictedPlan(plan, step.prediction, tuple(held))


def _cluster(configuration: Configuration, answers: Answers) -> Cluster:
    """Return the cluster of the answers, or this machine where it is large enough."""
    cluster = parse_cluster(answers.on or "this-machine")
    ranks = configuration.ranks or configuration.layout.replica_ranks
    if ranks > cluster.ranks:
        where = cluster.name if answers.on else "this machine"
        problem = f"the file is for {counted(ranks, 'device')}, {where} has {cluster.ranks}; give --on"
        raise InputError(Violation(configuration.stack, problem, f"--on {ranks}xa100-80gb"))
    return cluster


def on_cluster(configuration: Configuration, answers: Answers) -> Configuration:
    """Return the configuration with all devices of `--on`, if the file gives neither devices nor replicas.

    Where they make the samples of a micro-batch a whole number, it has them, too.

    Raises:
        InputError: when `--on` is refused.
    """
    if answers.on is not None and not configuration.devices and not configuration.layout.dp:
        configuration = configuration.saying({"devices": parse_cluster(answers.on).ranks})
    batch, parts = (
        configuration.global_batch,
        (configuration.micro_batches or 0) * (configuration.replicas or 0),
    )
    if configuration.layout.micro_batch_size or not batch or not parts or batch % parts:
        return configuration
    return configuration.saying({"micro_batch_size": batch // parts})


def known_model(configuration: Configuration, answers: Answers) -> Configuration:
    """Return the configuration with the sizes of its model, from the answers or from its name.

    A name in the file is looked up and never imported.

    Raises:
        InputError: when the model of the answers is refused.
    """
    model, sequence = configuration.model, configuration.sequence
    if answers.model is not None:
        return replace(configuration, model=resolve_model(preset_of(answers.model), sequence=sequence))
    if isinstance(model, ModelConfig):
        sizes = model if sequence is None else replace(model, sequence=sequence)
        return replace(configuration, model=sizes)
    if model is None or preset_of(model) not in PRESETS:
        return configuration
    return replace(configuration, model=resolve_model(preset_of(model), sequence=sequence))


def _missing_model(model: ModelConfig | str | None, where: str) -> Violation | None:
    """Return the request for a model where the sizes are missing."""
    if isinstance(model, ModelConfig):
        return None
    if model is None:
        return Violation(where, "the file does not say the model's sizes; give --model, a preset or a folder")
    return Violation(where, f"the sizes of {shown(model)} are not known; give --model, a preset or a folder")


def preset_of(name: str) -> str:
    """Return the preset with the sizes of a model (``meta-llama/Llama-3.1-8B``), or the name itself."""
    if name in PRESETS:
        return name
    word = re.sub(r"^(meta-)+", "", name.lower().rsplit("/", 1)[-1])
    for begin in sorted(_SIZES_OF, key=len, reverse=True):
        if word.startswith(begin) and _SAME_SIZES.fullmatch(word.removeprefix(begin)):
            return _SIZES_OF[begin]
    return name


def _degrees(configuration: Configuration) -> str:
    degrees = {axis: getattr(configuration.layout, axis) for axis in AXES if axis != "dp"}
    return " x ".join(f"{axis} {degree}" for axis, degree in degrees.items() if degree) or "1"
