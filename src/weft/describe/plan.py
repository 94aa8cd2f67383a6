"""`Plan`: the decisions and nothing else.

A Plan is data at the bottom of the house because everything above reads it: cost model, moves, compiler,
planners and runtime. `plan_id` hashes the decisions; the prediction a plan was chosen for does not change it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field

from weft.describe.device import PRECISION_BYTES

Count = Annotated[int, Field(ge=1)]
Rank = Annotated[int, Field(ge=0)]
# From the fastest to the smallest.
Recompute = Literal["none", "selective", "full"]
RECOMPUTES: tuple[Recompute, ...] = get_args(Recompute)
Sharding = Literal["zero-0", "zero-1", "zero-2", "zero-3"]
Blocking = Literal["messages", "reductions"]


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Choice(_Record):
    """A method chosen by name, with its options."""

    name: str
    options: Mapping[str, int | float | str | bool] = Field(default_factory=dict)


class Replica(_Record):
    """One copy of a stage: its ranks (several under tensor parallelism) and its share of the batch."""

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
    """What the planner expected; times with a 90 % interval."""

    step_s: float = Field(gt=0)
    step_low_s: float = Field(gt=0)
    step_high_s: float = Field(gt=0)
    first_step_s: float = Field(gt=0)
    peak_bytes: tuple[int, ...]
    source: str


class Plan(_Record):
    """A complete layout of one training job.

    Micro-batches of a step are numbered globally; replica j of a stage runs the next
    `replicas[j].micro_batches` of them, so the replicas of each stage cover the global batch exactly once.
    `mesh` keeps the order of the axes, outermost first. `sharding` says what the replicas of a stage share
    out instead of each holding all of it: nothing, optimizer states, gradients too, weights too (Rajbhandari
    et al., ZeRO, arXiv 1910.02054). `blocking` names communication that is not overlapped with computation,
    as other frameworks ship it: messages that a device waits for, gradients reduced at the step's end.
    `gradient_norm` is the job's: every step waits for the norm of the whole gradient, to clip it or to leave
    a step out.
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
    blocking: tuple[Blocking, ...] = ()
    gradient_norm: bool = False
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

    @property
    def plan_id(self) -> str:
        """Sixteen hex digits of the decisions' hash."""
        return hashlib.sha256(self._canonical(exclude={"prediction"}).encode()).hexdigest()[:16]

    def to_json(self) -> str:
        """The plan file: canonical keys, one stage per line so that people can read and edit it."""
        record = self.model_dump(mode="json")
        stages = record.pop("stages")
        lines = ",\n  ".join(json.dumps(stage, sort_keys=True) for stage in stages)
        head = json.dumps({"plan_id": self.plan_id, **record}, indent=1, sort_keys=True)
        return f'{head[:-2]},\n "stages": [\n  {lines}\n ]\n}}\n'

    def _canonical(self, exclude: set[str]) -> str:
        record: dict[str, Any] = self.model_dump(mode="json", exclude=exclude)
        return json.dumps(record, sort_keys=True, separators=(",", ":"))
