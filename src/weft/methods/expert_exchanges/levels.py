"""Exchanges in two levels: the expert ranks of each node first, then those with one place on all nodes.

Each group of expert ranks must lie in whole nodes, with equally many neighbours on each.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from weft.describe.cluster import Cluster
from weft.describe.job import Job
from weft.describe.layout import Layout
from weft.describe.plan import EXPERT_EXCHANGES, expert_ranks_per_node
from weft.errors import Violation
from weft.moves.composition import Composition
from weft.moves.layout import rank_table
from weft.planning.decisions import DecidedWords
from weft.planning.job_rules import JobRule
from weft.planning.planned_job import PlannedJob

_KEY = "ranks_per_node"


def _refused(per_node: int, groups: Iterable[Sequence[int]], cluster: Cluster) -> tuple[str, int] | None:
    """Return the reason to refuse groups of expert ranks, and the nearest number of ranks per node."""
    if per_node == 1:
        return None
    counts: set[int] = set()
    for group in groups:
        runs = [(node, len(list(run))) for node, run in groupby(map(cluster.node_of, group))]
        apart = len(dict(runs)) < len(runs)
        counts |= {1} if apart else {length for _, length in runs}
    if counts == {per_node}:
        return None
    words = " and ".join(map(str, sorted(counts)))
    reason = f"{per_node} expert ranks of a node exchange first, and groups have {words} neighbours on a node"
    return reason, max(counts) if len(counts) == 1 else 1


def _refuse_layout(job: Job, layout: Layout) -> str | None:
    per_node = expert_ranks_per_node(job.method(EXPERT_EXCHANGES))
    if per_node == 1 or layout.ep == 1:
        return None
    replicas = rank_table((layout.pp, layout.dp, layout.width), layout.rank_order).reshape(-1, layout.width)
    groups = (group for ranks in replicas.tolist() for group in layout.grid.expert_groups(ranks))
    refused = _refused(per_node, groups, job.cluster)
    return None if refused is None else f"{EXPERT_EXCHANGES}: {refused[0]}; nearest {_KEY}: {refused[1]}"


def of_nodes(planned: PlannedJob) -> Iterator[Violation]:
    """Yield the violation of a plan whose groups of expert ranks have other numbers on their nodes."""
    plan = planned.plan
    if plan.ep == 1:
        return
    groups = (
        group
        for number, stage in enumerate(plan.stages)
        for replica in stage.replicas
        for group in plan.grid(number).expert_groups(replica.ranks)
    )
    per_node = expert_ranks_per_node(plan.method(EXPERT_EXCHANGES))
    refused = _refused(per_node, groups, planned.problem.job.cluster)
    if refused is not None:
        yield Violation(f"{EXPERT_EXCHANGES}.{_KEY}", refused[0], str(refused[1]))


def _words(planned: PlannedJob) -> str | None:
    per_node = expert_ranks_per_node(planned.plan.method(EXPERT_EXCHANGES))
    if per_node == 1 or planned.plan.ep == 1:
        return None
    return f"expert exchanges: {per_node} ranks of a node first, then between nodes"


LEVELS = (
    Composition(
        method=EXPERT_EXCHANGES,
        other="uneven nodes",
        reason="expert ranks exchange in two levels where each node has equally many neighbours",
        refuse=_refuse_layout,
    ),
    JobRule(refuse=of_nodes),
    DecidedWords(method=EXPERT_EXCHANGES, words=_words),
)
