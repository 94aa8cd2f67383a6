"""RUN.toml: what a user asks for.

A key that is left out is decided by the planner (None here) or has the default stated in its description;
a given key is pinned. Unknown keys are refused with the nearest valid one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from glob import iglob
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from weft.describe.plan import Recompute, Sharding
from weft.describe.reading import parse_toml, read_toml, violations_of
from weft.describe.tasks import KNOWN_TASKS
from weft.describe.toml_text import table_text
from weft.describe.units import shown
from weft.errors import InputError, Violation, nearest

# Steps, samples and tokens are 64-bit integers whose products must stay so.
Count = Annotated[int, Field(ge=1, le=10**9)]
Word = Annotated[str, Field(min_length=1)]
_IMPORTABLE = r"^[A-Za-z_][A-Za-z0-9_.]*:[A-Za-z_][A-Za-z0-9_]*$"
# TOML has no tuples; strictness inside the pair is kept.
Betas = Annotated[
    tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]],
    BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value),
]


def _require_task(kind: str) -> str:
    if kind not in KNOWN_TASKS and not re.fullmatch(_IMPORTABLE, kind):
        problem = f"{shown(kind)} is neither {', '.join(KNOWN_TASKS)} nor of the form package.module:Task"
        raise InputError(Violation("", problem, nearest(kind, KNOWN_TASKS) or "causal-lm"))
    return kind


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class ModelTable(_Table):
    """`[model]`: exactly one of the three."""

    preset: Word | None = Field(default=None, description="a name that weft knows, such as gpt-10m")
    hf: Word | None = Field(default=None, description="a folder with a config.json, or such a file")
    build: Annotated[str, Field(pattern=_IMPORTABLE)] | None = Field(
        default=None, description="package.module:function that builds the model"
    )

    weights: bool = Field(
        default=False, description="start from the weights in the folder of hf, and not from random ones"
    )

    @model_validator(mode="after")
    def _weights_of_a_folder(self) -> ModelTable:
        if self.weights and self.hf is None:
            raise InputError(Violation("weights", "needs hf, the folder that holds them", "false"))
        return self

    @model_validator(mode="after")
    def _exactly_one(self) -> ModelTable:
        given = [key for key in ("preset", "hf", "build") if getattr(self, key) is not None]
        if len(given) != 1:
            found = " and ".join(given) or "none"
            raise InputError(Violation("", f"{found} given; exactly one of preset, hf and build is needed"))
        return self


class TaskTable(_Table):
    """`[task]`: what is learned from which data."""

    kind: Annotated[str, AfterValidator(_require_task)] = Field(
        default="causal-lm", description=f"{', '.join(KNOWN_TASKS)}, or package.module:Task"
    )
    data: Word = Field(
        default="python-stdlib",
        description="text: python-stdlib, a file, a folder or a glob; images: digits (their default) or a "
        "folder with one sub-folder per class",
    )
    sequence: Count | None = Field(default=None, description="tokens per sample; the model's own if absent")

    @model_validator(mode="before")
    @classmethod
    def _data_of_the_task(cls, table: Any) -> Any:
        """Data left out is the task's default."""
        kind = table.get("kind") if isinstance(table, dict) else None
        if not isinstance(kind, str) or kind not in KNOWN_TASKS:
            return table
        return {"data": KNOWN_TASKS[kind].data, **table}


class TrainTable(_Table):
    """`[train]`: the size and length of the training."""

    global_batch: Count | None = Field(default=None, description="samples per optimizer step")
    steps: Count = 200
    precision: Literal["fp64", "fp32", "bf16", "fp16"] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0


class OptimizerTable(_Table):
    """`[optimizer]`."""

    name: Literal["adamw"] = "adamw"
    learning_rate: Annotated[float, Field(gt=0)] = Field(default=1e-3, description="after warm-up")
    warm_up_steps: Annotated[int, Field(ge=0, le=10**9)] = Field(
        default=10, description="steps in which the learning rate rises linearly"
    )
    betas: Betas = (0.9, 0.95)
    weight_decay: Annotated[float, Field(ge=0)] = 0.1


class ClusterTable(_Table):
    """`[cluster]`."""

    use: Word = Field(
        default="this-machine", description="this-machine, an expression such as 64xa100-80gb, or a file"
    )


class GoalTable(_Table):
    """`[goal]`: what the planner minimises, and what it may change for that."""

    minimise: Literal["time", "memory"] = "time"
    contract: Literal["exact", "function-preserving", "unbiased", "empirical"] = "exact"
    deadline_hours: Annotated[float, Field(gt=0)] | None = None


class PlanTable(_Table):
    """`[plan]`: decisions taken away from the planner."""

    schedule: Word | None = None
    loops: Count | None = Field(default=None, description="stages per device on a looped pipeline")
    pp: Count | None = Field(default=None, description="devices of one pipeline")
    dp: Count | None = Field(default=None, description="replicas of the pipeline")
    tp: Count | None = Field(default=None, description="devices that divide every layer among them")
    micro_batch_size: Count | None = None
    sharding: Sharding | None = Field(
        default=None, description="what replicas share out: nothing, optimizer states, gradients, weights"
    )
    recompute: Recompute | None = Field(
        default=None, description="full: backward passes run layers forward again to keep less"
    )
    planner: Word | None = None


