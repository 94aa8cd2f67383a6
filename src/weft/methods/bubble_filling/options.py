"""The options of bubble filling, and the windows that a plan states."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from weft.describe.plan import Plan
from weft.describe.run_tables.methods import planned_options
from weft.describe.toml_table import Count, TomlTable
from weft.errors import InputError, Violation

NAME, TABLE_NAME = "bubble-filling", "bubble"
# The choice of a plan decides the windows, and a plan states them.
OPEN = "auto"
PlacerName = Literal["official", "weft", "exact"]


class PlacementKeys(TomlTable):
    """The keys that a table and a plan share."""

    placer: PlacerName = Field(default="weft", description="what places work: weft, official or exact")
    margin: Annotated[float, Field(ge=0, le=1)] = Field(
        default=0.05, description="share of its seconds that work leaves free in a bubble"
    )
    most_steps: Count = Field(
        default=16, description="the most steps of a window; work that finds no bubble in them adds to steps"
    )
    place_anew_every: Annotated[int, Field(ge=0)] = Field(
        default=0,
        description="steps after which work is placed anew if measured times leave the margin; 0: never",
    )


class BubbleOptions(PlacementKeys):
    """A plan's options; `work` has its names separated by commas.

    `windows` places work that a window does once, and `steps` that of every step. `measured` has the factors
    of predicted times for which work was placed anew (`drift.py`).
    """

    work: str
    windows: str = OPEN
    steps: str = OPEN
    measured: str = ""

    @property
    def works(self) -> tuple[str, ...]:
        """The names of the work."""
        return tuple(self.work.split(","))


def options_of(plan: Plan) -> BubbleOptions | None:
    """Return the options of a plan that fills bubbles, or None.

    Raises:
        InputError: for unknown, missing or wrong options.
    """
    return planned_options(BubbleOptions, plan, NAME)


# By the name of a work and stage: the computation of the device's step behind which each piece runs.
StepPlaces = Mapping[str, tuple[tuple[int, ...], ...]]
_STEP_WORK = re.compile(r"([\w-]+)= ?((?:-?\d+ ?|; ?)*)", re.ASCII)


def step_places_text(places: StepPlaces) -> str:
    """Return places as a plan's option: by work its name, and by stage numbers of computations."""
    return " | ".join(
        f"{name}= {'; '.join(' '.join(map(str, behind)) for behind in stages)}"
        for name, stages in sorted(places.items())
    )


def read_step_places(text: str, stages: int) -> StepPlaces:
    """Return the places of a plan's option; none if it leaves them open.

    Raises:
        InputError: for a text of another form, or of other stages.
    """
    found: dict[str, tuple[tuple[int, ...], ...]] = {}
    for one in text.split(" | ") if text not in (OPEN, "") else ():
        match = _STEP_WORK.fullmatch(one)
        of_stages = () if match is None else tuple(match[2].split(";"))
        if match is None or len(of_stages) != stages:
            problem = f"{one[:40]!r} does not place a work in {stages} stages, as work= place ...; ..."
            raise InputError(Violation(f"plan: methods: {NAME}: steps", problem, OPEN))
        found[match[1]] = tuple(tuple(map(int, of.split())) for of in of_stages)
    return found


class PieceRun(NamedTuple):
    """Consecutive pieces of one item behind one computation.

    Attributes:
        step: of the window.
        behind: number of the computation in its device's step; -1: the begin of the step.
        item: place in the stage's list of items.
        first, pieces: the first piece, and their number.
    """

    step: int
    behind: int
    item: int
    first: int
    pieces: int


class StageWindow(NamedTuple):
    """The steps of a stage's window, and its work in the order of the device."""

    steps: int
    runs: tuple[PieceRun, ...]


_RUN = r"\d+\.(?:\d+|-1)\.\d+\.\d+\.\d+"
_WINDOW = re.compile(rf"(\d+):((?:{_RUN}(?: {_RUN})*)?)", re.ASCII)


def windows_text(windows: Sequence[StageWindow]) -> str:
    """Return windows as a plan's option: by stage, the steps, and runs of five numbers."""
    return "; ".join(
        f"{one.steps}:{' '.join('.'.join(map(str, run)) for run in one.runs)}" for one in windows
    )


def read_windows(text: str) -> list[StageWindow]:
    """Return the windows of a plan's option, by stage.

    Raises:
        InputError: for a text of another form.
    """
    found = []
    for one in text.split("; "):
        match = _WINDOW.fullmatch(one)
        if match is None or int(match[1]) < 1:
            problem = f"{one[:40]!r} is no window of the form steps:step.behind.item.first.count ..."
            raise InputError(Violation(f"plan: methods: {NAME}: windows", problem, OPEN))
        runs = (PieceRun(*map(int, run.split("."))) for run in match[2].split())
        found.append(StageWindow(int(match[1]), tuple(runs)))
    return found
