"""PLAN.json: reading a plan file, and checking a plan against its model and cluster.

`plan_id` in the file is for people: an edited plan is legal, and gets the id of what it now says.
"""

from __future__ import annotations

import json
from pathlib import Path

from weft.describe.cluster import Cluster
from weft.describe.layer_graph import LayerGraph
from weft.describe.plan import Plan, Stage
from weft.describe.toml_file import validate
from weft.errors import InputError, Violation


def load_plan(path: Path) -> Plan:
    """Read a plan file.

    Raises:
        InputError: when the file cannot be read, is not JSON, or is not a plan; with every violation.
    """
    try:
        text = path.read_bytes().decode()
    except OSError as error:
        raise InputError(Violation(str(path), error.strerror or str(error))) from None
    except UnicodeDecodeError as error:
        raise InputError(Violation(str(path), f"not UTF-8 text: byte {error.start}")) from None
    return parse_plan(text, str(path))


def parse_plan(text: str, where: str = "plan") -> Plan:
    """A plan from the text of a plan file.

    Raises:
        InputError: with every violation.
    """
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(Violation(where, f"not JSON: {error}")) from None
    if not isinstance(record, dict):
        raise InputError(Violation(where, "must hold one JSON object"))
    record.pop("plan_id", None)
    return validate(Plan, record, where)


def check_plan(plan: Plan, graph: LayerGraph, cluster: Cluster) -> list[Violation]:
    """Everything that makes `plan` impossible for this model and cluster; an empty list when nothing does."""
    return [
        *_identity(plan, graph, cluster),
        *_layers(plan, graph),
        *_ranks(plan, cluster),
        *_batch(plan),
    ]


def _identity(plan: Plan, graph: LayerGraph, cluster: Cluster) -> list[Violation]:
    problems = []
    if plan.model_fingerprint != graph.fingerprint:
        problems.append(
            Violation(
                "plan.model", f"made for {plan.model} ({plan.model_fingerprint}), not for this {graph.name}"
            )
        )
    if plan.cluster_fingerprint != cluster.fingerprint:
        problems.append(
            Violation(
                "plan.cluster",
                f"made for {plan.cluster} ({plan.cluster_fingerprint}), not for this {cluster.name}",
            )
        )
    return problems


def _layers(plan: Plan, graph: LayerGraph) -> list[Violation]:
    problems = []
    count = len(graph.layers)
    held = [layer for stage in plan.stages for layer in stage.layers]
    for layer in sorted(set(held)):
        if layer >= count:
            problems.append(
                Violation("plan.stages", f"layer {layer} does not exist; 0 to {count - 1}", str(count - 1))
            )
        elif held.count(layer) > 1:
            problems.append(Violation("plan.stages", f"layer {layer} is in {held.count(layer)} stages"))
    missing = sorted(set(range(count)) - set(held))
    if missing:
        problems.append(Violation("plan.stages", f"no stage holds layers {missing}"))
    if not problems:
        stage_of = {layer: index for index, stage in enumerate(plan.stages) for layer in stage.layers}
        problems += [
            Violation(
                "plan.stages",
                f"layer {consumer} in stage {stage_of[consumer]} needs layer {producer} of the later stage "
                f"{stage_of[producer]}; stages must follow the model",
            )
            for producer, consumer in graph.edges
            if stage_of[producer] > stage_of[consumer]
        ]
    return problems


def _ranks(plan: Plan, cluster: Cluster) -> list[Violation]:
    problems = []
    used: set[int] = set()
    for index, stage in enumerate(plan.stages):
        ranks = [rank for copy in stage.replicas for rank in copy.ranks]
        used.update(ranks)
        problems += [
            Violation(f"plan.stages.{index}", f"rank {rank} is in two replicas")
            for rank in sorted({rank for rank in ranks if ranks.count(rank) > 1})
        ]
        problems += [
            Violation(
                f"plan.stages.{index}",
                f"rank {rank} is not in the cluster of {cluster.ranks} devices",
                str(cluster.ranks - 1),
            )
            for rank in sorted(set(ranks))
            if rank >= cluster.ranks
        ]
        problems += [
            Violation(f"plan.stages.{index}", f"rank {rank}'s device cannot compute in {plan.precision}")
            for rank in sorted(set(ranks))
            if rank < cluster.ranks and plan.precision not in cluster.device_of(rank).flops_per_s
        ]
    idle = sorted(set(range(plan.ranks)) - used)
    if idle:
        problems.append(Violation("plan.stages", f"ranks {idle} hold no stage; ranks count without gaps"))
    size = 1
    for degree in plan.mesh.values():
        size *= degree
    if size != len(used):
        problems.append(
            Violation("plan.mesh", f"its degrees multiply to {size}, the stages use {len(used)} ranks")
        )
    return problems


def _batch(plan: Plan) -> list[Violation]:
    if plan.global_batch % plan.micro_batch_size:
        near = plan.micro_batch_size * max(1, round(plan.global_batch / plan.micro_batch_size))
        return [
            Violation(
                "plan.global_batch",
                f"{plan.global_batch} is not a multiple of micro_batch_size {plan.micro_batch_size}",
                str(near),
            )
        ]
    return [
        Violation(
            f"plan.stages.{index}",
            f"its replicas run {_share(stage)} micro-batches, the global batch has {plan.micro_batches}",
            str(plan.micro_batches),
        )
        for index, stage in enumerate(plan.stages)
        if _share(stage) != plan.micro_batches
    ]


def _share(stage: Stage) -> int:
    return sum(copy.micro_batches for copy in stage.replicas)
