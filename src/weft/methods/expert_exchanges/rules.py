"""The combinations that exchanges of experts between segments refuse, and their table in a run file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from weft.describe.run_tables.methods import RunTable
from weft.describe.toml_table import TomlTable
from weft.errors import Violation
from weft.methods.expert_exchanges.program import CUTTER, NAME, Way
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


LINEAR = "blocks with linear attention are not cut before their experts"


def _of_blocks(planned: PlannedJob) -> Iterator[Violation]:
    model, decoder = planned.problem.model, planned.problem.model.decoder
    if planned.plan.method(NAME) is not None and (decoder is None or decoder.experts is None):
        yield Violation(f"{NAME}.run", f"{model.name} has no experts", f"leave out [{NAME}]")
    elif decoder is not None and decoder.linear is not None and CUTTER.cuts(planned.plan):
        yield Violation(f"{NAME}.run", LINEAR, "inside")


RULES = (
    JobRule(refuse=_of_blocks),
    RunTable(
        method=NAME,
        table=ExpertExchangesTable,
        options=lambda table: None if table.run == "inside" else {"run": table.run},
    ),
)
