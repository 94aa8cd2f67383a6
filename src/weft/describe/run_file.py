"""RUN.toml: the user's request.

The planner decides a missing key (None here), or the key has the default in its description. A given key is
pinned. Unknown keys are refused with the nearest valid key.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from glob import iglob
from importlib.resources import files
from pathlib import Path
from typing import Any, Self

from pydantic import (
    Field,
    ModelWrapValidatorHandler,
    SerializeAsAny,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic.json_schema import SkipJsonSchema

from weft.describe.models import PRESETS, resolve_model
from weft.describe.one_line import one_line
from weft.describe.reading import holds_json, read_toml, violations_of
from weft.describe.run_tables.methods import run_tables, split_tables
from weft.describe.run_tables.planning import ClusterTable, GoalTable, PlanTable, SyncTable
from weft.describe.run_tables.training import (
    BYTES,
    MODEL,
    CheckpointTable,
    ExecutionTable,
    ModelTable,
    OptimizerTable,
    ReportTable,
    TaskTable,
    TrainTable,
)
from weft.describe.tasks import Data, default_task, sources_of
from weft.describe.toml_table import TomlTable, is_importable, table_text
from weft.describe.units import counted
from weft.errors import InputError, Violation, nearest, nearest_divisor

# What a validation knows besides the tables: the folder of their file.
FOLDER = "folder"
# The file of a run directory that names the run in all its directories, and in its checkpoints' storage.
RUN_ID = "run-id"


class RunFile(TomlTable):
    """A checked RUN.toml."""

    model: ModelTable
    task: TaskTable = TaskTable()
    train: TrainTable = TrainTable()
    run: ExecutionTable = ExecutionTable()
    optimizer: OptimizerTable = OptimizerTable()
    cluster: ClusterTable = ClusterTable()
    goal: GoalTable = GoalTable()
    plan: PlanTable = PlanTable()
    sync: SyncTable = SyncTable()
    checkpoint: CheckpointTable = CheckpointTable()
    report: ReportTable = ReportTable()
    # Tables of methods, by name; in a file they are next to the other tables.
    methods: SkipJsonSchema[dict[str, SerializeAsAny[TomlTable]]] = Field(default_factory=dict)

    @model_validator(mode="wrap")
    @classmethod
    def _tables_of_methods(cls, record: Any, read: ModelWrapValidatorHandler[Self]) -> Self:
        """Take the tables of methods apart; their mistakes are listed behind those of all other tables."""
        if not isinstance(record, Mapping):
            return read(record)
        own, methods, problems = split_tables(record)
        for name in [one for one in own if one not in cls.model_fields]:
            near = nearest(name, [*run_tables(), *cls.model_fields])
            if isinstance(own[name], Mapping) and near in run_tables():
                problems.append(Violation(name, "unknown table", near))
                del own[name]
        try:
            run = read({**own, "methods": methods} if methods else own)
        except ValidationError as error:
            if not problems:
                raise
            raise InputError([*violations_of(error, "", cls), *problems]) from None
        if problems:
            raise InputError(problems)
        return run

    @model_validator(mode="wrap")
    @classmethod
    def _task_of_the_model(
        cls, record: Any, read: ModelWrapValidatorHandler[Self], info: ValidationInfo
    ) -> Self:
        """Fill in the model's own task if the key is missing; it and its data stay unchosen."""
        if not isinstance(record, Mapping):
            return read(record)
        model, task = record.get("model"), record.get("task", {})
        if not isinstance(model, Mapping) or not isinstance(task, Mapping) or "kind" in task:
            return read(record)
        kind = _own_task(model, (info.context or {}).get(FOLDER, Path()))
        if kind is None:
            return read(record)
        run = read({**record, "task": {"kind": kind, **task}})
        run.task.model_fields_set.difference_update({"kind", "data"} - task.keys())
        return run

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

    @model_validator(mode="after")
    def _whole_blocks(self) -> RunFile:
        batch, block = self.train.global_batch, self.task.source_block
        if batch is None and block > 1:
            problem = f"missing; a batch has whole blocks of {block} samples (task.source_block)"
            raise InputError(Violation("train.global_batch", problem, str(block)))
        if batch is not None and batch % block:
            problem = f"{block} samples; a batch of {batch} has no whole number of such blocks"
            raise InputError(Violation("task.source_block", problem, str(nearest_divisor(block, batch))))
        return self

    @model_validator(mode="after")
    def _methods_of_the_task(self) -> RunFile:
        known = run_tables()
        problems = [
            one for name, table in self.methods.items() for one in known[name].task_problems(table, self.task)
        ]
        if problems:
            raise InputError(problems)
        return self

    @property
    def warnings(self) -> tuple[str, ...]:
        """The likely mistakes of a valid run file, one line each."""
        asked, steps = self.optimizer.warm_up_steps, self.train.steps
        # Planned run files state every key, also one that nobody chose.
        if asked <= steps or asked == OptimizerTable.model_fields["warm_up_steps"].default:
            return ()
        reached = "the learning rate never reaches optimizer.learning_rate"
        return (f"optimizer.warm_up_steps is {asked}, and the run has {counted(steps, 'step')}: {reached}",)

    def chose(self, table: str, key: str) -> bool:
        """Return True if somebody gave the key of a table of weft's own; False for a default."""
        return table in self.model_fields_set and key in getattr(self, table).model_fields_set

    def without_defaults(self) -> RunFile:
        """Return the run file in which no key with its default is given."""
        records = {name: table.model_dump(exclude_defaults=True) for name, table in self._tables.items()}
        return parse_run({name: record for name, record in records.items() if record or name in self.methods})

    @property
    def _tables(self) -> Mapping[str, TomlTable]:
        return {
            **{name: getattr(self, name) for name in type(self).model_fields if name != "methods"},
            **self.methods,
        }

    def __repr__(self) -> str:
        model = self.model.preset or self.model.hf or self.model.build
        data = f"{self.task.kind} on {' and '.join(sources_of(self.task.data))}, {self.train.steps} steps"
        return one_line(self, f"{model} on {self.cluster.use}: {data}")

    def to_toml(self) -> str:
        """Write the run file with all defaults; the planner's keys stay absent."""
        records = {name: table.model_dump(exclude_none=True) for name, table in self._tables.items()}
        tables = [table_text(f"[{name}]", record) for name, record in records.items() if record]
        return "\n".join(tables)


