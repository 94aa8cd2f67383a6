"""The report's section about the loads of experts: a step's tokens of each expert, by layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np

from weft.describe.units import format_bytes, format_seconds
from weft.methods.expert_balance.imbalance import step_with
from weft.methods.expert_balance.options import options_of
from weft.methods.expert_balance.program import mixtures
from weft.planning.planned_job import PlannedJob
from weft.planning.report_sections import BySource, ChartLine, ReportSection, Rows, SectionChart
from weft.program.arrays import Floats

LOADS = "expert_loads"
# Means over layers: the balance loss of all tokens of a step; the most tokens of an expert over their mean,
# less one; and the standard deviation of tokens of experts over their mean.
FIGURES = ("balance_loss", "expert_violation", "expert_variation")
# Where ranks divide experts: tokens of the busiest rank over the mean, as the experts are placed in the step.
RANK_LOAD = "busiest_expert_rank"
# With a capacity, the share of choices that tokens lose because their expert is full.
DROPPED = "dropped_choices"
# The event of experts that have moved to other ranks.
MOVED = "experts moved"
# What evaluations see, by layer: `rates`, the share of tokens that choose each expert, and `chosen_scores`,
# the mean sum of a token's scores of the experts that it chooses. `slack` is the mean balance loss of samples
# less that of all tokens.
CHOSEN = "experts"
# Layers that the section shows one by one.
_SHOWN = 8
# Of the last steps, over which the section adds up tokens.
_LAST = 0.1

Metrics = Sequence[Mapping[str, Any]]


def _rows(planned: PlannedJob, metrics: Metrics) -> Rows:
    table, told = options_of(planned.plan), [row for row in metrics if LOADS in row]
    if table is None or not told:
        return []
    first, last, late = told[0], told[-1], told[-max(1, round(_LAST * len(told))) :]
    return [
        ("counted over", table.balance),
        *(
            (name, f"{first[key]:.4g} in step {first['step']}, {last[key]:.4g} in step {last['step']}")
            for name, key in zip(("balance loss", "violation", "variation"), FIGURES, strict=True)
        ),
        *_dropped(late),
        *_ranks(planned, late),
        *_layers(planned, late),
    ]


def _dropped(late: Metrics) -> Iterator[tuple[str, str]]:
    if told := [row[DROPPED] for row in late if DROPPED in row]:
        yield "choices beyond the capacity", f"{np.mean(told):.2%} lose their expert"


def _ranks(planned: PlannedJob, late: Metrics) -> Iterator[tuple[str, str]]:
    """Yield the tokens of the busiest expert rank over the mean, and the time for which the others wait."""
    ranks, told = planned.plan.ep, [row[RANK_LOAD] for row in late if RANK_LOAD in row]
    if ranks == 1 or not told:
        return
    busiest = float(np.mean(told))
    yield "tokens of the busiest expert rank", f"{busiest:.2f} times the mean of {ranks} ranks"
    places = mixtures(planned.problem.job.graph)
    equal_s, step_s = (step_with(planned, dict.fromkeys(places, one)) for one in (1.0, busiest))
    share = (step_s - equal_s) / step_s
    text = f"{format_seconds(step_s - equal_s)}, {share:.1%} of a step of {format_seconds(step_s)}"
    yield "unequal expert ranks, predicted", text


def _moves(events: Sequence[Mapping[str, Any]]) -> Rows:
    """Return the moves of experts to other ranks, with what was predicted of them and how long they took."""
    return [
        (
            f"experts moved after step {one['step']}",
            f"{2 * one['swaps']} in {one['layers']} layers, {format_bytes(one['moved_bytes'])} in "
            f"{format_seconds(one['took_s'])} (predicted {format_seconds(one['move_s'])}); busiest rank "
            f"{one['busiest']:.2f} to {one['busiest_after']:.2f}; a step shorter by "
            f"{format_seconds(one['saved_s'])} (predicted)",
        )
        for one in events
        if one["event"] == MOVED
    ]


def _layers(planned: PlannedJob, late: Metrics) -> Iterator[tuple[str, str]]:
    """Yield the layers with the most unequal experts of the last steps."""
    graph = planned.problem.job.graph
    places = mixtures(graph)
    tokens = np.sum([row[LOADS] for row in late], axis=0).reshape(len(places), -1)
    loads: Floats = tokens / np.maximum(tokens.mean(axis=1, keepdims=True), 1.0)
    for index in np.argsort(-loads.max(axis=1), kind="stable")[:_SHOWN].tolist():
        own = loads[index]
        most, least = int(own.argmax()), int(own.argmin())
        text = f"expert {most} has {own[most]:.2f} times the mean, expert {least} {own[least]:.2f} times"
        yield f"{graph.layers[places[index]].name}, last {len(late)} steps", text


def _by_source(planned: PlannedJob, sources: BySource) -> Rows:
    """Return the specialisation of experts: of each source its own, and of each pair what they share."""
    chosen = {name: one[CHOSEN] for name, one in sources.items() if CHOSEN in one}
    if not chosen:
        return []
    experts = planned.problem.model.architecture.experts
    assert experts is not None, "only models with experts show whom they choose"
    uniform = experts.active / experts.count
    # Twice as often as by chance, or halfway to always where chance is high.
    often = min(2 * uniform, (1 + uniform) / 2)
    # (sources, layers, experts)
    rates: Floats = np.array([[one["rates"] for one in layers] for layers in chosen.values()])
    frequent = dict(zip(chosen, rates >= often, strict=True))
    rows = [
        (
            f"experts of {name}",
            f"{frequent[name].sum(axis=1).mean():.1f} of {experts.count} chosen by at least {often:.1%} of "
            f"tokens, by chance {uniform:.1%}; scores of the chosen "
            f"{np.mean([one['chosen_scores'] for one in layers]):.3f}",
        )
        for name, layers in chosen.items()
    ]
    for first, second in combinations(chosen, 2):
        either = (frequent[first] | frequent[second]).sum()
        both = (frequent[first] & frequent[second]).sum()
        text = f"{both / either:.1%} of those of either" if either else "none of either"
        rows.append((f"experts of {first} and {second}", text))
    rows += _slack(chosen)
    spread = f"{rates.std(axis=0).mean():.3f} standard deviation, mean of all experts"
    return [
        *rows,
        ("share of tokens for an expert, by source", spread),
        *_favourites(planned, list(chosen), rates),
    ]


def _slack(chosen: Mapping[str, Sequence[Mapping[str, Any]]]) -> Rows:
    """Return what a balance of samples would take from the experts: of each source, and between sources.

    Shares and scores of an expert that rise together make the mean loss of samples larger than that of all.
    Between sources, it is the mean loss of sources less that of all, each source with equal weight.
    """
    if not all("slack" in one for layers in chosen.values() for one in layers):
        return []
    means = {
        name: [float(np.mean([one[key] for one in layers])) for key in ("balance_of_samples", "balance")]
        for name, layers in chosen.items()
    }
    rows = [
        (f"balance loss of {name}", f"{apart:.4f} by sample, {whole:.4f} together: slack {apart - whole:.4f}")
        for name, (apart, whole) in means.items()
    ]
    # (sources, layers, experts)
    rates, scores = (
        np.array([[one[key] for one in layers] for layers in chosen.values()], dtype=np.float64)
        for key in ("rates", "scores")
    )
    shares = rates / np.maximum(rates.sum(-1, keepdims=True), np.finfo(np.float64).tiny)
    together = (shares * scores).mean(0) - shares.mean(0) * scores.mean(0)
    between = rates.shape[-1] * float(together.sum(-1).mean())
    return [*rows, ("slack between sources", f"{between:.4f} of a balance loss, mean of layers")]


def _favourites(planned: PlannedJob, names: Sequence[str], rates: Floats) -> Rows:
    """Return the layers whose experts differ most by source, each with the favourites of the sources."""
    graph = planned.problem.job.graph
    places = mixtures(graph)
    order = np.argsort(-np.ptp(rates, axis=0).max(axis=1), kind="stable")[:_SHOWN].tolist()
    return [
        (
            f"{graph.layers[places[layer]].name}, most chosen",
            "; ".join(
                f"{name}: expert {own[layer].argmax()} by {own[layer].max():.1%}"
                for name, own in zip(names, rates, strict=True)
            ),
        )
        for layer in order
    ]


def _chart(planned: PlannedJob, metrics: Metrics) -> SectionChart | None:
    told = [row for row in metrics if LOADS in row]
    if not told:
        return None
    names = {"violation": FIGURES[1], "variation": FIGURES[2], "busiest rank": RANK_LOAD}
    curves = tuple(
        ChartLine(name, points)
        for name, key in names.items()
        if (points := [(row["step"], row[key]) for row in told if key in row])
    )
    return SectionChart(curves, "step")


SECTION = ReportSection(
    name="expert-balance",
    title="Loads of experts",
    rows=_rows,
    chart=_chart,
    by_source=_by_source,
    events=_moves,
)
