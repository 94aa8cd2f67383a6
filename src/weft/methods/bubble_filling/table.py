"""The table `[bubble]` of a run file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from weft.bundles import parts
from weft.describe.contract import Contract
from weft.describe.run_tables.methods import Options, RunTable
from weft.describe.run_tables.training import TaskTable
from weft.describe.toml_table import TOML_ARRAY
from weft.errors import Violation, nearest
from weft.methods.bubble_filling.options import NAME, TABLE_NAME, PlacementKeys
from weft.methods.bubble_filling.step_works import StepWork
from weft.methods.bubble_filling.works import BubbleWork


class BubbleTable(PlacementKeys):
    """The keys of `[bubble]`."""

    work: Annotated[tuple[str, ...], TOML_ARRAY] = Field(
        min_length=1, description="the work that fills bubbles: kfac, evaluate, snapshot"
    )


def unknown_work(name: str) -> Violation | None:
    """Return the violation of a name that no work has."""
    known = sorted(one.method for one in (*parts(BubbleWork), *parts(StepWork)))
    if name in known:
        return None
    problem = f"{name!r} is not one of {', '.join(known)}"
    return Violation(f"{TABLE_NAME}.work", problem, nearest(name, known))


def _unknown(table: BubbleTable, task: TaskTable) -> Iterator[Violation]:
    yield from (found for name in table.work if (found := unknown_work(name)) is not None)


def _options(table: BubbleTable) -> Options:
    found = {**table.model_dump(), "work": ",".join(sorted(set(table.work)))}
    # Plans without it keep the ids of earlier versions.
    if not table.place_anew_every:
        del found["place_anew_every"]
    return found


# The steps after which work takes effect follow from the plan.
TABLE = RunTable(
    method=NAME,
    key=TABLE_NAME,
    table=BubbleTable,
    contract=lambda table: Contract.EMPIRICAL,
    options=_options,
    task_problems=_unknown,
)
