"""RUN.toml: what a user asks for. An omitted key is decided by the planner, a given key is pinned."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from weft.describe.toml_file import read_toml, validate

Count = Annotated[int, Field(ge=1, strict=True)]


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelTable(_Table):
    """[model]: exactly one of the three keys."""

    preset: str | None = Field(None, description="name of a preset")
    hf: str | None = Field(None, description="folder with a config.json, or such a file")
    build: str | None = Field(None, description="package.module:function that builds the model")

    @model_validator(mode="after")
    def _one(self) -> ModelTable:
        given = [key for key in ("preset", "hf", "build") if getattr(self, key) is not None]
        if len(given) != 1:
            raise ValueError(
                f"give exactly one of preset, hf and build, not {' and '.join(given) or 'none of them'}"
            )
        return self


class TaskTable(_Table):
    """[task]"""

    kind: str = Field("causal-lm", description="causal-lm, or package.module:Task")
    data: str = Field("python-stdlib", description="python-stdlib, a file, a folder or a glob")
    sequence: Count | None = Field(None, description="tokens per sample")


class TrainTable(_Table):
    """[train]"""

    global_batch: Count | None = Field(None, description="samples per optimizer step")
    steps: Count = Field(100, description="optimizer steps in all")
    precision: Literal["fp64", "fp32", "bf16"] | None = Field(None, description="compute precision")
    seed: int = Field(0, ge=0, lt=2**63, description="of parameters and of the order of samples")


class OptimizerTable(_Table):
    """[optimizer]"""

    name: str = Field("adamw", description="adamw")
    learning_rate: float = Field(1e-3, gt=0, lt=float("inf"), description="after warm-up")
    warm_up_steps: int = Field(10, ge=0, description="steps of linear warm-up")
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = Field(
        (0.9, 0.95), description="decay of the two moments"
    )
    weight_decay: float = Field(0.1, ge=0, lt=float("inf"), description="decoupled, on matrices only")


class ClusterTable(_Table):
    """[cluster]"""

    use: str = Field(
        "this-machine", description="this-machine, an expression such as 64xa100-80gb, or a CLUSTER.toml"
    )


class GoalTable(_Table):
    """[goal]"""

    minimise: Literal["time", "cost", "memory"] = Field("time", description="what the planner minimises")
    contract: Literal["exact", "function-preserving", "unbiased", "empirical"] = Field(
        "exact", description="what may be changed for speed"
    )
    deadline_hours: float | None = Field(None, gt=0, lt=float("inf"), description="for all steps together")


class PlanTable(_Table):
    """[plan]: pins for the planner."""

    planner: str | None = Field(None, description="which planner searches")
    schedule: str | None = Field(None, description="order of micro-batches")
    loops: Count | None = Field(None, description="stages per device")
    pp: Count | None = Field(None, description="pipeline-parallel degree")
    dp: Count | None = Field(None, description="data-parallel degree")
    micro_batch_size: Count | None = Field(None, description="samples per micro-batch")


class SyncTable(_Table):
    """[sync]"""

    method: Literal["dense"] = Field("dense", description="how replicas agree")


class CheckpointTable(_Table):
    """[checkpoint]"""

    every: Count = Field(100, description="steps between checkpoints; the last step always has one")
    keep: Count = Field(2, description="how many of the newest are kept")


class RunFile(_Table):
    """A run file; every table but [model] may be left out."""

    model: ModelTable
    task: TaskTable = TaskTable()
    train: TrainTable = TrainTable()
    optimizer: OptimizerTable = OptimizerTable()
    cluster: ClusterTable = ClusterTable()
    goal: GoalTable = GoalTable()
    plan: PlanTable = PlanTable()
    sync: SyncTable = SyncTable()
    checkpoint: CheckpointTable = CheckpointTable()

    def to_toml(self) -> str:
        """The run file with every decided key written out; open keys are left out."""
        lines: list[str] = []
        for table, keys in self.model_dump(mode="json", exclude_none=True).items():
            if keys:
                lines += [f"[{table}]", *(f"{key} = {_toml_value(value)}" for key, value in keys.items()), ""]
        return "\n".join(lines)

    def with_changes(self, changes: Mapping[str, Mapping[str, Any]]) -> RunFile:
        """A copy in which the given keys that are not None are replaced, and everything is checked again."""
        record = self.model_dump(exclude_none=True)
        for table, keys in changes.items():
            record.setdefault(table, {}).update(
                {key: value for key, value in keys.items() if value is not None}
            )
        return parse_run(record)


def parse_run(record: Mapping[str, Any], where: str = "") -> RunFile:
    """A run file from its tables.

    Raises:
        InputError: with every violation.
    """
    return validate(RunFile, record, where)


def load_run(path: Path) -> RunFile:
    """Read a RUN.toml. Relative paths of models, data and clusters are taken relative to the file's folder.

    Raises:
        InputError: when the file cannot be read, is not TOML, or violates the schema.
    """
    run = parse_run(read_toml(path), str(path))
    folder = path.parent
    return run.with_changes(
        {
            "model": {"hf": _beside(folder, run.model.hf)},
            "task": {"data": _beside(folder, run.task.data)},
            "cluster": {"use": _beside(folder, run.cluster.use)},
        }
    )


def _beside(folder: Path, name: str | None) -> str | None:
    """A relative path that exists beside the run file; any other text (a preset, an expression) as it is."""
    if name is None or Path(name).is_absolute():
        return None
    found = any(folder.glob(name)) if "*" in name else (folder / name).exists()
    return str(folder.resolve() / name) if found else None


def _toml_value(value: Any) -> str:
    # JSON's strings, numbers, booleans and arrays are TOML's, too.
    return json.dumps(value, ensure_ascii=False)


def commented_run_file() -> str:
    """A run file for people to edit: required keys given, open keys commented out."""
    lines = [
        "# A run file of weft. A key that is left out is decided by the planner; a given key is pinned.",
        "",
        "[model]",
        '# one of: preset = "...", hf = "folder or config.json"',
        'preset = "gpt-1m"',
        "",
    ]
    for name, field in RunFile.model_fields.items():
        if name == "model":
            continue
        lines.append(f"[{name}]")
        table = field.default
        for key, entry in type(table).model_fields.items():
            value = getattr(table, key)
            written = f"# {key} = ..." if value is None else f"{key} = {_toml_value(value)}"
            lines.append(f"{written}  # {entry.description}")
        lines.append("")
    return "\n".join(lines)
