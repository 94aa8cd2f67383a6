"""PLAN.json: reading of a plan, perhaps edited by a person, and checks against its model and cluster.

The file holds the decisions and, separately, their prediction and their subject: run, model and cluster. The
`plan_id` in it informs readers. The reader does not compare it, because an edited plan is a legal plan:
another plan with another id. Files of earlier versions are converted (`weft.describe.plan_versions`).
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import rustworkx
from pydantic import Field, ValidationError

from weft.bundles import bundles, parts
from weft.describe.cluster import Cluster
from weft.describe.layer_choices import choice_problems
from weft.describe.layer_graph import LayerGraph
from weft.describe.layout import DENSE
from weft.describe.one_line import one_line
from weft.describe.plan import AXES, Plan
from weft.describe.plan_subject import PlanSubject
from weft.describe.plan_versions import former_ids, in_this_version
from weft.describe.prediction import Prediction
from weft.describe.reading import read_json, violations_of
from weft.describe.servers import refuse_servers
from weft.describe.synchronisation import derived_options, reduction_problem, sync_problem
from weft.describe.units import shown
from weft.errors import InputError, Violation, nearest, nearest_divisor

# Messages truncate longer lists of ranks and layers.
_SHOWN = 6


class PlanKeys(Plan):
    """The keys of a plan file: the decisions, and beside them their prediction and their subject."""

    prediction: Prediction | None = Field(default=None, description="what the plan was chosen for")
    subject: PlanSubject | None = Field(default=None, description="the run, the model and the cluster")


class PlanFile(NamedTuple):
    """The content of a plan file: a plan, its prediction and its subject, if any."""

    plan: Plan
    prediction: Prediction | None = None
    subject: PlanSubject | None = None

    def __repr__(self) -> str:
        return one_line(self, repr(self.plan))

    def to_json(self) -> str:
        """Return the file's text: canonical keys, one line per stage and table so that people can edit it."""
        record = self.plan.record()
        stages = record.pop("stages")
        lines = ",\n  ".join(json.dumps(stage, sort_keys=True) for stage in stages)
        beside: dict[str, Any] = {"plan_id": self.plan.plan_id}
        if self.prediction is not None:
            beside["prediction"] = self.prediction.model_dump(mode="json")
        head = json.dumps(beside | record, indent=1, sort_keys=True)
        text = f'{head[:-2]},\n "stages": [\n  {lines}\n ]'
        if self.subject is not None:
            parts = self.subject.model_dump(mode="json", exclude_none=True)
            tables = ",\n  ".join(
                f'"{name}": {json.dumps(parts[name], sort_keys=True)}' for name in sorted(parts)
            )
            text += f',\n "subject": {{\n  {tables}\n }}'
        return f"{text}\n}}\n"


@dataclass(frozen=True, kw_only=True)
class PlanRule:
    """A method's rule for every plan: `refuse` yields all violations of a plan for this model."""

    refuse: Callable[[Plan, LayerGraph], Iterable[Violation]]


def is_plan_file(path: Path) -> bool:
    """Return True if a file is JSON with the keys of a plan, perhaps with mistakes."""
    try:
        record = json.loads(path.read_bytes()) if path.is_file() else None
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(record, Mapping) and ("plan_id" in record or record.keys() >= {"stages", "mesh"})


def load_plan(path: Path | str) -> Plan:
    """Read the plan of a PLAN.json; `check_plan` then checks it against a model and a cluster.

    Raises:
        InputError: with all mistakes of the file.
    """
    return load_plan_file(path).plan


def given_plan(plan: object) -> Plan:
    """Return a plan, or read it from the path of a plan file.

    Raises:
        InputError: when it is neither, or with all mistakes of the file.
    """
    if isinstance(plan, Plan):
        return plan
    if not isinstance(plan, str | Path):
        needed = "must be a Plan, as weft.plan(...).plan is, or the path of a plan file"
        raise InputError(Violation("plan", f"{shown(plan)}: {needed}"))
    return load_plan(plan)


def load_plan_file(path: Path | str) -> PlanFile:
    """Read a PLAN.json with the prediction of its plan.

    Raises:
        InputError: with all mistakes of the file.
    """
    return parse_plan_file(read_json(path), str(path))


