"""The loads of experts that a job expects: its plans are priced with the busiest expert rank."""

from __future__ import annotations

from collections.abc import Hashable
from math import sqrt
from statistics import NormalDist
from typing import cast

from weft.describe.added_layers import PlannedLayers
from weft.describe.assumption import Assumption
from weft.describe.job import Job
from weft.describe.layer_graph import LayerGraph
from weft.describe.plan import Choice, Plan
from weft.methods.expert_balance.imbalance import with_busiest
from weft.methods.expert_balance.options import NAME, TABLE_NAME, read_options
from weft.methods.expert_balance.program import mixtures


def expected_busiest(variation: float, experts: int, ranks: int) -> float:
    """Return the tokens of the busiest rank over the mean, expected of experts that lie on ranks by chance.

    A rank's tokens are the sum of those of `experts / ranks` experts, drawn without repetition. They take a
    normal distribution. The largest of several such numbers is Blom's (1958, *Statistical Estimates and
    Transformed Beta-Variables*).

    Args:
        variation: the standard deviation of experts' tokens over their mean.
    """
    if ranks == 1:
        return 1.0
    largest = NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))
    return min(float(ranks), 1.0 + variation * sqrt(ranks / (experts - 1)) * largest)


def _decided(plan: Plan, graph: LayerGraph, choice: Choice) -> float | None:
    table = read_options(choice)
    busiest = expected_busiest(table.variation, graph.experts, plan.ep)
    factor = busiest if table.capacity is None else min(busiest, table.capacity)
    return None if factor == 1.0 else factor


def _words(job: Job) -> str | None:
    chosen = job.method(NAME)
    if not job.graph.experts or (chosen is not None and read_options(chosen).variation):
        return None
    return f"equally busy if ranks divide them (ep); {TABLE_NAME}.variation tells another expectation"


def _change(graph: LayerGraph, factor: Hashable) -> LayerGraph:
    return with_busiest(graph, dict.fromkeys(mixtures(graph), cast(float, factor)))


# Plans are priced with the experts that the job expects.
EXPECTED = PlannedLayers(method=NAME, decided=_decided, change=_change)
EQUALLY_BUSY = Assumption(key="experts", words=_words)
