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

from weft.describe.loggers import require_logger
from weft.describe.plan import RECOMPUTES, Recompute, Sharding
from weft.describe.reading import parse_toml, read_toml, violations_of
from weft.describe.tasks import KNOWN_TASKS
from weft.describe.toml_text import table_text, value_text
from weft.describe.units import shown
from weft.errors import InputError, Violation, nearest

# Steps, samples and tokens are 64-bit integers whose products must stay so.
Count = Annotated[int, Field(ge=1, le=10**9)]
Word = Annotated[str, Field(min_length=1)]
# Words for tokenizers: one token per byte, and the tokenizer of the folder that the model comes from.
BYTES = "bytes"
MODEL = "model"
ANY_PRECISION = "any"
_IMPORTABLE = r"^[A-Za-z_][A-Za-z0-9_.]*:[A-Za-z_][A-Za-z0-9_]*$"
# TOML has no tuples; strictness inside them is kept.
TOML_ARRAY = BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)
Betas = Annotated[tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]], TOML_ARRAY]


def _require_task(kind: str) -> str:
    if kind not in KNOWN_TASKS and not re.fullmatch(_IMPORTABLE, kind):
        problem = f"{shown(kind)} is neither {', '.join(KNOWN_TASKS)} nor of the form package.module:Task"
        raise InputError(Violation("", problem, nearest(kind, KNOWN_TASKS) or "causal-lm"))
    return kind


