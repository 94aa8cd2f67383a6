"""`Plan`: the decisions and nothing else.

A Plan is data in the lowest room because all others read it: cost model, moves, compiler, planners and
runtime. `plan_id` hashes it. The plan's prediction is a separate object.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from weft.describe.amount import Shape
from weft.describe.device import PRECISION_BYTES
from weft.describe.one_line import one_line
from weft.describe.optimizers import ADAMW, OptimizerWork
from weft.describe.reading import violations_of
from weft.describe.replica_grid import ReplicaGrid
from weft.describe.units import counted
from weft.errors import InputError

if TYPE_CHECKING:
    from weft.describe.job import Job
    from weft.describe.layout import Layout

Count = Annotated[int, Field(ge=1)]
Rank = Annotated[int, Field(ge=0)]
# Axes of the mesh, outermost first: ranks along the last axis are neighbours.
AXES = ("pp", "dp", "ep", "cp", "tp")
# From the fastest to the one with the smallest memory.
Recompute = Literal["none", "selective", "full"]
ReducePrecision = Literal["fp32", "bf16", "fp16"]
RECOMPUTES: tuple[Recompute, ...] = get_args(Recompute)
Sharding = Literal["zero-0", "zero-1", "zero-2", "zero-3"]
Blocking = Literal["gathers", "messages", "reductions"]
Stack = Literal["weft", "megatron-lm", "deepspeed", "fsdp2"]
Launch = Literal["eager", "compiled", "captured"]
# The method that clipping and skipping non-finite gradients request: steps wait for the norm of the whole
# gradient.
GRADIENT_NORM = "gradient-norm"
# Precisions whose losses are scaled. The norm shows all ranks that the gradient overflows.
SCALED = ("fp16",)
# The method that a report of the norms of micro-batches requests.
MICRO_BATCH_NORMS = "micro-batch-norms"
# The method that clipping of micro-batches requests.
MICRO_BATCH_CLIPPING = "micro-batch-clipping"
# The method that a balance of experts requests.
EXPERT_BALANCE = "expert-balance"
# The method that says how expert ranks exchange rows.
EXPERT_EXCHANGES = "expert-exchanges"
# The method that packed samples request: attention stays inside the documents of a sample.
PACKING = "packing"
# The option of a synchronisation with the number of ranks that hold no stage and add up gradients.
SERVERS = "servers"


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    # Type checkers read the fields as arguments.
    if not TYPE_CHECKING:

        def __init__(self, /, **fields: Any) -> None:
            """Check the fields.

            Raises:
                InputError: with all invalid fields.
            """
            try:
                super().__init__(**fields)
            except ValidationError as error:
                raise InputError(violations_of(error, type(self).__name__.lower(), type(self))) from None

        # Parts of a file are checked with the file, which names their places.
        __init__.__pydantic_base_init__ = True

    def __repr__(self) -> str:
        return one_line(self)

    def __str__(self) -> str:
        return repr(self)

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy with the fields of `update`, checked like a plan file.

        Parts that are records were checked at their construction, and are not checked again.

        Raises:
            InputError: with all invalid fields of the copy.
        """
        copied = super().model_copy(deep=deep)
        if not update:
            return copied
        try:
            return self.model_validate({**copied.__dict__, **update}, strict=True)
        except ValidationError as error:
            raise InputError(violations_of(error, type(self).__name__.lower(), type(self))) from None


class Choice(_Record):
    """A method chosen by name, with its options."""

    name: str
    options: Mapping[str, int | float | str | bool] = Field(default_factory=dict)


def expert_ranks_per_node(exchanges: Choice | None) -> int:
    """Return the expert ranks of a node that exchange rows first; 1: all exchange at once."""
    return 1 if exchanges is None else int(exchanges.options.get("ranks_per_node", 1))


class LayerChoice(_Record):
    """A method's option for some layers, by position in the LayerGraph: a window, bits, an algorithm."""

    name: str
    layers: tuple[Rank, ...] = Field(min_length=1)
    value: int | float | str


class Replica(_Record):
    """One copy of a stage: its ranks (several under tensor or context parallelism), and its share of the
    batch."""

    ranks: tuple[Rank, ...] = Field(min_length=1)
    micro_batches: Count


