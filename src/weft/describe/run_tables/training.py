"""The training and its output: the tables `[model]`, `[task]`, `[train]`, `[run]`, `[optimizer]`,
`[checkpoint]` and `[report]` of a RUN.toml."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, PlainValidator, WithJsonSchema, model_validator

from weft.describe.loggers import KNOWN_LOGGERS, require_logger
from weft.describe.optimizers import KNOWN_OPTIMIZERS, require_optimizer, states_of
from weft.describe.plan import GRADIENT_NORM, MICRO_BATCH_NORMS, PACKING, Choice, ReducePrecision
from weft.describe.tasks import KNOWN_TASKS, PACKED, Data, is_language, sources_of
from weft.describe.toml_table import IMPORTABLE, TOML_ARRAY, Count, TomlTable, Word, is_importable, table_text
from weft.describe.units import shown
from weft.errors import InputError, Violation, nearest

# Words for tokenizers: one token per byte, and the tokenizer in the model's folder.
BYTES = "bytes"
MODEL = "model"
ANY_PRECISION = "any"
# A run goes on without a replica whose process was killed.
GO_ON = "go-on"
# So many whole states each rank of such a run keeps: ranks are at most one of them apart.
KEPT_STATES = 2
# The most samples for the held-out loss, before they fill whole global batches; always the same samples.
HELD_OUT_SAMPLES = 256
Betas = Annotated[tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]], TOML_ARRAY]


def _require_task(kind: str) -> str:
    if kind not in KNOWN_TASKS and not is_importable(kind):
        problem = f"{shown(kind)} is neither {', '.join(KNOWN_TASKS)} nor of the form package.module:Task"
        raise InputError(Violation("", problem, nearest(kind, KNOWN_TASKS) or "causal-lm"))
    return kind


def _parse_data(value: object) -> Data:
    """Return a source, or sources with weights above 0."""
    if isinstance(value, str) and value:
        return value
    if not isinstance(value, dict) or not value:
        problem = f"{shown(value)}: must be a source, or sources with their weights"
        raise InputError(Violation("", problem, '{ "python-stdlib" = 2, "notes.txt" = 1 }'))
    wrong = [
        Violation(source, f"{shown(weight)}: its weight must be a number above 0")
        for source, weight in value.items()
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < math.inf
    ]
    if wrong:
        raise InputError(wrong)
    return {source: float(weight) for source, weight in value.items()}


_DATA_SCHEMA = WithJsonSchema(
    {
        "anyOf": [
            {"type": "string", "minLength": 1},
            {
                "type": "object",
                "minProperties": 1,
                "additionalProperties": {"type": "number", "exclusiveMinimum": 0},
            },
        ]
    }
)


class ModelTable(TomlTable):
    """`[model]`: exactly one of preset, hf and build."""

    NAMES: ClassVar = ("preset", "hf", "build")

    preset: Word | None = Field(default=None, description="a name that weft knows, such as gpt-10m")
    hf: Word | None = Field(default=None, description="a folder with a config.json, or such a file")
    build: Annotated[str, Field(pattern=IMPORTABLE)] | None = Field(
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
        given = [key for key in self.NAMES if getattr(self, key) is not None]
        if len(given) != 1:
            found = " and ".join(given) or "none"
            raise InputError(Violation("", f"{found} given; exactly one of preset, hf and build is needed"))
        return self


class TaskTable(TomlTable):
    """`[task]`: the learning task and its data."""

    kind: Annotated[str, AfterValidator(_require_task)] = Field(
        default="causal-lm", description=f"{', '.join(KNOWN_TASKS)}, or package.module:Task"
    )
    data: Annotated[Data, PlainValidator(_parse_data), _DATA_SCHEMA] = Field(
        default="python-stdlib",
        description="text: python-stdlib, a file, a folder or a glob of text, .jsonl or .parquet, hf:NAME; "
        "the NAME of NAME.idx and NAME.bin of Megatron-LM, several sources with weights; "
        "conversations: a table of these kinds; "
        "images: digits (their default), a folder with one sub-folder per class, hf:NAME; "
        "of models with several inputs: synthetic",
    )
    source_block: Count = Field(
        default=1, description="samples of one source that follow each other in the batch; of several sources"
    )
    tokenizer: Word = Field(
        default=BYTES,
        description="bytes, model (the folder of [model] hf), a tokenizer.json or a folder with one",
    )
    sequence: Count | None = Field(default=None, description="tokens per sample; the model's own if absent")
    packing: bool = Field(
        default=False,
        description="true: samples hold several conversations, and attention stays inside each of them; of "
        "text, inside each document",
    )

    @property
    def methods(self) -> tuple[Choice, ...]:
        """The methods that the table requests."""
        return (Choice(name=PACKING),) if self.packing else ()

    @model_validator(mode="after")
    def _packs_documents(self) -> Self:
        if self.packing and self.kind not in PACKED:
            problem = f"only {' and '.join(PACKED)} have documents; the task is {shown(self.kind)}"
            raise InputError(Violation("packing", problem, "false"))
        return self

    @model_validator(mode="after")
    def _tokens_of_text(self) -> Self:
        if self.tokenizer != BYTES and self.kind in KNOWN_TASKS and not is_language(self.kind):
            raise InputError(Violation("tokenizer", f"{self.kind} reads no text", BYTES))
        return self

    @model_validator(mode="after")
    def _blocks_of_sources(self) -> Self:
        if self.source_block > 1 and len(sources_of(self.data)) == 1:
            problem = f"{self.source_block}; the data has one source"
            raise InputError(Violation("source_block", problem, "1"))
        return self

    @model_validator(mode="before")
    @classmethod
    def _data_of_the_task(cls, table: Any) -> Any:
        """Fill in the task's default data if the key is missing."""
        kind = table.get("kind") if isinstance(table, dict) else None
        if not isinstance(kind, str) or kind not in KNOWN_TASKS:
            return table
        if not KNOWN_TASKS[kind].data and "data" not in table:
            problem = f"is missing: {kind} has no default, such as chats.jsonl"
            raise InputError(Violation("data", problem))
        return {"data": KNOWN_TASKS[kind].data, **table}