def parse_plan_file(record: object, where: str = "plan") -> PlanFile:
    """Parse the plan and the prediction in the JSON value of a plan file.

    Raises:
        InputError: with all mistakes of the value.
    """
    if not isinstance(record, Mapping):
        raise InputError(Violation(where, "a plan is a JSON object"))
    if not record.keys() & {"plan_id", "stages", "mesh"}:
        problem = "no plan file: it has neither plan_id, stages nor mesh"
        if record.keys() >= {"layers", "edges"}:
            problem = (
                "a graph of layers, which weft plan takes; training needs the function that returns the model"
            )
        raise InputError(Violation(where, problem))
    known = in_this_version(record, where)
    given = {key: value for key, value in known.items() if key != "plan_id"}
    try:
        # JSON mode is strict about numbers and takes lists for tuples.
        found = PlanKeys.model_validate_json(json.dumps(given), strict=True)
    except ValidationError as error:
        raise InputError(violations_of(error, where, PlanKeys)) from None
    plan = Plan(**{name: getattr(found, name) for name in Plan.model_fields})
    # A plan that was edited has another id than its file, whose prediction is of the plan before.
    kept = record.get("plan_id") in (None, plan.plan_id, *former_ids(plan))
    return PlanFile(plan, found.prediction if kept else None, found.subject)


def check_plan(plan: Plan, graph: LayerGraph, cluster: Cluster) -> list[Violation]:
    """Return all reasons why `plan` cannot train this model on this cluster; empty if it can."""
    return [
        *_identity(plan, graph, cluster),
        *_layers(plan, graph),
        *_order(plan, graph),
        *_ranks(plan, cluster),
        *_tensor(plan, graph),
        *_batch(plan),
        *_splits(plan),
        *_unlike(plan, graph),
        *choice_problems(plan.layer_choices, graph),
        *(problem for rule in parts(PlanRule) for problem in rule.refuse(plan, graph)),
        *_blocking(plan),
        *unknown_methods(plan),
        *_recompute(plan, graph),
        *_precision(plan, cluster),
        *_synchronisation(plan, cluster),
    ]


def _identity(plan: Plan, graph: LayerGraph, cluster: Cluster) -> Iterable[Violation]:
    if plan.model_fingerprint != graph.fingerprint:
        problem = f"the plan is for {shown(plan.model)} ({shown(plan.model_fingerprint)}), the model is"
        problem = f"{problem} {graph.name!r}"
        if plan.model == graph.name:
            problem = f"{graph.name!r} is not as it was when the plan was made; plan it again"
        yield Violation("plan: model_fingerprint", problem, graph.fingerprint)
    if plan.cluster_fingerprint != cluster.fingerprint:
        problem = f"the plan is for {shown(plan.cluster)} ({shown(plan.cluster_fingerprint)}), the cluster is"
        yield Violation("plan: cluster_fingerprint", f"{problem} {cluster.name!r}", cluster.fingerprint)


def _layers(plan: Plan, graph: LayerGraph) -> Iterable[Violation]:
    last = len(graph.layers) - 1
    held = Counter(layer for stage in plan.stages for layer in stage.layers)
    for index, stage in enumerate(plan.stages):
        beyond = sorted(layer for layer in set(stage.layers) if layer > last)
        if beyond:
            problem = f"{listed(beyond)}: layers 0 to {last} exist"
            yield Violation(f"plan: stages[{index}].layers", problem, str(last))
    missing = [layer for layer in range(last + 1) if layer not in held]
    if missing:
        yield Violation("plan: stages", f"no stage has layers {listed(missing)}")
    twice = sorted(layer for layer, count in held.items() if count > 1)
    if twice:
        yield Violation("plan: stages", f"layers {listed(twice)} are held more than once")


def _order(plan: Plan, graph: LayerGraph) -> Iterable[Violation]:
    """Check that stages form a DAG; a stage that is not convex is part of a cycle of stages."""
    stage_of = {layer: index for index, stage in enumerate(plan.stages) for layer in stage.layers}
    stages = rustworkx.PyDiGraph(multigraph=False)
    stages.add_nodes_from(range(len(plan.stages)))
    for producer, consumer in graph.edges:
        source, target = stage_of.get(producer), stage_of.get(consumer)
        if source is not None and target is not None and source != target:
            stages.add_edge(source, target, None)
    for circle in rustworkx.strongly_connected_components(stages):
        if len(circle) > 1:
            names = listed(sorted(circle))
            yield Violation("plan: stages", f"stages {names} wait for each other; a stage must be convex")