class Stage(_Record):
    """A convex set of layers that runs as one unit, by position in the LayerGraph.

    With `recompute` "full" a micro-batch keeps only the inputs of layers, and its backward pass recomputes
    the layers. With "selective" it also keeps the results of products, which are not recomputed. The stage
    runs each micro-batch of the plan as `splits` smaller ones of equal size.
    """

    layers: tuple[Rank, ...] = Field(min_length=1)
    replicas: tuple[Replica, ...] = Field(min_length=1)
    recompute: Recompute = "none"
    splits: Count = 1

    def __repr__(self) -> str:
        copies = f"{counted(len(self.replicas), 'replica')} of {counted(len(self.replicas[0].ranks), 'rank')}"
        return one_line(
            self, f"of {counted(len(self.layers), 'layer')}: {copies}, recompute {self.recompute}"
        )


class Buffers(_Record):
    """The sizes that another stack's file states for its buffers, in elements.

    `reduced`: gradients on their way, in all buffers; `gathered`: the most gathered weights at once.
    """

    reduced: Count
    gathered: Count


def _outermost_first(mesh: Mapping[str, int]) -> dict[str, int]:
    """Return the mesh with known axes in the order of `AXES`: a plan file sorts them by name."""
    return {axis: mesh[axis] for axis in AXES if axis in mesh} | dict(mesh)


