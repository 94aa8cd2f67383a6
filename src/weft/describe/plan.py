"""`Plan`: the decisions and nothing else.

A Plan is data at the bottom of the house because everything above reads it: cost model, moves, compiler,
planners and runtime. `plan_id` hashes it. The prediction that a plan was chosen for stands beside it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from weft.describe.amount import Shape
from weft.describe.device import PRECISION_BYTES
from weft.describe.one_line import one_line
from weft.describe.optimizers import ADAMW, OptimizerWork
from weft.describe.reading import violations_of
from weft.describe.replica_grid import ReplicaGrid
from weft.errors import InputError

if TYPE_CHECKING:
    from weft.describe.layout import Layout

Count = Annotated[int, Field(ge=1)]
Rank = Annotated[int, Field(ge=0)]
# From the fastest to the smallest.
Recompute = Literal["none", "selective", "full"]
RECOMPUTES: tuple[Recompute, ...] = get_args(Recompute)
Sharding = Literal["zero-0", "zero-1", "zero-2", "zero-3"]
Blocking = Literal["messages", "reductions"]
Stack = Literal["weft", "megatron-lm", "deepspeed"]
# The method that clipping, and leaving out what is not finite, ask for: steps wait for the norm of the whole
# gradient.
GRADIENT_NORM = "gradient-norm"
# The method that a report of the norms of micro-batches asks for.
MICRO_BATCH_NORMS = "micro-batch-norms"


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    def __repr__(self) -> str:
        return one_line(self)

    def __str__(self) -> str:
        return repr(self)

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy in which `update` replaces fields, checked as a plan file is.

        Parts that are records were checked when they were made, and are taken as they are.

        Raises:
            InputError: listing everything in it that is not such a record.
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


class LayerChoice(_Record):
    """What a method is told of some layers, by position in the LayerGraph: a window, bits, an algorithm."""

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

    With `recompute` "full" a micro-batch keeps the inputs of the layers only, and its backward pass runs them
    forward again; with "selective" it also keeps what their products leave, which are not called again. It
    runs each micro-batch of the plan as `splits` equal ones of its own.
    """

    layers: tuple[Rank, ...] = Field(min_length=1)
    replicas: tuple[Replica, ...] = Field(min_length=1)
    recompute: Recompute = "none"
    splits: Count = 1

    def __repr__(self) -> str:
        copies = f"{len(self.replicas)} replicas of {len(self.replicas[0].ranks)} ranks"
        return one_line(self, f"of {len(self.layers)} layers: {copies}, recompute {self.recompute}")


