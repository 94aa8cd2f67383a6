"""The conversion of a measured row to the inputs of a prediction: a model, a cluster and a plan.

Rows describe other frameworks' programs. A row names its kernels. The layers are distributed by count, with
the embedding before the first block and the head after the last. Gradients are reduced at a step's end,
unless the row, its stack or its sharding says otherwise. Replicas without a pipeline that shard gradients or
weights reduce and gather those of one block at a time. Sharded states are those of DeepSpeed, others of
Megatron-LM.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from weft.describe.catalogue import find_device
from weft.describe.cluster import Cluster, Link, NodeGroup
from weft.describe.cluster_file import parse_cluster
from weft.describe.families import layer_graph
from weft.describe.job import Job
from weft.describe.kernels import Kernels, with_kernels
from weft.describe.layer_graph import LayerGraph
from weft.describe.layout import Layout
from weft.describe.model import ModelConfig
from weft.describe.optimizers import KNOWN_OPTIMIZERS
from weft.describe.plan import AXES, Blocking, Plan, Stack
from weft.describe.plan_file import check_plan, load_plan
from weft.describe.reading import read_text
from weft.errors import InputError, Violation
from weft.moves.layout import build_plan
from weft.moves.partition import uniform_partition
from weft.moves.sharded_units import unit_by_unit
from weft.moves.sharers import among_replicas
from weft.predict.cost.calibration import load_profile_file
from weft.predict.cost.placed_plan import CostModel
from weft.scoring.measurements import Measurement

# A family's defaults for empty cells. Llama's feed-forward is gated and 8/3 as wide as the stream.
_VOCABULARY = {"gpt": 50257, "llama": 32000, "bert": 30522}
_TIED = {"gpt": True, "llama": False, "bert": True}
_SEQUENCE = {"gpt": 1024, "llama": 2048, "bert": 512}
_FFN_MULTIPLE = 256
# The ends of a model, which the first and the last stage hold on top of their share.
_ENDS = ("embedding", "head")
# Axes of one replica of a model.
_INSIDE = tuple(axis for axis in AXES if axis != "dp")

Found = TypeVar("Found")


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The plan and cost model of a row; rows with the same model, cluster and profile share a cost model."""

    plan: Plan
    cost_model: CostModel

    @property
    def graph(self) -> LayerGraph:
        return self.cost_model.graph

    @property
    def cluster(self) -> Cluster:
        return self.cost_model.cluster


@dataclass(frozen=True, kw_only=True)
class Subjects:
    """The maker of subjects for the rows of one file; it reads every other file once.

    The rows' paths are relative to `folder`; `cluster` and `profile` replace the values of every row.
    """

    folder: Path
    cluster: str | None = None
    profile: Path | None = None
    _known: dict[object, object] = field(default_factory=dict, repr=False)

    def of(self, row: Measurement) -> Subject:
        """Build the subject of a row.

        Raises:
            InputError: when a required cell of the row is missing, or the row is impossible.
        """
        config = None if row.model is not None else _config(row)
        graph = self._graph(row, config)
        cluster = self._cluster(row)
        profile_path = self.profile or (self.folder / row.profile if row.profile else None)
        profile = self._once(profile_path, partial(load_profile_file, profile_path)) if profile_path else None
        if row.plan is not None:
            path = self.folder / row.plan
            plan = self._once(("plan", path), partial(load_plan, path))
            if problems := check_plan(plan, graph, cluster):
                raise InputError(problems)
        else:
            plan = _plan(row, graph, cluster)
        model = self._once(
            ("cost model", graph.fingerprint, cluster.fingerprint, profile_path),
            lambda: CostModel(graph=graph, cluster=cluster, profile=profile),
        )
        return Subject(plan=plan, cost_model=model)

    def _graph(self, row: Measurement, config: ModelConfig | None) -> LayerGraph:
        if config is None:
            assert row.model is not None, "a row without sizes names a file"
            path = self.folder / row.model
            return self._once(path, lambda: LayerGraph.from_json(read_text(path), str(path)))
        divided = (row.tp or 1) > 1 if row.sequence_parallel is None else row.sequence_parallel
        kernels = Kernels(
            attention=row.attention,
            norm=row.norm,
            sequence_parallel=divided,
            loss_parallel=row.loss_parallel,
            accumulation=row.accumulation,
        )
        return self._once((config, kernels), lambda: with_kernels(layer_graph(config), config, kernels))

    def _cluster(self, row: Measurement) -> Cluster:
        named = self.cluster
        if named is None and row.cluster is not None:
            path = self.folder / row.cluster
            named = str(path) if path.is_file() else row.cluster
        if named is not None:
            return self._once(("cluster", named), lambda: parse_cluster(named))
        wanted = row.model_dump(include={"gpu", "gpus_per_node", "nodes", "nics_per_node"})
        speeds = (row.intra_bytes_per_s, row.inter_bytes_per_s)
        size = _needed(row) if row.nodes is None else None
        return self._once(("devices", *wanted.values(), *speeds, size), lambda: _cluster_of(row))

    def _once(self, key: object, make: Callable[[], Found]) -> Found:
        if key not in self._known:
            self._known[key] = make()
        found: Found = self._known[key]  # type: ignore[assignment]  # each key has one type
        return found