class TrainTable(TomlTable):
    """`[train]`: the size and length of the training."""

    # The work of a search grows with the micro-batches: ten million take a minute.
    global_batch: Annotated[int, Field(ge=1, le=10**7)] | None = Field(
        default=None, description="samples per optimizer step"
    )
    steps: Count = 200
    precision: Literal["fp64", "fp32", "bf16", "fp16", "any"] | None = Field(
        default=None, description="any: the planner chooses between bf16 and fp32"
    )
    reduce_precision: ReducePrecision | None = Field(
        default=None,
        description="the precision in which replicas send each other gradients to add them up; that of the "
        "gradients if absent: fp32, or fp64 with fp64",
    )
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    evaluate_every: Count | None = Field(
        default=None,
        description="steps between evaluations on held-out data; if absent, only at both ends of a run",
    )
    compile: bool = Field(
        default=False, description="true: layers are compiled (torch.compile) before the first step"
    )


class ExecutionTable(TomlTable):
    """`[run]`: the way in which ranks execute the plan."""

    transport: Literal["host", "device"] | None = Field(
        default=None,
        description="the way of messages and sums; host: through host memory, device: by the device's own "
        "backend (NCCL on CUDA); if absent, device wherever it is possible on an accelerator",
    )
    deterministic: bool = Field(
        default=False,
        description="true: only kernels that give the same bits in every repetition; an operation without "
        "such a kernel fails",
    )
    on_death: Literal["stop", "go-on"] = Field(
        default="stop",
        description="what a run does when a rank's process is killed; go-on: the others go on without its "
        "replica, and a new process takes its place; only with cser and keep_errors",
    )
    max_restarts: Annotated[int, Field(ge=0)] = Field(
        default=0,
        description="how often a run that has failed starts again, from its newest checkpoint; also what "
        "written commands tell torchrun",
    )
    min_nodes: Annotated[int, Field(ge=1)] | None = Field(
        default=None,
        description="the fewest nodes with which torchrun goes on when others are lost; their plans are made "
        "beforehand",
    )
    max_nodes: Annotated[int, Field(ge=1)] | None = Field(
        default=None,
        description="the most nodes that torchrun takes in; those beyond the plan's wait as spares",
    )

    @property
    def used_transport(self) -> Literal["host", "device"] | None:
        """The transport; None leaves the choice to the device. Host memory survives the loss of a rank."""
        return self.transport or ("host" if self.on_death == GO_ON else None)


