"""`Configuration`: the contents of another stack's file on a run, in weft's words."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from weft.describe.layout import OPEN, PartialLayout
from weft.describe.model import ModelConfig
from weft.describe.optimizers import ADAMW, OptimizerWork
from weft.describe.plan import Buffers, Launch, Stack
from weft.describe.units import shown
from weft.doors.keys import Names
from weft.doors.stage_splits import StageSplit
from weft.errors import InputError, Violation

# More entries than any configuration has; nested aliases of YAML can stand for any number.
_MOST_ENTRIES = 20_000
# The limit of weft's own run files: products of a few counts stay 64-bit integers.
LARGEST_COUNT = 10**9
# A value that Hugging Face's integration replaces with the program's own arguments.
AUTO = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class StatedMemory:
    """The stack whose states and buffers a run has, and the sizes of its buffers; None: the stack's own."""

    stack: Stack = "weft"
    buffers: Buffers | None = None


LIKE_WEFT = StatedMemory()


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """A run as a file describes it; None where the file does not say.

    Attributes:
        stack: the stack of the file, by the name that `weft explain` prints.
        given: the file's values, by dotted key as the file spells it.
        keys: the file's key of each value, by the name it has here or in the layout.
        layout: decisions of the layout; `options` are those of its schedule.
        devices: ranks of the job.
        micro_batches: per step and replica. `global_batch`: samples per step.
        reduce_precision: of sums over replicas; None where it is that of weft.
        launch: the way in which hosts launch kernels, as in `Plan`.
        model: sizes, or the name of a preset or of a model elsewhere.
        optimizer: its states and traffic.
        tables: those of a run file that ask for the same methods.
        unpredicted: requests of the file that weft does not predict, one line each.
        incomparable: those that change time or memory so much that weft's figures are of another job.
        memory: the stack whose states and buffers the run has.
        supposed: values that other programs put in place of `auto`, by their name here.
        inside_nodes: replicas share states in each node of the cluster alone.
        split: the layers of a pipeline's stages; None: weft balances them, as the stack's rule is not known.
    """

    stack: str
    given: Mapping[str, Any] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)
    layout: PartialLayout = OPEN
    options: Mapping[str, int] = field(default_factory=dict)
    devices: int | None = None
    micro_batches: int | None = None
    global_batch: int | None = None
    sequence: int | None = None
    precision: str | None = None
    reduce_precision: str | None = None
    clips: bool = False
    launch: Launch = "eager"
    model: ModelConfig | str | None = None
    optimizer: OptimizerWork = ADAMW
    tables: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    unpredicted: tuple[str, ...] = ()
    incomparable: tuple[str, ...] = ()
    memory: StatedMemory = LIKE_WEFT
    supposed: Mapping[str, int] = field(default_factory=dict)
    inside_nodes: bool = False
    split: StageSplit | None = None

    def saying(self, values: Mapping[str, Any]) -> Configuration:
        """Return the configuration with these values, each of its layout or its own, by name."""
        decided = {name: value for name, value in values.items() if name in PartialLayout.model_fields}
        others = {name: value for name, value in values.items() if name not in decided}
        return replace(self, layout=self.layout.model_copy(update=decided), **others)

    @property
    def replicas(self) -> int | None:
        """The data-parallel degree: given, or from devices or batch sizes; None where it is open."""
        if self.layout.dp is not None:
            return self.layout.dp
        if self.devices is not None:
            whole, rest = divmod(self.devices, self.layout.replica_ranks)
            return whole if whole and not rest else None
        if None in (self.global_batch, self.layout.micro_batch_size, self.micro_batches):
            return None
        assert self.global_batch is not None
        whole, rest = divmod(
            self.global_batch, (self.layout.micro_batch_size or 1) * (self.micro_batches or 1)
        )
        return whole if whole and not rest else None

    @property
    def ranks(self) -> int | None:
        """Ranks of the job: given, or the product of the degrees."""
        if self.devices is not None:
            return self.devices
        return None if self.replicas is None else self.replicas * self.layout.replica_ranks

    @property
    def samples_per_round(self) -> int | None:
        """The samples of one micro-batch of every replica; None where they are open."""
        size, replicas = self.layout.micro_batch_size, self.replicas
        return None if size is None or replicas is None else size * replicas

    @property
    def samples_per_step(self) -> int | None:
        """The global batch: given, or the product of its parts."""
        if self.global_batch is not None or self.samples_per_round is None or self.micro_batches is None:
            return self.global_batch
        return self.samples_per_round * self.micro_batches

    def key(self, name: str) -> str:
        """Return the file's key of a value, or its own name."""
        return self.keys.get(name, name)