def _require_recompute(given: object) -> object:
    """One word for all stages, or a list with one for each."""
    words = given if isinstance(given, list | tuple) else [given]
    allowed = f"must be {', '.join(map(repr, RECOMPUTES[:-1]))} or {RECOMPUTES[-1]!r}"
    for stage, word in enumerate(words):
        if word not in RECOMPUTES:
            of = f" for stage {stage}" if words is given else ""
            near = nearest(word, RECOMPUTES) if isinstance(word, str) else ""
            raise InputError(Violation("", f"{shown(word)}{of}: {allowed}", near))
    if not words:
        raise InputError(Violation("", "an empty list; one word for all stages, or one for each", "none"))
    return tuple(words) if words is given else given


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
        description="text: python-stdlib, a file, a folder or a glob of text, .jsonl or .parquet, hf:NAME; "
        "images: digits (their default), a folder with one sub-folder per class, hf:NAME",
    )
    tokenizer: Word = Field(
        default=BYTES,
        description="bytes, model (the folder of [model] hf), a tokenizer.json or a folder with one",
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
    precision: Literal["fp64", "fp32", "bf16", "fp16", "any"] | None = Field(
        default=None, description="any: the planner chooses between bf16 and fp32"
    )
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    compile: bool = Field(
        default=False, description="true: layers are compiled (torch.compile) before the first step"
    )


class OptimizerTable(_Table):
    """`[optimizer]`."""

    name: Literal["adamw", "adam", "sgd"] = "adamw"
    learning_rate: Annotated[float, Field(gt=0)] = Field(default=1e-3, description="after warm-up")
    warm_up_steps: Annotated[int, Field(ge=0, le=10**9)] = Field(
        default=10, description="steps in which the learning rate rises linearly"
    )
    schedule: Literal["constant", "linear", "cosine"] = Field(
        default="constant", description="what the learning rate does after warm-up"
    )
    final_learning_rate: Annotated[float, Field(ge=0)] | None = Field(
        default=None, description="where linear and cosine end; 0 if absent"
    )
    decay_steps: Count | None = Field(
        default=None, description="steps, warm-up included, after which they are there; train.steps if absent"
    )
    betas: Betas | None = Field(default=None, description="of adamw and adam; [0.9, 0.95] if absent")
    momentum: Annotated[float, Field(ge=0, lt=1)] | None = Field(
        default=None, description="of sgd; 0.9 if absent"
    )
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    decay_all: bool = Field(
        default=False, description="true: norms, biases and embeddings decay, too, and not matrices alone"
    )
    clip_norm: Annotated[float, Field(gt=0)] | None = Field(
        default=None, description="the whole gradient is scaled down to this norm where it has a larger one"
    )
    skip_non_finite: bool = Field(
        default=False, description="leave out a step whose gradient is not finite, on all ranks"
    )

    @model_validator(mode="after")
    def _keys_that_count(self) -> OptimizerTable:
        """A key that would have no effect is refused."""
        sgd, constant = self.name == "sgd", self.schedule == "constant"
        keys = (
            ("betas", sgd, "name"),
            ("momentum", not sgd, "name"),
            ("final_learning_rate", constant, "schedule"),
            ("decay_steps", constant, "schedule"),
        )
        problems = [
            Violation(key, f'has no effect with {owner} = "{getattr(self, owner)}"; leave it out')
            for key, without_effect, owner in keys
            if without_effect and getattr(self, key) is not None
        ]
        if self.final_learning_rate is not None and self.final_learning_rate > self.learning_rate:
            problem = f"{self.final_learning_rate:g} is above learning_rate, {self.learning_rate:g}"
            problems.append(Violation("final_learning_rate", problem, f"{self.learning_rate:g}"))
        if self.decay_steps is not None and self.decay_steps <= self.warm_up_steps:
            problem = f"{self.decay_steps} leaves nothing after warm_up_steps = {self.warm_up_steps}"
            problems.append(Violation("decay_steps", problem, str(self.warm_up_steps + 1)))
        if problems:
            raise InputError(problems)
        return self

    @property
    def needs_norm(self) -> bool:
        """Whether steps wait for the norm of the whole gradient."""
        return self.clip_norm is not None or self.skip_non_finite


class ClusterTable(_Table):
    """`[cluster]`."""

    use: Word = Field(
        default="this-machine", description="this-machine, an expression such as 64xa100-80gb, or a file"
    )


class GoalTable(_Table):
    """`[goal]`: what the planner minimises, and what it may change for that."""

    minimise: Literal["time", "memory", "cost"] = "time"
    contract: Literal["exact", "function-preserving", "unbiased", "empirical"] = "exact"
    deadline_hours: Annotated[float, Field(gt=0)] | None = None


class PlanTable(_Table):
    """`[plan]`: decisions taken away from the planner."""

    schedule: Word | None = None
    loops: Count | None = Field(default=None, description="stages per device on a looped pipeline")
    pp: Count | None = Field(default=None, description="devices of one pipeline")
    dp: Count | None = Field(default=None, description="replicas of the pipeline")
    tp: Count | None = Field(default=None, description="devices that divide every layer among them")
    cp: Count | None = Field(
        default=None, description="devices that divide the tokens of a sample among them"
    )
    micro_batch_size: Count | None = None
    sharding: Sharding | None = Field(
        default=None, description="what replicas share out: nothing, optimizer states, gradients, weights"
    )
    island: Count | None = Field(default=None, description="replicas that share it out among themselves")
    recompute: Annotated[Recompute | tuple[Recompute, ...] | None, BeforeValidator(_require_recompute)] = (
        Field(
            default=None,
            description="full: backward passes run layers forward again; selective: all but their products; "
            "a list says it of each stage",
        )
    )
    planner: Word | None = None

    @model_validator(mode="after")
    def _a_word_for_each_stage(self) -> PlanTable:
        words, devices = self.recompute, self.pp
        if devices is None or words is None or isinstance(words, str):
            return self
        loops = self.loops or max(1, len(words) // devices)
        stages = devices * loops
        if len(words) != stages:
            given = f"pp {devices}" if self.loops is None else f"pp {devices} x loops {loops}"
            near = value_text((*words, *[words[-1]] * stages)[:stages])
            problem = f"{len(words)} words for the {stages} stages of {given}"
            raise InputError(Violation("recompute", problem, near))
        return self


class SyncTable(_Table):
    """`[sync]`: how replicas agree."""

    method: Literal["dense"] = "dense"


class CheckpointTable(_Table):
    """`[checkpoint]`: the last step is always saved."""

    every: Count = Field(default=100, description="steps between two checkpoints")
    keep: Count = Field(default=2, description="how many of the newest are kept")
    load_timeout_s: Annotated[float, Field(gt=0)] = Field(
        default=30.0, description="how long ranks that have loaded one wait for a rank that reads nothing"
    )


class ReportTable(_Table):
    """`[report]`: where the figures of every step go besides the run's own files."""

    log: Annotated[tuple[Annotated[str, AfterValidator(require_logger)], ...], TOML_ARRAY] = Field(
        default=(), description="csv, tensorboard, wandb, or wandb:package.module for what has its interface"
    )

    @model_validator(mode="after")
    def _once_each(self) -> ReportTable:
        twice = next((name for name in self.log if self.log.count(name) > 1), None)
        if twice is not None:
            near = table_text("", {"log": tuple(dict.fromkeys(self.log))}).strip()
            raise InputError(Violation("log", f"{shown(twice)} is given twice", near))
        return self


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
    report: ReportTable = ReportTable()

    @model_validator(mode="after")
    def _tokenizer_of_a_folder(self) -> RunFile:
        if self.task.tokenizer == MODEL and self.model.hf is None:
            problem = f"{MODEL!r} needs model.hf, the folder that holds it"
            raise InputError(Violation("task.tokenizer", problem, BYTES))
        return self

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
            "task": run.task.model_copy(
                update={
                    "data": _data_beside(folder, run.task.data),
                    "tokenizer": _tokenizer_beside(folder, run.task.tokenizer),
                }
            ),
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


def _data_beside(folder: Path, data: str) -> str:
    """`data` with its path in `folder` when that is there, also in `hf:PATH@SPLIT#COLUMN`."""
    prefix, text = ("hf:", data[3:]) if data.startswith("hf:") else ("", data)
    path = re.split("[#@:]", text, maxsplit=1)[0]
    for name in (text, path):
        if name and (found := _beside(folder, name)) != name:
            return f"{prefix}{found}{text[len(name) :]}"
    return data


def _tokenizer_beside(folder: Path, name: str) -> str | None:
    return name if name in (BYTES, MODEL) else _beside(folder, name)


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
                                # tables: "rows.jsonl", "rows.parquet#column", "hf:NAME@split#column"
# tokenizer = "bytes"           # or a tokenizer.json, a folder with one, "model": the folder of hf
sequence = 256                  # tokens per sample

[train]
global_batch = 32               # samples per optimizer step
steps = 200
# precision = "fp32"            # fp64, fp32, bf16 or fp16; "any": bf16 or fp32, as the planner finds;
                                # default: the best that all devices compute
seed = 0
# compile = false               # true: layers are compiled (torch.compile) before the first step

[optimizer]
name = "adamw"                  # or "adam", "sgd"
learning_rate = 1e-3
# warm_up_steps = 10            # steps in which the learning rate rises linearly
# schedule = "constant"         # then; or "linear", "cosine" to final_learning_rate within decay_steps
# betas = [0.9, 0.95]           # sgd has momentum = 0.9 instead
# weight_decay = 0.1
# decay_all = false             # true: also norms, biases and embeddings, and not matrices alone
# clip_norm = 1.0               # the whole gradient is scaled down to this norm; default: never
# skip_non_finite = false       # true: leave out steps whose gradient is not finite

[cluster]
use = "this-machine"            # or an expression such as "64xa100-80gb", or a CLUSTER.toml

[goal]
minimise = "time"               # or "memory", or "cost" where devices have prices
contract = "exact"              # what may change: exact < function-preserving < unbiased < empirical
# deadline_hours = 12

[plan]                          # a key given here is pinned
# schedule = "breadth-first"    # or "1f1b", "gpipe"
# loops = 2                     # stages per device
# pp = 2                        # devices of one pipeline
# dp = 1                        # replicas of the pipeline
# tp = 1                        # devices that divide every layer among them
# cp = 1                        # devices that divide the tokens of a sample among them
# micro_batch_size = 4
# sharding = "zero-0"           # or "zero-1", "zero-2", "zero-3": what replicas share out
# island = 8                    # so many replicas share it out among themselves, such as those of a node
# recompute = "none"            # or "full": backward passes run layers forward again to keep less;
#                               # "selective": without matrix products and attention;
#                               # or one word per stage, such as ["full", "none"]
# planner = "weft"

[sync]
method = "dense"                # how replicas agree on the gradient

[checkpoint]
every = 100                     # steps between checkpoints; the last step is always saved
keep = 2                        # how many of the newest stay
# load_timeout_s = 30           # ranks that have loaded one wait so long for a rank that reads nothing

[report]
# log = ["csv", "tensorboard"]  # also "wandb", or "wandb:package.module" for what has its interface
"""
