"""The combinations that exchanges of experts between segments refuse, and their table in a run file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from weft.describe.run_tables.methods import Options, RunTable
from weft.describe.toml_table import Count, TomlTable
from weft.errors import Violation
from weft.methods.expert_exchanges.levels import LEVELS
from weft.methods.expert_exchanges.program import CUTTER, NAME, Way
from weft.moves.cutting import INSIDE
from weft.planning.job_rules import JobRule
from weft.planning.planned_job import PlannedJob


class ExpertExchangesTable(TomlTable):
    """`[expert-exchanges]`."""

    run: Annotated[
        Way,
        Field(
            description="inside: within computations; instructions: between segments of them; interleaved: "
            "beside another micro-batch"
        ),
    ] = "inside"
    ranks_per_node: Annotated[
        Count,
        Field(description="expert ranks of a node that exchange rows first; 1: all exchange at once"),
    ] = 1


LINEAR = "blocks with linear attention are not cut before their experts"


def _of_blocks(planned: PlannedJob) -> Iterator[Violation]:
    model, decoder = planned.problem.model, planned.problem.model.decoder
    if planned.plan.method(NAME) is not None and (decoder is None or decoder.experts is None):
        yield Violation(f"{NAME}.run", f"{model.name} has no experts", f"leave out [{NAME}]")
    elif decoder is not None and decoder.linear is not None and CUTTER.cuts(planned.plan):
        yield Violation(f"{NAME}.run", LINEAR, "inside")


def _options(table: ExpertExchangesTable) -> Options | None:
    asked = {"run": (table.run, INSIDE), "ranks_per_node": (table.ranks_per_node, 1)}
    return {key: value for key, (value, default) in asked.items() if value != default} or None


RULES = (
    *LEVELS,
    JobRule(refuse=_of_blocks),
    RunTable(
        method=NAME,
        table=ExpertExchangesTable,
        options=_options,
    ),
)