def _ranks(plan: Plan, cluster: Cluster) -> Iterable[Violation]:
    used: set[int] = set()
    for index, stage in enumerate(plan.stages):
        mine = Counter(rank for replica in stage.replicas for rank in replica.ranks)
        used |= mine.keys()
        place = f"plan: stages[{index}].replicas"
        twice = sorted(rank for rank, count in mine.items() if count > 1)
        if twice:
            yield Violation(place, f"ranks {listed(twice)} hold this stage more than once")
        beyond = sorted(rank for rank in mine if rank >= cluster.ranks)
        if beyond:
            problem = f"ranks {listed(beyond)}: {cluster.name!r} has ranks 0 to {cluster.ranks - 1}"
            yield Violation(place, problem, str(cluster.ranks - 1))
    # Ranks number processes: the world size is the highest rank plus one, so a gap is an idle process.
    idle = []
    for rank in range(max(used)):
        if rank not in used:
            idle.append(rank)
        if len(idle) > _SHOWN:
            break
    if idle:
        yield Violation("plan: stages", f"ranks {listed(idle)} hold no stage, but higher ones do")
    for axis in plan.mesh:
        if axis not in AXES:
            yield Violation(
                "plan: mesh", f"{shown(axis)} is not one of {', '.join(AXES)}", nearest(axis, AXES)
            )
    product = math.prod(plan.mesh.values())
    if product != len(used):
        axes = " x ".join(f"{axis} {size}" for axis, size in list(plan.mesh.items())[:_SHOWN]) or "empty"
        yield Violation("plan: mesh", f"{axes} is {shown(product)} ranks, the stages use {len(used)}")
    if (reason := refuse_servers(plan.servers.start, len(plan.servers), cluster)) is not None:
        yield Violation("plan: sync.servers", reason, "0")


