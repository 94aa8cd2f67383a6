"""`Plan`: the decisions and nothing else.

A Plan is data at the bottom of the house because everything above reads it: cost model, moves, compiler,
planners and runtime. `plan_id` hashes the decisions; the prediction a plan was chosen for does not change it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Protocol, get_args

from pydantic import BaseModel, ConfigDict, Field

from weft.describe.amount import Shape
from weft.describe.device import PRECISION_BYTES
from weft.describe.optimizers import ADAMW, OptimizerWork

Count = Annotated[int, Field(ge=1)]
Rank = Annotated[int, Field(ge=0)]
# From the fastest to the smallest.
Recompute = Literal["none", "selective", "full"]
RECOMPUTES: tuple[Recompute, ...] = get_args(Recompute)
Sharding = Literal["zero-0", "zero-1", "zero-2", "zero-3"]
Blocking = Literal["messages", "reductions"]
Stack = Literal["weft", "megatron-lm", "deepspeed"]
# Share of the variance of a prediction's error that all plans of one model on one machine have in common, as
# long as nobody has measured it.
SHARED = 0.9


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Choice(_Record):
    """A method chosen by name, with its options."""

    name: str
    options: Mapping[str, int | float | str | bool] = Field(default_factory=dict)


class Replica(_Record):
    """One copy of a stage: its ranks (several under tensor or context parallelism), and its share of the
    batch."""

    ranks: tuple[Rank, ...] = Field(min_length=1)
    micro_batches: Count


class Stage(_Record):
    """A convex set of layers that runs as one unit, by position in the LayerGraph.

    With `recompute` "full" a micro-batch keeps the inputs of the layers only, and its backward pass runs them
    forward again; with "selective" it also keeps what their products leave, which are not called again.
    """

    layers: tuple[Rank, ...] = Field(min_length=1)
    replicas: tuple[Replica, ...] = Field(min_length=1)
    recompute: Recompute = "none"


class Prediction(_Record):
    """What the planner expected; times with a 90 % interval.

    `shared` is the part of the variance of the step's error (of its logarithm) that other plans of the job
    have in common with it.
    """

    step_s: float = Field(gt=0)
    step_low_s: float = Field(gt=0)
    step_high_s: float = Field(gt=0)
    first_step_s: float = Field(gt=0)
    peak_bytes: tuple[int, ...]
    source: str
    shared: float = Field(default=SHARED, ge=0.0, le=1.0)


class Plan(_Record):
    """A complete layout of one training job.

    Micro-batches of a step are numbered globally; replica j of a stage runs the next
    `replicas[j].micro_batches` of them, so the replicas of each stage cover the global batch exactly once.
    `mesh` keeps the order of the axes, outermost first. `sharding` says what the replicas of a stage share
    out instead of each holding all of it: nothing, optimizer states, gradients too, weights too (Rajbhandari
    et al., ZeRO, arXiv 1910.02054). `island` is how many replicas share it out among themselves, and add each
    share up with those of the other islands (Zhao et al., PyTorch FSDP, arXiv 2304.11277, section 3.2); None:
    all of them. `context_parallel` is how many groups of a replica's ranks divide the tokens of its samples
    among them (Llama 3, arXiv 2407.21783, section 3.3.2); the ranks of a group divide the layers. `blocking`
    names communication that is not overlapped with computation, as other frameworks ship it: messages that a
    device waits for, gradients reduced at the step's end. `stack` says whose program runs the plan, which
    decides what it holds besides. `gradient_norm` is the job's: every step waits for the norm of the whole
    gradient, to clip it or to leave a step out. `optimizer` is the job's, too: what it keeps and moves.
    """

    version: Literal[1] = 1
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
    context_parallel: Count = 1
    blocking: tuple[Blocking, ...] = ()
    stack: Stack = "weft"
    gradient_norm: bool = False
    optimizer: OptimizerWork = ADAMW
    sync: Choice = Choice(name="dense")
    prediction: Prediction | None = None

    @property
    def micro_batches(self) -> int:
        """Micro-batches per step of all replicas together."""
        return self.global_batch // self.micro_batch_size

    @property
    def ranks(self) -> int:
        """Ranks the plan uses: one more than the highest."""
        return 1 + max(rank for stage in self.stages for copy in stage.replicas for rank in copy.ranks)

    @property
    def element_bytes(self) -> int:
        return PRECISION_BYTES[self.precision]

    def shape(self, stage: int) -> Shape:
        """What one rank of a stage computes of a micro-batch."""
        width = len(self.stages[stage].replicas[0].ranks) // self.context_parallel
        return Shape(self.micro_batch_size, self.sequence, width, self.context_parallel)

    def sharers(self, stage: int) -> int:
        """How many replicas share the states of a stage out among themselves; 1 where each holds all."""
        if self.sharding == "zero-0":
            return 1
        return self.island or len(self.stages[stage].replicas)

    @property
    def plan_id(self) -> str:
        """Sixteen hex digits of the decisions' hash."""
        return hashlib.sha256(self._canonical(exclude={"prediction"}).encode()).hexdigest()[:16]

    def to_json(self) -> str:
        """The plan file: canonical keys, one stage per line so that people can read and edit it."""
        record = self._record()
        stages = record.pop("stages")
        lines = ",\n  ".join(json.dumps(stage, sort_keys=True) for stage in stages)
        head = json.dumps({"plan_id": self.plan_id, **record}, indent=1, sort_keys=True)
        return f'{head[:-2]},\n "stages": [\n  {lines}\n ]\n}}\n'

    def _canonical(self, exclude: set[str]) -> str:
        return json.dumps(self._record(exclude), sort_keys=True, separators=(",", ":"))

    def _record(self, exclude: set[str] | None = None) -> dict[str, Any]:
        """The fields but islands, context ranks, stacks and optimizers that are not given, so that plans
        without them keep the id they had."""
        record: dict[str, Any] = self.model_dump(mode="json", exclude=exclude)
        if self.island is None:
            del record["island"]
        if self.context_parallel == 1:
            del record["context_parallel"]
        if self.stack == "weft":
            del record["stack"]
        if self.optimizer == ADAMW:
            del record["optimizer"]
        return record


