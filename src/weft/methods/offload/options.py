"""The options of offload: the table `[offload]`, and the options of a plan's method.

A plan's options hold stages as text, such as ``0,2``, or true for all stages.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import BeforeValidator, Field

from weft.describe.optimizers import OptimizerWork
from weft.describe.plan import Choice, Recompute
from weft.describe.plan_file import listed
from weft.describe.run_tables.methods import Options, RunTable
from weft.describe.toml_table import TomlTable
from weft.describe.units import shown
from weft.errors import InputError, Violation

NAME = "offload"
STATES, ACTIVATIONS = WORDS = ("states", "activations")
_STAGES = re.compile(r"[0-9]{1,6}(,[0-9]{1,6})*", re.ASCII)

NO_STATES = "the optimizer keeps no states, so that there is nothing to offload"
AGAIN = "a stage that recomputes keeps little, and makes the rest anew"


def _require_stages(given: object) -> object:
    """Check true or false, or a list of stages."""
    if isinstance(given, bool):
        return given
    known = isinstance(given, list | tuple) and all(type(one) is int and 0 <= one < 10**6 for one in given)
    if not known:
        raise InputError(Violation("", f"{shown(given)}: must be true, false or a list of stages", "true"))
    return tuple(given)  # type: ignore[arg-type]  # a list, as checked


_Stages = Annotated[bool | tuple[int, ...], BeforeValidator(_require_stages)]


class OffloadTable(TomlTable):
    """The keys of `[offload]`: true for all stages, or a list of stages."""

    states: _Stages = Field(
        default=False, description="optimizer states are in host memory but for the stage's step"
    )
    activations: _Stages = Field(
        default=False, description="activations are in host memory between forward and backward passes"
    )


def _options(table: OffloadTable) -> Options:
    return options_with({word: getattr(table, word) for word in WORDS})


def options_with(chosen: Mapping[str, bool | Sequence[int]]) -> dict[str, bool | str]:
    """Return a plan's options for stages by word; a word without stages is left out."""
    return {
        word: stages if isinstance(stages, bool) else ",".join(map(str, sorted(set(stages))))
        for word, stages in chosen.items()
        if stages
    }


TABLE = RunTable(method=NAME, table=OffloadTable, options=_options)


@dataclass(frozen=True, slots=True)
class Offloaded:
    """The stages with states, and those with activations, in host memory."""

    states: tuple[int, ...] = ()
    activations: tuple[int, ...] = ()

    @property
    def stages(self) -> Mapping[str, tuple[int, ...]]:
        return {STATES: self.states, ACTIVATIONS: self.activations}


def offloaded(methods: Sequence[Choice], stages: int) -> Offloaded:
    """Return the offloaded stages that the methods of a plan or a job request; mistakes are left out."""
    choice = next((one for one in methods if one.name == NAME), None)
    if choice is None:
        return Offloaded()
    of = {word: _stages_of(choice.options.get(word, False), stages) or () for word in WORDS}
    return Offloaded(**{word: tuple(one for one in of[word] if one < stages) for word in WORDS})


def _stages_of(given: object, stages: int) -> tuple[int, ...] | None:
    """Return the stages of an option; None for a mistake."""
    if isinstance(given, bool):
        return tuple(range(stages)) if given else ()
    if not isinstance(given, str) or not _STAGES.fullmatch(given):
        return None
    return tuple(sorted({int(one) for one in given.split(",")}))


def problems_of(
    methods: Sequence[Choice], recomputes: Sequence[Recompute], optimizer: OptimizerWork
) -> Iterator[Violation]:
    """Yield the problems of the request in `methods`; `recomputes` has the word of each stage."""
    choice = next((one for one in methods if one.name == NAME), None)
    if choice is None:
        return
    stages = len(recomputes)
    for word, given in choice.options.items():
        where = f"{NAME}.{word}"
        if word not in WORDS:
            yield Violation(where, f"{shown(word)} is not one of {', '.join(WORDS)}", STATES)
            continue
        found = _stages_of(given, stages)
        if found is None:
            yield Violation(where, f"{shown(given)} names no stages", "true, or stages such as 0,2")
        elif beyond := [one for one in found if one >= stages]:
            yield Violation(
                where, f"stages {listed(beyond)}: stages 0 to {stages - 1} exist", str(stages - 1)
            )
    of = offloaded(methods, stages)
    if not any(of.stages.values()):
        yield Violation(NAME, "names no stages of states or activations", "states = true")
    if of.states and not optimizer.kept_bytes(1):
        yield Violation(f"{NAME}.{STATES}", NO_STATES, "states = false")
    again = [stage for stage in of.activations if recomputes[stage] != "none"]
    if again:
        problem = f"stages {listed(again)} recompute: {AGAIN}"
        yield Violation(f"{NAME}.{ACTIVATIONS}", problem, "recompute none")