def load_run(path: Path | str) -> RunFile:
    """Read and check a RUN.toml.

    Relative paths of model, data and cluster that exist in the file's folder become absolute. So the run is
    the same from every folder. All other text is unchanged.

    Raises:
        InputError: with all mistakes of the file, one line each.
    """
    folder = Path(path).parent.resolve()
    run = parse_run(read_toml(path), str(path), folder)
    tokenizer = run.task.tokenizer
    absolute: Mapping[str, Mapping[str, Any]] = {
        "model": {"hf": _beside(folder, run.model.hf)},
        "task": {
            "data": _data_in(folder, run.task.data),
            "tokenizer": tokenizer if tokenizer in (BYTES, MODEL) else _beside(folder, tokenizer),
        },
        "cluster": {"use": _beside(folder, run.cluster.use)},
    }
    tables = {name: _changed_table(getattr(run, name), keys) for name, keys in absolute.items()}
    return run.model_copy(update={name: table for name, table in tables.items() if table is not None})


def is_run_file(source: str) -> bool:
    """Return True for the path of a RUN.toml, False for a model: a preset, a folder or a `config.json`.

    Raises:
        InputError: for a file of another kind.
    """
    return source.endswith(".toml") or (Path(source).is_file() and not holds_json(source))


def _own_task(model: Mapping[str, Any], folder: Path) -> str | None:
    """Return the task of the preset or of the folder that `[model]` names; None where it names neither."""
    preset, hf = str(model.get("preset")), model.get("hf")
    if preset in PRESETS:
        return default_task(PRESETS[preset])
    if not isinstance(hf, str):
        return None
    try:
        return default_task(resolve_model(_beside(folder, hf) or hf))
    except InputError:
        return None  # whoever needs the model says so


def _changed_table(table: TomlTable, keys: Mapping[str, Any]) -> TomlTable | None:
    """Return the table with other values of some keys; None if it has them already."""
    update = {key: value for key, value in keys.items() if value != getattr(table, key)}
    return table.model_copy(update=update) if update else None


def parse_run(record: Mapping[str, Any], where: str = "run", folder: Path = Path()) -> RunFile:
    """Check the tables of a run file; `where` names it in messages, `folder` may have its model.

    Raises:
        InputError: with all mistakes of the tables, one line each.
    """
    try:
        return RunFile.model_validate(dict(record), context={FOLDER: folder})
    except ValidationError as error:
        raise InputError(violations_of(error, where, RunFile)) from None


def _data_in(folder: Path, data: Data) -> Data:
    if isinstance(data, str):
        return _data_beside(folder, data)
    return {_data_beside(folder, source): weight for source, weight in data.items()}