def tensor_groups_of(ranks: Sequence[int], context_parallel: int) -> tuple[tuple[int, ...], ...]:
    """Of a replica's ranks those that divide layers among them, neighbours, by their place in the tokens."""
    size = len(ranks) // context_parallel
    return tuple(tuple(ranks[first : first + size]) for first in range(0, len(ranks), size))


def context_groups_of(ranks: Sequence[int], context_parallel: int) -> tuple[tuple[int, ...], ...]:
    """Of a replica's ranks those that divide tokens among them, by their share of the layers."""
    size = len(ranks) // context_parallel
    return tuple(tuple(ranks[place::size]) for place in range(size))


class _Sharing(Protocol):
    """What says what replicas share out: a plan or a layout."""

    @property
    def sharding(self) -> Sharding: ...

    @property
    def island(self) -> int | None: ...


def shared_out(decided: _Sharing) -> str:
    """What replicas share out, and among how many of them, in words."""
    return (
        decided.sharding if decided.island is None else f"{decided.sharding} in islands of {decided.island}"
    )


def refuse_island(sharding: Sharding, island: int | None, replicas: int) -> tuple[str, str] | None:
    """Why `replicas` cannot share out in islands of that size, and the nearest that can be, or None."""
    if island is None:
        return None
    if sharding == "zero-0":
        return f"islands of {island} replicas share states out, and zero-0 shares nothing", "zero-1"
    if island == 1:
        return "an island of 1 replica has nobody to share with", "2"
    if replicas % island:
        sizes = [size for size in range(2, replicas + 1) if replicas % size == 0]
        near = min(sizes, key=lambda size: abs(size - island))
        return f"{replicas} replicas are not whole islands of {island}", str(near)
    return None
