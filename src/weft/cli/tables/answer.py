"""The answer of `weft plan` on one screen: the best plan in words and figures, and three alternatives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from rich.console import Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from weft.cli.output import ranked_table
from weft.cli.tables.candidates import candidate_record
from weft.cli.tables.plan import chance_text, idle_text, job_text, throughput_text
from weft.cli.tables.search import kept_out_record
from weft.describe.layout_text import counts_text
from weft.describe.layout_words import layout_words
from weft.describe.run_file import is_run_file
from weft.describe.this_machine import THIS_MACHINE
from weft.describe.units import counted, format_bytes, format_seconds
from weft.moves.layout import shares_of
from weft.moves.layout_of_plan import usual_layout_of
from weft.planning.alternatives import Alternative
from weft.planning.decisions import decided_words
from weft.planning.fewer_nodes import FewerNodes
from weft.planning.goals import cost_words, unpriced
from weft.planning.planned_job import PlannedJob
from weft.planning.throughput import doubt
from weft.planning.ties import standing
from weft.web.rows.plan import equal_ranks

ALTERNATIVES = 3


def plain_words(planned: PlannedJob) -> str:
    """Return the best plan of a search in words that users of other programs know."""
    best, plan = planned.searched.fitting[0], planned.plan
    if best.layout is not None:
        return layout_words(best.layout, shares_of(planned.problem.job, best.layout))
    if not plan.degree_words:
        return best.words
    # Tensor degrees are all that makes it no layout.
    layout = replace(
        usual_layout_of(plan), tp=1, layers_per_stage=tuple(len(stage.layers) for stage in plan.stages)
    ).recomputing([stage.recompute for stage in plan.stages])
    words = layout_words(layout, [copy.micro_batches for copy in plan.stages[0].replicas])
    if plan.has_like_replicas:
        return f"tp {counts_text(plan.tensor_degrees)} by stage, {words}"
    cluster, first = planned.problem.job.cluster, plan.stages[0].replicas
    names = (cluster.device_of(copy.ranks[0]).name for copy in first)
    alike = Counter(zip(plan.replica_degrees[0], names, strict=True)).items()
    of_each = (f"tp {degree} in {counted(count, 'replica')} on {name}" for (degree, name), count in alike)
    return f"{', '.join(of_each)}, {words}"


def alternative_record(one: Alternative) -> dict[str, Any]:
    """Return an alternative as plain figures, with its decisions that differ from the best plan's."""
    return {
        "changed": one.changed,
        "slower_by": one.slower_by,
        "reason": one.reason,
        **candidate_record(one.candidate),
    }


def answer(
    planned: PlannedJob, others: Sequence[Alternative], fewer: FewerNodes | None, source: str
) -> Group:
    """Return the best plan of a search with its figures, the alternatives, and what is assumed.

    `fewer` is a better plan without some nodes. `source` is what the user has given to `weft plan`.
    """
    return Group(
        job_text(planned.problem),
        _grid(_best(planned, fewer)),
        *([Padding(alternatives_table(others), (1, 0))] if others else [""]),
        _grid([*_taken_for_granted(planned), ("next", Text(_next(planned, source)))]),
    )


def _next(planned: PlannedJob, source: str) -> str:
    """Return the commands that a user of the answer needs."""
    ranking = planned.searched
    here = planned.run.cluster.use == THIS_MACHINE and is_run_file(source)
    trained = f"weft train {source}; " if here else ""
    return (
        f"{trained}--out plan.json (`weft train plan.json` runs it); --emit megatron, torchtitan, "
        f"deepspeed, ...; --all: the best of {len(ranking.candidates)} layouts, {len(ranking.fitting)} "
        "simulated and fitting"
    )


def _grid(rows: Iterable[tuple[str, Text]]) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True, min_width=len("assumed"))
    grid.add_column(overflow="fold")
    for row in rows:
        grid.add_row(*row)
    return grid


def _best(planned: PlannedJob, fewer: FewerNodes | None) -> Iterator[tuple[str, Text]]:
    """Yield the name and the text of each figure of the best plan."""
    problem, prediction = planned.problem, planned.prediction
    best = planned.searched.fitting[0]
    yield "best", Text(plain_words(planned), style="bold")
    yield "layout", Text(best.words)
    if not problem.job.graph.is_chain:
        yield "stages", Text(best.reason)
    step = f"{format_seconds(prediction.step_s)}, 90 % interval {prediction.interval}"
    rule = standing(planned.searched, best).text
    yield "step", Text("; ".join([step, *([rule] if rule else []), f"times from {prediction.source}"]))
    yield "speed", Text(throughput_text(planned))
    if (warning := doubt(problem.job.cluster, planned.plan.precision, planned.throughput)) is not None:
        yield "", Text(warning, style="yellow")
    every = equal_ranks(prediction.peak_bytes, planned.memory_bytes)
    fullest, largest = max(every, key=lambda one: one.share), max(every, key=lambda one: one.peak_bytes)
    # On unlike devices others may hold more; alternatives are compared by the most that a rank holds.
    told = [fullest, *([largest] if largest.peak_bytes > fullest.peak_bytes else [])]
    held = ", ".join(f"{one.name}: {one.words}" for one in told)
    yield "memory", Text(f"{held}; {chance_text(planned)}")
    for words in decided_words(planned):
        yield "decided", Text(words)
    if idle := idle_text(planned):
        yield "idle", Text(idle, style="yellow")
    if fewer is not None:
        yield "nodes", Text(fewer.words, style="yellow")
    price, of_all = (
        cost_words(problem, prediction.step_s, ranks)
        for ranks in (planned.plan.ranks, problem.job.cluster.ranks)
    )
    if price is not None:
        yield "cost", Text(price if price == of_all else f"{price}, of the nodes in use alone")
    elif missing := unpriced(problem.job.cluster):
        yield "cost", Text(f"unknown: [device.{missing}] has no price_per_hour, others have", style="yellow")


def alternatives_table(others: Sequence[Alternative]) -> Table:
    """Return a row for each alternative, with its step and memory against the best plan's."""
    table = ranked_table(("instead", "step", "", "peak"), "against the best")
    table.columns[0].justify, table.columns[0].no_wrap = "left", False
    for one in others:
        candidate = one.candidate
        figures = (
            format_seconds(candidate.step_s),
            f"{one.slower_by:+.1%}",
            format_bytes(candidate.peak_bytes),
        )
        table.add_row(one.changed, *figures, Text(one.reason, style="dim"))
    return table


def _taken_for_granted(planned: PlannedJob) -> Iterator[tuple[str, Text]]:
    """Yield what is assumed, and what the contract of the goal keeps out of the search."""
    problem, step_s = planned.problem, planned.prediction.step_s
    notes = {
        key: f" (at half of it {half_s / step_s - 1.0:+.1%})" for key, half_s in planned.steps_at_half.items()
    }
    assumed = [
        f"{key.replace('_', ' ')}: {text}{notes.get(key, '')}" for key, text in problem.assumed.items()
    ]
    if assumed:
        yield "assumed", Text("; ".join(assumed), style="dim")
    if moves := kept_out_record(problem):
        names = ", ".join(f"{move} ({contract})" for move, contract in moves.items())
        yield "not", Text(f"within the contract {problem.contract.word}: {names}", style="dim")