def _config(row: Measurement) -> ModelConfig:
    sizes = {"layers": row.layers, "hidden": row.hidden, "heads": row.heads}
    if missing := [name for name, size in sizes.items() if size is None]:
        problem = "missing; or name a file of a LayerGraph as model"
        raise InputError([Violation(name, problem) for name in missing])
    assert row.layers is not None
    assert row.hidden is not None
    assert row.heads is not None
    family = row.family
    gated = family == "llama" if row.gated is None else row.gated
    if gated != (family == "llama"):
        near = "llama" if gated else "gpt"
        problem = f"{int(gated)}: the feed-forward of a {family} is {'not ' if gated else ''}gated"
        raise InputError(Violation("gated", problem, near))
    if row.hidden % row.heads:
        raise InputError(Violation("hidden", f"{row.hidden} is not divisible by heads = {row.heads}"))
    groups = row.kv_heads or row.heads
    if row.heads % groups:
        raise InputError(Violation("kv_heads", f"{groups} does not divide heads = {row.heads}"))
    wide = 4 * row.hidden
    if gated:
        wide = -(-8 * row.hidden // (3 * _FFN_MULTIPLE)) * _FFN_MULTIPLE
    return ModelConfig(
        # Rows of one model share one graph under any row name.
        name=f"{family}-{row.layers}x{row.hidden}",
        family=family,
        layers=row.layers,
        hidden=row.hidden,
        heads=row.heads,
        key_value_heads=groups,
        feed_forward=row.ffn or wide,
        vocabulary=row.vocab or _VOCABULARY[family],
        sequence=row.seq or _SEQUENCE[family],
        tied_embeddings=_TIED[family] if row.tied_embeddings is None else row.tied_embeddings,
    )


def _needed(row: Measurement) -> int:
    return row.replica_ranks * (row.dp or 1)


def _cluster_of(row: Measurement) -> Cluster:
    if row.gpu is None:
        raise InputError(Violation("gpu", "missing; or name a cluster"))
    entry = find_device(row.gpu, "gpu")
    devices = row.gpus_per_node or entry.devices
    if row.nodes is None:
        devices = min(devices, _needed(row))
    nodes = row.nodes or -(-_needed(row) // devices)
    link = replace(entry.link, bytes_per_s=row.intra_bytes_per_s or entry.link.bytes_per_s)
    between = row.nics_per_node * (row.inter_bytes_per_s or entry.network.bytes_per_s)
    network = replace(entry.network, bytes_per_s=between)
    group = NodeGroup(name=entry.device.name, count=nodes, device=entry.device, devices=devices, link=link)
    links: dict[tuple[str, str], Link] = {(group.name, group.name): network} if nodes > 1 else {}
    return Cluster(name=f"{nodes}x{devices}x{group.name}", groups=(group,), links=links)


def _plan(row: Measurement, graph: LayerGraph, cluster: Cluster) -> Plan:
    if row.global_batch is None:
        raise InputError(Violation("global_batch", "missing; or name a file of a Plan as plan"))
    dp, each = row.dp, row.replica_ranks
    if dp is None:
        if cluster.ranks % each:
            words = " x ".join(f"{axis} {getattr(row, axis) or 1}" for axis in _INSIDE)
            raise InputError(Violation("dp", f"missing, and {words} do not divide {cluster.ranks} devices"))
        dp = cluster.ranks // each
    plain = Layout(pp=1, dp=dp, loops=1, micro_batch_size=1, schedule="1f1b")
    # An island must not have more replicas than exist.
    layout = among_replicas(row.complete(plain))
    usual: Stack = "deepspeed" if row.sharding not in (None, "zero-0") else "megatron-lm"
    stack = row.stack or usual
    if row.blocking is None:
        layout = replace(layout, blocking=_usual_blocking(layout, stack))
    if stack != "weft" and row.loops is None and row.schedule is None:
        blocks = len(graph.layers) - sum(_holds_ends(graph))
        layout = unit_by_unit(layout, max(1, blocks), row.global_batch)
    layout = replace(layout, layers_per_stage=dealt_layers(graph, layout.stages))
    job = Job(
        graph=graph,
        cluster=cluster,
        global_batch=row.global_batch,
        sequence=row.seq or graph.sequence,
        precision=row.precision,
        optimizer=KNOWN_OPTIMIZERS[row.optimizer],
        launch=row.launch,
    )
    plan = build_plan(job, replace(layout, options={**layout.options, **row.schedule_options}), ())
    return plan.model_copy(update={"stack": stack})


def _usual_blocking(layout: Layout, stack: Stack) -> tuple[Blocking, ...]:
    """Return what a stack waits for: whole gradients at a step's end, DeepSpeed for stepped weights, too.

    weft and PyTorch (DDP, FSDP2) wait for nothing.
    """
    if stack in ("weft", "fsdp2"):
        return ()
    if layout.sharding not in ("zero-2", "zero-3"):
        return ("reductions",)
    return ("gathers",) if layout.sharding == "zero-2" and stack == "deepspeed" else ()


def dealt_layers(graph: LayerGraph, stages: int) -> tuple[int, ...]:
    """Distribute layers over stages by count; extra layers go first to the stages between the ends.

    Raises:
        InputError: when there are fewer layers than stages.
    """
    ends = _holds_ends(graph)
    counts = None
    if len(graph.layers) - sum(ends) >= stages:
        counts = uniform_partition(len(graph.layers), stages, *ends, ends_last=True)
    if counts is None:
        raise InputError(
            Violation("pp", f"{stages} stages; the model has {len(graph.layers)} layers to spread")
        )
    return counts


def _holds_ends(graph: LayerGraph) -> list[bool]:
    """Say for the first and the last layer whether it is an embedding or a head."""
    return [graph.layers[place].kind == kind for place, kind in zip((0, -1), _ENDS, strict=True)]