class Plan(_Record):
    """A complete layout of one training job.

    Micro-batches of a step are numbered globally; replica j of a stage runs the next
    `replicas[j].micro_batches` of them, so the replicas of each stage cover the global batch exactly once.
    `mesh` keeps the order of the axes, outermost first. `sharding` says what the replicas of a stage share
    out instead of each holding all of it: nothing, optimizer states, gradients too, weights too (Rajbhandari
    et al., ZeRO, arXiv 1910.02054). `island` is how many replicas share it out among themselves, and add each
    share up with those of the other islands (Zhao et al., PyTorch FSDP, arXiv 2304.11277, section 3.2); None:
    all of them. The axis `cp` of the mesh is how many groups of a replica's ranks divide the tokens of its
    samples among them (Llama 3, arXiv 2407.21783, section 3.3.2); the ranks of a group divide the layers.
    `blocking` names communication that is not overlapped with computation, as other frameworks ship it:
    messages that a device waits for, gradients reduced at the step's end. `stack` says whose program runs the
    plan, which decides what it holds besides. `methods` are those that the job asks for by name.
    `layer_choices` say what it asks of single layers. `optimizer` is the job's, too: what it keeps and moves.
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
    mesh: Mapping[str, Count]
    stages: tuple[Stage, ...] = Field(min_length=1)
    schedule: Choice
    sharding: Sharding = "zero-0"
    island: Count | None = None
    blocking: tuple[Blocking, ...] = ()
    stack: Stack = "weft"
    methods: tuple[Choice, ...] = ()
    layer_choices: tuple[LayerChoice, ...] = ()
    optimizer: OptimizerWork = ADAMW
    sync: Choice = Choice(name="dense")

    @property
    def micro_batches(self) -> int:
        """Micro-batches per step of all replicas together."""
        return self.global_batch // self.micro_batch_size

    @property
    def ranks(self) -> int:
        """Ranks the plan uses: one more than the highest."""
        return 1 + max(rank for stage in self.stages for copy in stage.replicas for rank in copy.ranks)

    @property
    def cp(self) -> int:
        """Groups of a replica's ranks that divide the tokens of its samples."""
        return self.mesh.get("cp", 1)

    def method(self, name: str) -> Choice | None:
        """What the job asks of a method; None where it does not ask for it."""
        return next((one for one in self.methods if one.name == name), None)

    @property
    def element_bytes(self) -> int:
        return PRECISION_BYTES[self.precision]

    @property
    def words(self) -> str:
        """The plan in a line, for tables and messages."""
        axes = " x ".join(f"{axis} {size}" for axis, size in self.mesh.items())
        shared = "" if self.sharding == "zero-0" else f", {shared_out(self)}"
        sizes = f"{len(self.stages)} stages, micro-batch size {self.micro_batch_size}"
        if any(stage.splits > 1 for stage in self.stages):
            sizes += f", splits {'+'.join(str(stage.splits) for stage in self.stages)}"
        return f"{axes}, {self.schedule.name}, {sizes}{shared}"

    def grid(self, stage: int) -> ReplicaGrid:
        """How the ranks of each replica of a stage divide it among them."""
        return ReplicaGrid(len(self.stages[stage].replicas[0].ranks) // self.cp, self.cp)

    def stages_of(self, rank: int) -> dict[int, tuple[int, ...]]:
        """Return the numbers of a rank's stages, with the ranks of the replica that it is in."""
        replicas = ((index, copy.ranks) for index, stage in enumerate(self.stages) for copy in stage.replicas)
        return {index: ranks for index, ranks in replicas if rank in ranks}

    def size_of(self, stage: int) -> int:
        """Samples of one of a stage's own micro-batches."""
        return self.micro_batch_size // self.stages[stage].splits

    def shape(self, stage: int) -> Shape:
        """What one rank of a stage computes of one of its own micro-batches."""
        return Shape(self.size_of(stage), self.sequence, *self.grid(stage))

    def sharers(self, stage: int) -> int:
        """How many replicas share the states of a stage out among themselves; 1 where each holds all."""
        return 1 if self.sharding == "zero-0" else self.reducers(stage)

    def reducers(self, stage: int) -> int:
        """How many replicas reduce a stage's gradient together; what is shared out, they share."""
        return self.island or len(self.stages[stage].replicas)

    def __repr__(self) -> str:
        parts = [
            f"{self.plan_id}: {self.model} on {self.cluster}",
            f"{len(self.stages)} stages on {self.ranks} ranks",
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
        """The fields but islands, methods, choices of layers, stacks, optimizers and splits that are not
        given, so that plans without them keep the id they had."""
        record: dict[str, Any] = self.model_dump(mode="json")
        for stage in record["stages"]:
            if stage["splits"] == 1:
                del stage["splits"]
        if self.island is None:
            del record["island"]
        if not self.methods:
            del record["methods"]
        if not self.layer_choices:
            del record["layer_choices"]
        if self.stack == "weft":
            del record["stack"]
        if self.optimizer == ADAMW:
            del record["optimizer"]
        return record


def id_of(record: Mapping[str, Any]) -> str:
    """Sixteen hex digits of the hash of a record's canonical JSON."""
    canonical = json.dumps(record, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def shared_out(decided: Plan | Layout) -> str:
    """What replicas share out, and among how many of them, in words."""
    return (
        decided.sharding if decided.island is None else f"{decided.sharding} in islands of {decided.island}"
    )
