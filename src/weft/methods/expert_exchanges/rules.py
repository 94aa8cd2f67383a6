"""The combinations that exchanges of experts between segments refuse, and their table in a run file."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from weft.describe.plan_file import PlanRule
from weft.describe.run_tables.methods import RunTable
from weft.describe.toml_table import TomlTable
from weft.methods.expert_exchanges.program import CUTTER, NAME, Way


class ExpertExchangesTable(TomlTable):
    """`[expert-exchanges]`."""

    run: Annotated[
        Way,
        Field(
            description="inside: within computations; instructions: between segments of them; interleaved: "
            "beside another micro-batch"
        ),
    ] = "inside"


RULES = (
    *CUTTER.compositions,
    PlanRule(refuse=CUTTER.problems_of),
    RunTable(
        method=NAME,
        table=ExpertExchangesTable,
        options=lambda table: None if table.run == "inside" else {"run": table.run},
    ),
)