def counts(given: Mapping[str, Any], table: Names, file: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Return attributes that are integer counts, and their keys.

    `auto` and null do not count as given. Neither does -1, which stands for the remaining ranks.

    Raises:
        InputError: with every key without a count as its value.
    """
    values: dict[str, Any] = {}
    found: dict[str, str] = {}
    problems = []
    for attribute, keys in table.items():
        for key in keys:
            value = whole(given.get(key))
            if value is None or value in (AUTO, -1):
                continue
            if isinstance(value, str) and "$" in value:
                problem = f"{shown(value)} is set outside this file; put the number in its place"
                problems.append(Violation(f"{file}: {key}", problem, "1"))
            elif isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= LARGEST_COUNT:
                large = isinstance(value, int) and value > 1
                bound, near = ("most", LARGEST_COUNT) if large else ("least", 1)
                problem = f"{shown(value)}: a count of at {bound} {near}"
                problems.append(Violation(f"{file}: {key}", problem, str(near)))
            else:
                values[attribute], found[attribute] = value, key
            break
    if problems:
        raise InputError(problems)
    return values, found


def whole(value: Any) -> Any:
    """Return a number written as text or as 8e0 as an integer; return everything else unchanged."""
    if isinstance(value, str) and value.strip().lstrip("-").isdecimal():
        return int(value) if len(value) < 19 else value
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return int(value)
    return value


def flat(record: Mapping[Any, Any], file: str = "") -> dict[str, Any]:
    """Return nested tables as one with dotted keys; lists stay values.

    Raises:
        InputError: when there are more entries than any configuration has.
    """
    found: dict[str, Any] = {}
    for key, value in _entries(record, ""):
        found[key] = value
        if len(found) > _MOST_ENTRIES:
            raise InputError(Violation(file, f"more than {_MOST_ENTRIES} entries; not a configuration"))
    return found


def _entries(record: Mapping[Any, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in record.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            # The table itself is an entry, so an empty one is seen too.
            yield name, {}
            yield from _entries(value, f"{name}.")
        else:
            yield name, value


def truth(value: Any) -> bool:
    """Return True if an option is on; files write it as true, "true", "yes" or 1."""
    return value is True or value == 1 or (isinstance(value, str) and value.lower() in ("true", "yes", "1"))


_KINDS = {".toml": "TOML", ".yaml": "YAML", ".yml": "YAML"}
_LOADERS: Mapping[str, Callable[[str], Any]] = {
    "JSON": json.loads,
    "TOML": tomllib.loads,
    "YAML": yaml.safe_load,
}
# Configurations are small; longer texts are traces or data.
_MOST_CHARACTERS = 2_000_000


def json_mapping(text: str) -> Mapping[str, Any] | None:
    """Return the object of a JSON text."""
    if len(text) > _MOST_CHARACTERS or not text.lstrip().startswith("{"):
        return None
    try:
        return _mapping(json.loads(text))
    except (ValueError, RecursionError):
        return None


def toml_mapping(text: str) -> Mapping[str, Any] | None:
    """Return the tables of a TOML text."""
    if len(text) > _MOST_CHARACTERS:
        return None
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError):
        return None


def yaml_mapping(text: str) -> Mapping[str, Any] | None:
    """Return the mapping of a YAML text that is not JSON."""
    if len(text) > _MOST_CHARACTERS or text.lstrip().startswith("{"):
        return None
    try:
        return _mapping(yaml.safe_load(text))
    except (yaml.YAMLError, ValueError, RecursionError):
        return None


def named_file(name: object, file: str) -> Path | None:
    """Return the path of a file that the file `file` names: from its own folder, or from one above it.

    Programs take such names from the folder in which they start, which is often the root of a project.
    """
    folders = Path(file).resolve().parents
    return next((folder / str(name) for folder in folders if (folder / str(name)).is_file()), None)


def broken(text: str, name: str) -> str | None:
    """Return the error of an invalid text that begins like JSON or is named TOML or YAML; else None."""
    kind = "JSON" if text.lstrip().startswith("{") else _KINDS.get(Path(name).suffix.lower())
    if len(text) > _MOST_CHARACTERS or kind is None:
        return None
    try:
        _LOADERS[kind](text)
    except json.JSONDecodeError as error:
        return f"not valid JSON: line {error.lineno}, column {error.colno}: {error.msg}"
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark is not None else ""
        return f"not valid YAML: {place}{error.problem}"
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        return f"not valid {kind}: {error}" if kind == "TOML" else f"not valid {kind}"
    return None


def _mapping(value: Any) -> Mapping[str, Any] | None:
    return value if isinstance(value, Mapping) else None