def _tensor(plan: Plan, graph: LayerGraph) -> Iterable[Violation]:
    inner = plan.cp * plan.ep
    widths = sorted({len(copy.ranks) for stage in plan.stages for copy in stage.replicas})
    odd = [width for width in widths if width % inner]
    if odd:
        axis, kind = ("cp", "context") if plan.ep == 1 else ("ep", "context and expert")
        problem = f"{shown(inner)} {kind} ranks, but replicas with {listed(odd)} ranks"
        yield Violation(f"plan: mesh.{axis}", problem, shown(nearest_divisor(inner, *widths)))
        return
    degrees = [width // inner for width in widths]
    if len(degrees) == 1 and plan.mesh.get("tp", 1) != degrees[0]:
        problem = f"{plan.mesh.get('tp', 1)}, but replicas divide layers by {degrees[0]}"
        yield Violation("plan: mesh.tp", problem, str(degrees[0]))
    for degree in degrees:
        if (reason := graph.refuse_tensor(degree)) is not None:
            yield Violation("plan: stages", reason)
    if (reason := graph.refuse_context(plan.cp, plan.sequence)) is not None:
        yield Violation("plan: mesh.cp", reason)
    if (reason := graph.refuse_expert(plan.ep)) is not None:
        yield Violation("plan: mesh.ep", reason)


def _batch(plan: Plan) -> Iterable[Violation]:
    batch, size = plan.global_batch, plan.micro_batch_size
    if batch % size:
        problem = f"{shown(batch)} is not divisible by micro_batch_size = {shown(size)}"
        yield Violation("plan: global_batch", problem, shown(max(1, (batch + size // 2) // size) * size))
        return
    for index, stage in enumerate(plan.stages):
        total = sum(replica.micro_batches for replica in stage.replicas)
        if total != plan.micro_batches:
            problem = f"{shown(total)} micro-batches in all replicas, the global batch has"
            yield Violation(f"plan: stages[{index}].replicas", f"{problem} {shown(plan.micro_batches)}")


def _unlike(plan: Plan, graph: LayerGraph) -> Iterable[Violation]:
    """Check that stages with unlike numbers of replicas or tensor ranks synchronise in a way that knows them.

    A message to a stage with other tensor ranks has its tokens, which a value between branches may not have.
    """
    degrees = plan.distinct_degrees
    for counts, what in ((list(plan.replicas), "replicas"), (degrees, "tensor ranks")):
        if len(set(counts)) > 1 and plan.sync.name != DENSE:
            problem = (
                f"{shown(plan.sync.name)} needs equally many {what} of every stage, not {listed(counts)}"
            )
            yield Violation("plan: sync", problem, DENSE)
    if len(degrees) > 1 and not graph.is_chain:
        problem = f"{listed(degrees)} tensor ranks: layers that form no chain need one number"
        yield Violation("plan: stages", problem, shown(min(degrees)))
    if not plan.has_like_replicas:
        unlike = f"replicas of one stage with unlike numbers of tensor ranks ({plan.degree_words})"
        if plan.cp * plan.ep > 1:
            yield Violation("plan: mesh", f"{unlike} divide no tokens or experts", "cp = ep = 1")
        if len(set(plan.replicas)) > 1:
            problem = f"{unlike}: every stage has equally many replicas, not {listed([*plan.replicas])}"
            yield Violation("plan: stages", problem, shown(min(plan.replicas)))


def _splits(plan: Plan) -> Iterable[Violation]:
    size = plan.micro_batch_size
    for index, stage in enumerate(plan.stages):
        if size % stage.splits:
            problem = f"{shown(stage.splits)} does not divide micro_batch_size = {shown(size)}"
            yield Violation(
                f"plan: stages[{index}].splits", problem, shown(nearest_divisor(stage.splits, size))
            )


def _blocking(plan: Plan) -> Iterable[Violation]:
    if len(set(plan.blocking)) < len(plan.blocking):
        yield Violation("plan: blocking", f"{', '.join(plan.blocking)}: each can be named once")


def unknown_methods(plan: Plan) -> Iterable[Violation]:
    """Yield violations for methods that this installation lacks, or that the plan names twice."""
    known = sorted(bundles())
    for name, count in Counter(one.name for one in plan.methods).items():
        if name not in known:
            problem = f"{shown(name)} is not one of {', '.join(known)}"
            yield Violation("plan: methods", problem, nearest(name, known))
        if count > 1:
            yield Violation("plan: methods", f"{shown(name)}: each can be named once")


def _recompute(plan: Plan, graph: LayerGraph) -> Iterable[Violation]:
    for index, stage in enumerate(plan.stages):
        if stage.recompute == "selective" and not graph.knows_products:
            problem = "'selective' needs layers that say what their products leave"
            yield Violation(f"plan: stages[{index}].recompute", problem, "full")


def _precision(plan: Plan, cluster: Cluster) -> Iterable[Violation]:
    ranks = {rank for stage in plan.stages for replica in stage.replicas for rank in replica.ranks}
    groups = {cluster.group_index_of(rank) for rank in ranks if rank < cluster.ranks}
    devices = {cluster.groups[index].device.name: cluster.groups[index].device for index in groups}
    for name, device in sorted(devices.items()):
        if plan.precision not in device.flops_per_s:
            problem = (
                f"{name} does not support {plan.precision}; it has {', '.join(sorted(device.flops_per_s))}"
            )
            near = next((known for known in ("bf16", "fp32", "fp64") if known in device.flops_per_s), "")
            yield Violation("plan: precision", problem, near)
    if refused := reduction_problem(plan.reduce_precision, plan.precision, plan.sync.name):
        yield replace(refused, where=f"plan: {refused.where}")


def _synchronisation(plan: Plan, cluster: Cluster) -> Iterable[Violation]:
    if (problem := sync_problem(plan.sync)) is not None:
        yield replace(problem, where=f"plan: {problem.where}")
    for key, value in derived_options(plan.sync, plan.stages, cluster).items():
        if (given := plan.sync.options.get(key)) != value:
            reason = f"{key} is {shown(given)}; the replicas' places in {cluster.name} give {value}"
            yield Violation("plan: sync", reason, str(value))


def listed(numbers: list[int]) -> str:
    """Return the text of ranks, layers or stages for a message; long lists are truncated."""
    text = ", ".join(shown(number) for number in numbers[:_SHOWN])
    return f"{text}, ..." if len(numbers) > _SHOWN else text