class Plan(_Record):
    """A complete layout of one training job.

    Micro-batches of a step are numbered globally. Replica j of a stage runs the next
    `replicas[j].micro_batches` of them. So the replicas of each stage cover the global batch exactly once.
    Stages may have unlike numbers of replicas, or of tensor ranks. The mesh's `pp` then counts all ranks of a
    pipeline that divide no tokens, samples or experts. Replicas of one stage may have unlike numbers of
    tensor ranks, too. Then it counts those of all pipelines.
    `mesh` has its axes in the order of `AXES`, outermost first. `sharding` names the tensors that a stage's
    replicas shard: none, optimizer states, gradients too, weights too (Rajbhandari et al., ZeRO, arXiv
    1910.02054).
    `island` is the number of replicas in a sharding group; None: all replicas. Groups all-reduce each shard
    with the other groups (Zhao et al., PyTorch FSDP, arXiv 2304.11277, section 3.2). The mesh's `cp` counts
    groups of a replica's ranks, which divide its samples' tokens (Llama 3, arXiv 2407.21783, section 3.3.2).
    Its `ep` counts groups that divide the experts of every mixture and the samples of every micro-batch
    (Lepikhin et al., GShard, arXiv 2006.16668, section 3.2). The ranks of a group divide the layers.
    `blocking` names communication that a device waits for, as in other frameworks: messages, gathers of
    weights, reductions of gradients. `reduce_precision` is the precision in which replicas send each other
    gradients; None: that of the gradients.
    `stack` is the framework that runs the plan, which decides its other memory, and `buffers` their sizes;
    None: the stack's own. `launch` says how hosts launch the kernels of layers: one by one, of compiled
    layers, or of captured graphs. `methods` are the job's requests by name, `layer_choices` its
    requests for single layers. `optimizer` is the job's optimizer work.
    """

    version: Literal[2] = 2
    model: str
    model_fingerprint: str
    cluster: str
    cluster_fingerprint: str
    sequence: Count
    global_batch: Count
    micro_batch_size: Count
    precision: Literal["fp64", "fp32", "bf16", "fp16"] = "fp32"
    reduce_precision: ReducePrecision | None = None
    mesh: Annotated[Mapping[str, Count], AfterValidator(_outermost_first)]
    stages: tuple[Stage, ...] = Field(min_length=1)
    schedule: Choice
    sharding: Sharding = "zero-0"
    island: Count | None = None
    blocking: tuple[Blocking, ...] = ()
    stack: Stack = "weft"
    buffers: Buffers | None = None
    launch: Launch = "eager"
    methods: tuple[Choice, ...] = ()
    layer_choices: tuple[LayerChoice, ...] = ()
    optimizer: OptimizerWork = ADAMW
    sync: Choice = Choice(name="dense")

    @property
    def micro_batches(self) -> int:
        """Micro-batches per step of all replicas together."""
        return self.global_batch // self.micro_batch_size

    @property
    def replicas(self) -> tuple[int, ...]:
        """The number of replicas of each stage."""
        return tuple(len(stage.replicas) for stage in self.stages)

    @property
    def tensor_degrees(self) -> tuple[int, ...]:
        """The number of tensor ranks in the replicas of each stage; in the widest of unlike ones."""
        return tuple(max(degrees) for degrees in self.replica_degrees)

    @property
    def replica_degrees(self) -> tuple[tuple[int, ...], ...]:
        """The number of tensor ranks in each replica, by stage."""
        inner = self.cp * self.ep
        return tuple(tuple(len(copy.ranks) // inner for copy in stage.replicas) for stage in self.stages)

    @property
    def has_layers_once(self) -> bool:
        """True if each layer is on one rank: its stage has one replica of one rank."""
        return all(len(stage.replicas) == len(stage.replicas[0].ranks) == 1 for stage in self.stages)

    @property
    def rank_of_layers(self) -> dict[int, int]:
        """The first rank of each layer, in the order of stages."""
        return {layer: stage.replicas[0].ranks[0] for stage in self.stages for layer in stage.layers}

    @property
    def distinct_degrees(self) -> list[int]:
        """The numbers of tensor ranks in the plan's replicas, each once, in order of stages and replicas."""
        return list(dict.fromkeys(degree for each in self.replica_degrees for degree in each))

    @property
    def has_like_replicas(self) -> bool:
        """True if the replicas of each stage have equally many tensor ranks."""
        return all(len(set(degrees)) == 1 for degrees in self.replica_degrees)

    def like_replicas(self, stage: int) -> list[list[int]]:
        """Return the replicas of a stage with equally many tensor ranks together, by their numbers."""
        together: dict[int, list[int]] = {}
        for number, copy in enumerate(self.stages[stage].replicas):
            together.setdefault(len(copy.ranks), []).append(number)
        return list(together.values())

    @property
    def has_like_stages(self) -> bool:
        """True if all stages have equally many replicas and tensor ranks, so that devices form a mesh."""
        return len(set(self.replicas)) == 1 and len(self.distinct_degrees) == 1

    @property
    def pp(self) -> int:
        """The number of devices along a path through a pipeline."""
        return self.mesh.get("pp", 1) if self.has_like_stages else len(self.stages)

    @property
    def ranks(self) -> int:
        """The number of the plan's ranks: the highest rank plus one."""
        return self.servers.stop

    @property
    def servers(self) -> range:
        """The ranks behind those of the stages, which hold no stage and add up gradients."""
        first = 1 + max(rank for stage in self.stages for copy in stage.replicas for rank in copy.ranks)
        count = self.sync.options.get(SERVERS, 0)
        # A plan file may have anything here, which its method refuses.
        return range(first, first + (count if isinstance(count, int) else 0))

    @property
    def cp(self) -> int:
        """The number of groups of a replica's ranks that divide the tokens of its samples."""
        return self.mesh.get("cp", 1)

    @property
    def ep(self) -> int:
        """The number of groups of a replica's ranks that divide its experts and its samples."""
        return self.mesh.get("ep", 1)

    def method(self, name: str) -> Choice | None:
        """Return the job's choice of a method by name; None without a choice."""
        return next((one for one in self.methods if one.name == name), None)

    @property
    def element_bytes(self) -> int:
        return PRECISION_BYTES[self.precision]

    @property
    def words(self) -> str:
        """The plan in one line, for tables and messages."""
        axes = " x ".join(f"{axis} {size}" for axis, size in self.axes.items())
        shared = "" if self.sharding == "zero-0" else f", {shared_out(self)}"
        sizes = f"{counted(len(self.stages), 'stage')}, micro-batch size {self.micro_batch_size}"
        if len(set(self.replicas)) > 1:
            sizes += f", replicas {'+'.join(map(str, self.replicas))}"
        if degrees := self.degree_words:
            sizes += f", tensor ranks {degrees}"
        if any(stage.splits > 1 for stage in self.stages):
            sizes += f", splits {'+'.join(str(stage.splits) for stage in self.stages)}"
        options = ", ".join(said_options(self.schedule.options))
        order = f"{self.schedule.name} ({options})" if options else self.schedule.name
        return f"{axes}, {order}, {sizes}{shared}"

    @property
    def axes(self) -> dict[str, int]:
        """The mesh in words of users: `pp` and `dp` count stages and replicas of plans that are no mesh."""
        if self.has_like_stages:
            return dict(self.mesh)
        dp = self.replicas[0] if len(set(self.replicas)) == 1 else self.mesh.get("dp", 1)
        return {**self.mesh, "pp": self.pp, "dp": dp}

    @property
    def degree_words(self) -> str:
        """The tensor ranks of unlike stages, joined by +, and of unlike replicas, joined by |; else empty."""
        if len(self.distinct_degrees) == 1:
            return ""
        return "+".join("|".join(map(str, dict.fromkeys(each))) for each in self.replica_degrees)

    def grid(self, stage: int, replica: int = 0) -> ReplicaGrid:
        """Return the degrees inside a replica of a stage."""
        width = len(self.stages[stage].replicas[replica].ranks)
        return ReplicaGrid(width // (self.cp * self.ep), self.cp, self.ep)

    def stages_of(self, rank: int) -> dict[int, int]:
        """Return the numbers of a rank's stages, each with the number of the rank's replica."""
        return {
            index: number
            for index, stage in enumerate(self.stages)
            for number, copy in enumerate(stage.replicas)
            if rank in copy.ranks
        }

    def divided_groups(self, rank: int) -> list[tuple[int, ...]]:
        """Return the sorted groups of ranks, two or more, with which a rank divides layers or tokens."""
        groups = {
            group
            for stage, copy in self.stages_of(rank).items()
            for along in self.grid(stage, copy).groups(self.stages[stage].replicas[copy].ranks)
            for group in along
        }
        return sorted(group for group in groups if len(group) > 1 and rank in group)

    def size_of(self, stage: int) -> int:
        """Return the samples of one of a stage's split micro-batches."""
        return self.micro_batch_size // self.stages[stage].splits

    def shape(self, stage: int, replica: int = 0) -> Shape:
        """Return the shape of one rank's part of one of a stage's split micro-batches, in a replica."""
        return Shape(self.size_of(stage) // self.ep, self.sequence, *self.grid(stage, replica))

    def shape_of_shards(self, stage: int) -> Shape:
        """Return the shape of a rank in a stage's widest replica: replicas reduce its parameters at once."""
        widths = [len(copy.ranks) for copy in self.stages[stage].replicas]
        return self.shape(stage, widths.index(max(widths)))

    def sharers(self, stage: int) -> int:
        """Return the number of replicas that shard a stage's states among themselves; 1 without sharding."""
        return 1 if self.sharding == "zero-0" else self.reducers(stage)

    def reducers(self, stage: int) -> int:
        """Return the number of replicas that reduce a stage's gradient together, and perhaps shard it."""
        return self.island or len(self.stages[stage].replicas)

    def __repr__(self) -> str:
        parts = [
            f"{self.plan_id}: {self.model} on {self.cluster}",
            f"{counted(len(self.stages), 'stage')} on {counted(self.ranks, 'rank')}",
            self.schedule.name,
            shared_out(self),
            f"global batch {self.global_batch}",
        ]
        return one_line(self, ", ".join(parts))

    @property
    def plan_id(self) -> str:
        """Sixteen hex digits of the decisions' hash."""
        return id_of(self.record())

    def record(self) -> dict[str, Any]:
        """Return the fields for JSON, without unset islands, methods, layer choices, stacks, buffers,
        launches, optimizers, splits and precisions of reductions. An optimizer leaves out what it does not
        do: sums over whole tensors, orthogonal updates, states of a step. So plans without these keep the ids
        of earlier versions.
        """
        record: dict[str, Any] = self.model_dump(mode="json")
        for stage in record["stages"]:
            if stage["splits"] == 1:
                del stage["splits"]
        for name in _LEFT_OUT_UNSET:
            if getattr(self, name) == Plan.model_fields[name].default:
                del record[name]
        for name in ("whole_sums", "unit_gradient", "orthogonalisations", "other_states", "step_states"):
            if "optimizer" in record and not record["optimizer"][name]:
                del record["optimizer"][name]
        return record


_LEFT_OUT_UNSET = (
    "island",
    "reduce_precision",
    "methods",
    "layer_choices",
    "stack",
    "buffers",
    "launch",
    "optimizer",
)


def id_of(record: Mapping[str, Any]) -> str:
    """Return sixteen hex digits of the SHA-256 hash of a record's canonical JSON."""
    canonical = json.dumps(record, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def said_options(options: Mapping[str, int | float | str | bool]) -> list[str]:
    """Return a schedule's options in words, without lists, such as times of all stages."""
    return [f"{name} {value}" for name, value in options.items() if " " not in str(value)]


def shared_out(decided: Plan | Layout) -> str:
    """Return the sharding and its islands in words."""
    return (
        decided.sharding if decided.island is None else f"{decided.sharding} in islands of {decided.island}"
    )


def precision_words(decided: Plan | Job) -> str:
    """Return the precision, with the one of reductions where it is another."""
    if decided.reduce_precision is None:
        return decided.precision
    return f"{decided.precision}, gradients reduced in {decided.reduce_precision}"