class SyncTable(_Table):
    """`[sync]`: how replicas agree."""

    method: Literal["dense"] = "dense"


class CheckpointTable(_Table):
    """`[checkpoint]`: the last step is always saved."""

    every: Count = Field(default=100, description="steps between two checkpoints")
    keep: Count = Field(default=2, description="how many of the newest are kept")


class RunFile(_Table):
    """A RUN.toml, checked."""

    model: ModelTable
    task: TaskTable = TaskTable()
    train: TrainTable = TrainTable()
    optimizer: OptimizerTable = OptimizerTable()
    cluster: ClusterTable = ClusterTable()
    goal: GoalTable = GoalTable()
    plan: PlanTable = PlanTable()
    sync: SyncTable = SyncTable()
    checkpoint: CheckpointTable = CheckpointTable()

    @model_validator(mode="after")
    def _divisible(self) -> RunFile:
        batch, size, replicas = self.train.global_batch, self.plan.micro_batch_size, self.plan.dp
        unit = (size or 1) * (replicas or 1)
        if batch is not None and batch % unit:
            factors = " x ".join(
                f"plan.{key} = {value}"
                for key, value in (("micro_batch_size", size), ("dp", replicas))
                if value is not None
            )
            near = str(max(1, round(batch / unit)) * unit)
            problem = f"{batch} is not divisible by {factors}"
            raise InputError(Violation("train.global_batch", problem, near))
        return self

    def to_toml(self) -> str:
        """The run file with every default written out; keys left to the planner stay absent."""
        tables = []
        for name in type(self).model_fields:
            record = getattr(self, name).model_dump(exclude_none=True)
            if record:
                tables.append(table_text(f"[{name}]", record))
        return "\n".join(tables)


def load_run(path: Path | str) -> RunFile:
    """Read and check a RUN.toml.

    Relative paths of model, data and cluster that exist beside the file become absolute, so that the run
    means the same from every folder; all other text is left as it is.

    Raises:
        InputError: listing everything that is wrong with it, one line each.
    """
    run = parse_run(read_toml(path), str(path))
    folder = Path(path).parent.resolve()
    return run.model_copy(
        update={
            "model": run.model.model_copy(update={"hf": _beside(folder, run.model.hf)}),
            "task": run.task.model_copy(update={"data": _beside(folder, run.task.data)}),
            "cluster": run.cluster.model_copy(update={"use": _beside(folder, run.cluster.use)}),
        }
    )


def parse_run(record: Mapping[str, Any], where: str = "run") -> RunFile:
    """Check the tables of a run file; `where` names it in refusals.

    Raises:
        InputError: listing everything that is wrong with them, one line each.
    """
    try:
        return RunFile.model_validate(dict(record))
    except ValidationError as error:
        raise InputError(violations_of(error, where, RunFile)) from None


def parse_run_text(text: str, where: str = "run") -> RunFile:
    """Check the text of a run file.

    Raises:
        InputError: as `load_run`.
    """
    return parse_run(parse_toml(text, where), where)


def _beside(folder: Path, name: str | None) -> str | None:
    """`name` in `folder` when it is the relative path or pattern of something there, else `name` itself."""
    if name is None or Path(name).is_absolute() or not any(iglob(name, root_dir=folder)):
        return name
    return str(folder / name)


def commented_run_file() -> str:
    """A RUN.toml that runs as it is and says what else can be written."""
    return _COMMENTED


_COMMENTED = """\
# A training run. Every key that is commented out is decided by the planner or has the default shown.
# `weft plan RUN.toml` shows the plans, `weft train RUN.toml` runs the best one.

[model]
preset = "gpt-10m"              # or hf = "a folder with a config.json", or such a file
# weights = false               # true: start from the weights in the folder of hf

[task]
kind = "causal-lm"              # or "masked-lm", "image-classification", your own "package.module:Task"
data = "python-stdlib"          # or a file, a folder, a glob such as "texts/**/*.txt"; images: "digits"
sequence = 256                  # tokens per sample

[train]
global_batch = 32               # samples per optimizer step
steps = 200
# precision = "fp32"            # fp64, fp32, bf16 or fp16; default: the best that all devices compute
seed = 0

[optimizer]
name = "adamw"
learning_rate = 1e-3
# warm_up_steps = 10            # the learning rate rises linearly, then stays
# betas = [0.9, 0.95]
# weight_decay = 0.1

[cluster]
use = "this-machine"            # or an expression such as "64xa100-80gb", or a CLUSTER.toml

[goal]
minimise = "time"               # or "memory"
contract = "exact"              # what may change: exact < function-preserving < unbiased < empirical
# deadline_hours = 12

[plan]                          # a key given here is pinned
# schedule = "breadth-first"    # or "1f1b", "gpipe"
# loops = 2                     # stages per device
# pp = 2                        # devices of one pipeline
# dp = 1                        # replicas of the pipeline
# tp = 1                        # devices that divide every layer among them
# micro_batch_size = 4
# sharding = "zero-0"           # or "zero-1", "zero-2", "zero-3": what replicas share out
# recompute = "none"            # or "full": backward passes run layers forward again to keep less
# planner = "homogeneous"

[sync]
method = "dense"                # how replicas agree on the gradient

[checkpoint]
every = 100                     # steps between checkpoints; the last step is always saved
keep = 2                        # how many of the newest stay
"""