class OptimizerTable(TomlTable):
    """`[optimizer]`."""

    name: Annotated[str, AfterValidator(require_optimizer)] = Field(
        default="adamw",
        description=f"{', '.join(KNOWN_OPTIMIZERS)}, or another package's: as it is registered, or "
        "package.module:Optimizer",
    )
    state_bytes: Annotated[int, Field(ge=0, le=1000)] | None = Field(
        default=None,
        description="of another package's optimizer that does not say it: bytes kept per parameter",
    )
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
    betas: Betas | None = Field(
        default=None,
        description="of all but sgd; if absent, [0.9, 0.95], and [0.9, 0.999] of lamb, nvlamb and lans",
    )
    momentum: Annotated[float, Field(ge=0, lt=1)] | None = Field(
        default=None, description="of sgd and muon; 0.9 and 0.95 if absent"
    )
    matrix_scale: Literal["original", "match_rms_adamw"] | None = Field(
        default=None, description="of muon: the length of a matrix's update; match_rms_adamw if absent"
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

    @property
    def kept_states(self) -> str:
        """The kind of states that the optimizer keeps, in words; empty for none."""
        return states_of(self.name, momentum=self.momentum)

    @model_validator(mode="after")
    def _keys_that_count(self) -> OptimizerTable:
        """Refuse keys without an effect."""
        constant = self.schedule == "constant"
        keys = (
            ("betas", self.name not in KNOWN_OPTIMIZERS or self.name == "sgd", "name"),
            ("momentum", self.name not in ("sgd", "muon"), "name"),
            ("matrix_scale", self.name != "muon", "name"),
            # They divide gradients by their norms.
            ("clip_norm", self.name in ("nvlamb", "lans"), "name"),
            ("state_bytes", self.name in KNOWN_OPTIMIZERS, "name"),
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
    def methods(self) -> tuple[Choice, ...]:
        """The methods that the table requests."""
        waits = self.clip_norm is not None or self.skip_non_finite
        return (Choice(name=GRADIENT_NORM),) if waits else ()


def _absolute(place: str) -> str:
    """Return an absolute path, or a URL, whose place on a disk is absolute, too."""
    protocol, mark, behind = place.partition("://")
    if mark and not (protocol and behind.strip("/")):
        raise InputError(
            Violation("", f"{place!r} is no URL with a protocol and a place", "s3://bucket/runs")
        )
    path, before = (behind, f"{protocol}://") if mark else (place, "")
    if (not mark or protocol == "file") and not path.startswith("/"):
        problem = f"{place!r} is no absolute path, and nodes work in other folders"
        raise InputError(Violation("", problem, f"{before}{'/' / Path(path).expanduser()}"))
    return place


class CheckpointTable(TomlTable):
    """`[checkpoint]`: the last step is always saved."""

    every: Count = Field(default=100, description="steps between two checkpoints")
    keep: Count = Field(default=2, description="how many of the newest are kept")
    load_timeout_s: Annotated[float, Field(gt=0)] = Field(
        default=30.0, description="how long ranks that have loaded one wait for a rank that reads nothing"
    )
    directory: Annotated[str, AfterValidator(_absolute)] | None = Field(
        default=None,
        description="a folder that all nodes share, with a folder for each run's checkpoints, or a URL to "
        "which nodes copy theirs (s3://bucket/runs); by default the run directory's own alone",
    )
    weight_log: bool = Field(
        default=False,
        description="keep the few bits in which replicas send stepped weights, since the oldest one",
    )

    @property
    def folder(self) -> Path | None:
        """The folder that all nodes share; None: there is none."""
        return None if self.directory is None or self.url is not None else Path(self.directory)

    @property
    def url(self) -> str | None:
        """The place to which nodes copy checkpoints; None: there is none."""
        return self.directory if self.directory is not None and "://" in self.directory else None


class ReportTable(TomlTable):
    """`[report]`: loggers for the figures of every step besides the run's own files, and their content."""

    log: Annotated[tuple[Annotated[str, AfterValidator(require_logger)], ...], TOML_ARRAY] = Field(
        default=(),
        description=f"{', '.join(KNOWN_LOGGERS)}, or wandb:package.module for what has wandb's interface",
    )
    hang: Literal["warn", "stop"] = Field(
        default="warn",
        description="what a step does in which no instruction ends any more: a line, or the end",
    )
    hang_after_s: Annotated[float, Field(ge=1)] = Field(
        default=30.0, description="nothing has ended for so long, and not for the time of ten steps"
    )
    micro_batch_norms: bool = Field(
        default=False, description="tell the norm of every micro-batch's own gradient, in all steps"
    )

    @model_validator(mode="after")
    def _once_each(self) -> ReportTable:
        twice = next((name for name in self.log if self.log.count(name) > 1), None)
        if twice is not None:
            near = table_text("", {"log": tuple(dict.fromkeys(self.log))}).strip()
            raise InputError(Violation("log", f"{shown(twice)} is given twice", near))
        return self

    @property
    def methods(self) -> tuple[Choice, ...]:
        """The methods that the table requests."""
        return (Choice(name=MICRO_BATCH_NORMS),) if self.micro_batch_norms else ()
