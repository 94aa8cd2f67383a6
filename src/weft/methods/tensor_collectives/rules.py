"""The combinations that collectives between segments refuse, and their table in a run file."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from weft.describe.job import Job
from weft.describe.layout import Layout
from weft.describe.plan_file import PlanRule
from weft.describe.run_tables.methods import RunTable
from weft.describe.toml_table import TomlTable
from weft.methods.tensor_collectives.program import AGAIN, NAME, TOKENS, Way, problems_of
from weft.moves.composition import Composition


class TensorCollectivesTable(TomlTable):
    """`[tensor-collectives]`."""

    run: Annotated[
        Way,
        Field(
            description="inside: within computations; instructions: between segments of them; overlapped: "
            "beside gradients of weights; interleaved: beside another micro-batch"
        ),
    ] = "inside"


def _applies(job: Job, layout: Layout) -> bool:
    chosen = (one.options.get("run", "inside") != "inside" for one in job.methods if one.name == NAME)
    return any(chosen) and layout.tp > 1


def _tokens(job: Job, layout: Layout) -> str | None:
    return f"{NAME}: {TOKENS}; nearest cp: 1" if _applies(job, layout) and layout.cp > 1 else None


def _again(job: Job, layout: Layout) -> str | None:
    if not _applies(job, layout) or set(layout.recomputes) == {"none"}:
        return None
    return f"{NAME}: {AGAIN}; nearest recompute: none"


def _in_parts(job: Job, layout: Layout) -> str | None:
    if not _applies(job, layout) or layout.schedule not in ("zb-h1", "zb-v"):
        return None
    return f"{NAME}: {layout.schedule} runs backward passes in two parts; nearest schedule: 1f1b"


RULES = (
    Composition(method=NAME, other="context parallelism", reason=TOKENS, refuse=_tokens),
    Composition(method=NAME, other="recomputation", reason=AGAIN, refuse=_again),
    Composition(
        method=NAME,
        other="backward passes in two parts",
        reason="the parts are those of a whole stage, not of its segments",
        refuse=_in_parts,
    ),
    PlanRule(refuse=problems_of),
    RunTable(
        method=NAME,
        table=TensorCollectivesTable,
        options=lambda table: None if table.run == "inside" else {"run": table.run},
    ),
)
