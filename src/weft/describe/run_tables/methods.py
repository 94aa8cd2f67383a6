"""Tables of a RUN.toml that request a method; methods contribute them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import ValidationError

from weft.bundles import parts
from weft.describe.contract import Contract
from weft.describe.layer_graph import LayerGraph
from weft.describe.model import ModelConfig
from weft.describe.plan import Choice, LayerChoice, Plan
from weft.describe.reading import violations_of
from weft.describe.run_tables.training import TaskTable
from weft.describe.toml_table import TomlTable
from weft.describe.units import shown
from weft.errors import InputError, Violation, nearest

Options = Mapping[str, int | float | str | bool]
Table = TypeVar("Table", bound=TomlTable)


@dataclass(frozen=True, kw_only=True)
class RunTable:
    """A table of the run file with the name of its method.

    Attributes:
        method: the method's name.
        key: the table's name in the file; the method's if absent.
        table: the table's keys.
        options: returns a plan's options of the method for a given table; None: no request.
        model_options: returns further options, which follow from the model.
        choices: returns the table's choices for the layers of a model.
        task_problems: yields why the table does not go with the run's task.
        contract: returns the properties of the training that the method preserves with a given table.
        scales: the method may run beside losses with a factor, as in fp16.
    """

    method: str
    key: str | None = None
    table: type[TomlTable]
    options: Callable[[Any], Options | None] = lambda table: None
    model_options: Callable[[Any, ModelConfig], Options] = lambda table, model: {}
    choices: Callable[[Any, LayerGraph], tuple[LayerChoice, ...]] = lambda *_: ()
    task_problems: Callable[[Any, TaskTable], Iterable[Violation]] = lambda *_: ()
    contract: Callable[[Any], Contract] = lambda table: Contract.EXACT
    scales: bool = True


def run_tables() -> Mapping[str, RunTable]:
    """Return the tables of all methods by their names in the file."""
    return {one.key or one.method: one for one in parts(RunTable)}


def requested_methods(tables: Mapping[str, TomlTable], model: ModelConfig) -> tuple[Choice, ...]:
    """Return the methods that checked tables of methods request for a model, each with its options.

    Raises:
        InputError: when a method cannot treat the model.
    """
    known = run_tables()
    found = []
    for name, table in tables.items():
        options = known[name].options(table)
        if options is not None:
            further = known[name].model_options(table, model)
            found.append(Choice(name=known[name].method, options={**options, **further}))
    return tuple(found)


def checked_options(table: type[Table], choice: Choice, where: str) -> Table:
    """Return the options of a method that a plan or a job chose.

    Args:
        table: the options that the method has.
        where: the place that a message names.

    Raises:
        InputError: for unknown, missing or wrong options.
    """
    try:
        return table.model_validate(dict(choice.options))
    except ValidationError as error:
        raise InputError(violations_of(error, where, table)) from None


def planned_options(table: type[Table], plan: Plan, method: str) -> Table | None:
    """Return a plan's options of a method, or None without the method.

    Raises:
        InputError: as `checked_options` does.
    """
    choice = plan.method(method)
    return None if choice is None else checked_options(table, choice, f"plan: methods: {method}")


def split_tables(
    record: Mapping[str, Any],
) -> tuple[dict[str, Any], dict[str, TomlTable], list[Violation]]:
    """Split the tables of a run file into weft's own and the checked tables of methods.

    Also return all mistakes in the tables of methods, which are then missing.
    """
    known = run_tables()
    tables: dict[str, TomlTable] = {}
    problems: list[Violation] = []
    listed = record.get("methods", {})
    if not isinstance(listed, Mapping):
        problems.append(Violation("methods", f"{shown(listed)}: must be a table"))
        listed = {}
    given = {**listed, **{name: record[name] for name in record if name in known}}
    for name, table in given.items():
        if name not in known:
            problem = f"no method has a table of this name; known are {', '.join(sorted(known))}"
            problems.append(Violation(f"methods.{name}", problem, nearest(name, known)))
            continue
        try:
            own = dict(table) if isinstance(table, Mapping) else table
            tables[name] = known[name].table.model_validate(own)
        except ValidationError as error:
            problems += violations_of(error, name, known[name].table)
    others = {name: value for name, value in record.items() if name not in (*known, "methods")}
    return others, tables, problems
