"""One plan on a terminal: its cluster, its stages, their memory and the parts of a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from rich.table import Table
from rich.text import Text

from weft.cli.output import folded_table
from weft.describe.cluster import Cluster
from weft.describe.plan import Plan, precision_words
from weft.describe.units import counted, format_bytes, format_count, format_flops_per_s
from weft.planning.planned_job import PlannedJob
from weft.planning.problem import Problem
from weft.predict.memory_parts import MemoryPart
from weft.program.arrays import Ints
from weft.web.rows.plan import (
    STAGE_HEAD,
    breakdown_rows,
    equal_ranks,
    inside_text,
    link_rows,
    nodes_text,
    ranks_text,
    spans,
    stage_rows,
    stages_by_rank,
)

_BAR = 32
# Normal tails say nothing beyond.
_SURE = 0.999
# Causes with a smaller share of the step are left out of the line.
_LEAST = 0.001
# The share of launches in the passes from which a step is called host-bound: most devices wait.
LAUNCHING_SHARE = 0.9


def cluster_table(cluster: Cluster, plan: Plan) -> Table:
    """Return a row for each group of nodes with its stages, and one for each link between nodes."""
    held = stages_by_rank(plan)
    table = folded_table(("group", "nodes", "link", "ranks", "stages"))
    first = 0
    for group in cluster.groups:
        ranks = range(first, first + group.count * group.devices)
        stages = sorted({stage for rank in ranks for stage in held.get(rank, ())})
        servers = len(set(ranks) & set(plan.servers))
        words = [spans(stages)] * bool(stages) + [counted(servers, "server")] * bool(servers)
        on_them = ", ".join(words) or "left out"
        table.add_row(group.name, nodes_text(group), inside_text(group), spans(ranks), on_them)
        first = ranks.stop
    for line in link_rows(cluster):
        table.add_row(*line)
    return table


def stages_table(planned: PlannedJob) -> Table:
    """Return the stages of a plan."""
    job = planned.problem.job
    table = folded_table(STAGE_HEAD)
    for row in stage_rows(planned.plan, planned.prediction, job.cluster, job.graph.layers):
        table.add_row(*row)
    return table


def memory_bars(peak_bytes: Sequence[int], memory_bytes: Sequence[int]) -> Table:
    """Return bars of the predicted peak of each rank against its memory; equal neighbours share a bar."""
    table = Table.grid(padding=(0, 2))
    for _ in range(3):
        table.add_column(no_wrap=True)
    for ranks in equal_ranks(peak_bytes, memory_bytes):
        filled = min(_BAR, max(1, round(ranks.share * _BAR)))
        bar = Text("#" * filled, style=ranks.colour).append("." * (_BAR - filled), style="dim")
        table.add_row(ranks.name, bar, ranks.words)
    return table


def memory_parts_table(parts: Sequence[MemoryPart]) -> Table:
    """Return a row for each part of a rank's memory at its peak, with its 90 % interval and its origin."""
    table = folded_table(("part", "bytes", "", "origin"))
    for part in parts:
        spread = f"+- {part.spread:.0%}" if part.spread else ""
        size = format_bytes(abs(round(part.value)))
        table.add_row(part.name, f"-{size}" if part.value < 0 else size, spread, part.source)
    return table


def chance_text(planned: PlannedJob) -> str:
    """Return the chance that a plan fits, beside the accepted risk, and what tensors do not get."""
    problem = planned.problem
    used = map(problem.job.cluster.device_of, range(planned.plan.ranks))
    devices = {device.name: device for device in used}.values()
    reserves = ", ".join(
        f"{format_bytes(one.memory_bytes - one.usable_bytes)} of {one.name}"
        for one in devices
        if one.usable_bytes < one.memory_bytes
    )
    kept = f"; {reserves} stay in reserve" if reserves else ""
    if most := max(planned.prediction.communicator_bytes, default=0):
        kept += f", and communicators take {format_bytes(most)}"
    chance = planned.prediction.chance_to_fit(planned.unreserved_bytes)
    words = f"over {_SURE:.1%}" if chance > _SURE else f"{chance:.1%}"
    memory = problem.measurements.memory
    measured = f"; memory as {memory.in_words()}" if memory.count else ""
    return f"fits with a chance of {words} (accepted risk {problem.memory_risk:.0%}){kept}{measured}"


def job_text(problem: Problem) -> Text:
    """Return the model, the cluster, the batch and the precision of a job."""
    job = problem.job
    what, tokens = problem.model.unit.removesuffix("s"), ""
    if problem.model.reads_tokens:
        what, tokens = "sample", f" of {counted(job.sequence, 'token')}"
    batch = counted(job.global_batch, what) + tokens
    return Text(job.graph.name, style="bold").append(
        f" on {job.cluster.name} ({counted(job.cluster.ranks, 'device')}), {batch}, {precision_words(job)}",
        style="not bold",
    )


def throughput_text(planned: PlannedJob) -> str:
    """Return what the predicted step does in a second, in the words of other programs."""
    seen, precision, what = planned.throughput, planned.plan.precision, planned.problem.model.unit
    per_s = seen.samples_per_s if seen.tokens_per_s is None else seen.tokens_per_s
    of_device = f"{format_count(per_s / seen.devices)} {what}/s and " if seen.devices > 1 else ""
    return (
        f"{format_count(per_s)} {what}/s; per device {of_device}"
        f"{format_flops_per_s(seen.flops_per_s / seen.devices)}, {seen.utilisation:.1%} MFU "
        f"(model flops without recomputation, over the {precision} peak)"
    )


def idle_text(planned: PlannedJob) -> str:
    """Return which devices the plan leaves idle; empty if it uses all."""
    if not planned.idle:
        return ""
    cluster = planned.problem.job.cluster
    idle = ", ".join(f"{count} of {name}" for name, count in planned.idle.items())
    ranks = ranks_text(range(planned.plan.ranks, cluster.ranks))
    return f"uses {planned.plan.ranks} of {cluster.ranks} devices; idle: {idle} ({ranks})"


def host_memory_text(held: Mapping[str, Ints], cluster: Cluster) -> str:
    """Return what the fullest rank keeps in host memory, by name, and the total of the fullest node."""
    of_rank = ", ".join(f"{name} {format_bytes(int(each.max()))}" for name, each in held.items())
    nodes: Counter[tuple[int, int]] = Counter()
    for rank, total in enumerate(np.stack([*held.values()]).sum(axis=0).tolist()):
        nodes[cluster.node_of(rank)] += total
    fullest = format_bytes(max(nodes.values()))
    return f"in host memory, of the fullest rank: {of_rank}; of the fullest node: {fullest}"


def breakdown_text(causes: Mapping[str, float], launching_share: float) -> str:
    """Return the causes with at least a thousandth of the step on one line, as shares of the step.

    If kernel launches take most of the passes, it says so.
    """
    rows = breakdown_rows(causes)
    step_s = sum(causes.values())
    shown = [row for row, seconds in zip(rows, causes.values(), strict=True) if seconds >= _LEAST * step_s]
    text = ", ".join(f"{name} {share}" for name, _, share in shown)
    if launching_share < LAUNCHING_SHARE:
        return text
    return f"{text}; host-bound: kernel launches take {launching_share:.0%} of the passes"