def _data_beside(folder: Path, data: str) -> str:
    """Return `data` with its path in `folder` if the path exists.

    It also knows `hf:PATH@SPLIT#COLUMN`, and NAME of NAME.idx.
    """
    if _beside(folder, f"{data}.idx") != f"{data}.idx":
        return str(folder / data)
    prefix, text = ("hf:", data[3:]) if data.startswith("hf:") else ("", data)
    path = re.split("[#@:]", text, maxsplit=1)[0]
    for name in (text, path):
        if name and (found := _beside(folder, name)) != name:
            return f"{prefix}{found}{text[len(name) :]}"
    return data


def _beside(folder: Path, name: str | None) -> str | None:
    """Return the path of `name` in `folder` if this path or pattern exists there, else `name` itself."""
    if name is None or Path(name).is_absolute() or not any(iglob(name, root_dir=folder)):
        return name
    return str(folder / name)


def commented_run_file() -> str:
    """Return the text of a valid RUN.toml with comments on its other keys."""
    return files("weft.describe").joinpath("commented_run.toml").read_text(encoding="utf-8")


def changed(run: RunFile, changes: Mapping[str, Mapping[str, Any]]) -> RunFile:
    """Return a copy with the given keys replaced, except for None, and check it again.

    Raises:
        InputError: when the changed run file is refused.
    """
    record = run.model_dump(exclude_none=True, exclude_unset=True)
    for table, keys in changes.items():
        given = {key: value for key, value in keys.items() if value is not None}
        if given:
            record[table] = {**record.get(table, {}), **given}
    return parse_run(record)


def naming(run: RunFile, *, model: str | None = None, on: str | None = None) -> RunFile:
    """Return a run file with another model and another cluster, by their names; None keeps one.

    Raises:
        InputError: when the changed run file is refused.
    """
    record = run.model_dump(exclude_none=True, exclude_unset=True)
    if model is not None:
        kept = {key: value for key, value in record["model"].items() if key not in ModelTable.NAMES}
        record["model"] = {_model_key(model): _beside(Path.cwd(), model), **kept}
    if on is not None:
        record["cluster"] = {"use": _beside(Path.cwd(), on)}
    return parse_run(record)


def run_of_keywords(
    *,
    model: str | None,
    on: str,
    global_batch: int | None,
    sequence: int | None,
    precision: str | None,
    pins: Mapping[str, Any],
) -> RunFile:
    """Return the run file of these keywords, with defaults for all other keys.

    Raises:
        InputError: with all mistakes in the keywords.
    """
    tables: dict[str, dict[str, Any]] = {
        "model": {_model_key(model): model},
        "task": {"sequence": sequence},
        "train": {"global_batch": global_batch, "precision": precision},
        "cluster": {"use": on},
        "plan": dict(pins),
    }
    given = {
        table: {key: value for key, value in keys.items() if value is not None}
        for table, keys in tables.items()
    }
    return parse_run({table: keys for table, keys in given.items() if keys})


def asked_run(
    source: str | None,
    *,
    model: str | None = None,
    on: str | None = None,
    global_batch: int | None = None,
    sequence: int | None = None,
    precision: str | None = None,
    pins: Mapping[str, Any],
) -> RunFile:
    """Return the run of a model, or of the RUN.toml at `source`; the other arguments replace its keys.

    Raises:
        InputError: with all mistakes of the file or of the arguments.
    """
    if source is not None and (own := Path(source, "run.toml")).is_file():
        raise InputError(Violation(source, "a run directory; its run file is planned", str(own)))
    if source is None or not is_run_file(source):
        if source is not None and model is not None:
            raise InputError(Violation("model", f"{model}; the source is a model, too", source))
        return run_of_keywords(
            model=source if model is None else model,
            on=on or "this-machine",
            global_batch=global_batch,
            sequence=sequence,
            precision=precision,
            pins=pins,
        )
    changes: dict[str, Mapping[str, Any]] = {
        # Nodes that the file leaves out are of its own cluster.
        "cluster": {"use": on, "without": None if on is None else []},
        "train": {"global_batch": global_batch, "precision": precision},
        "task": {"sequence": sequence},
        "plan": pins,
    }
    return changed(naming(load_run(Path(source)), model=model), changes)


def _model_key(model: str | None) -> str:
    """Return the key of the run file's [model] table for a name."""
    if model is not None and Path(model).exists():
        return "hf"
    return "build" if model is not None and is_importable(model) else "preset"
