"""Figures of synchronisation methods: the exposed time of codecs, added states, and bytes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from weft.describe.cluster import Link
from weft.describe.contract import Contract
from weft.describe.layout import PartialLayout
from weft.describe.plan import Choice
from weft.planning.planners.homogeneous import UniformPlanner
from weft.planning.problem import Problem, problem_of
from weft.planning.sync_comparison import CodecFigures, compare_synchronisations, sync_figures


def problem(bytes_per_s: float) -> Problem:
    """A small model on four devices of two nodes, for the loosest contract."""
    found = problem_of(
        model="gpt-1m",
        on="4xa100-80gb",
        global_batch=16,
        pins=PartialLayout(dp=4),
        contract=Contract.EMPIRICAL,
    )
    cluster = found.job.cluster
    nodes = tuple(replace(group, count=2, devices=2) for group in cluster.groups)
    links = {(one.name, other.name): Link(bytes_per_s, 1e-6) for one in nodes for other in nodes}
    return replace(found, job=replace(found.job, cluster=replace(cluster, groups=nodes, links=links)))


def test_each_answer_has_the_figures_of_its_plan_and_the_others_a_reason() -> None:
    asked = problem(1e8)
    ranking = UniformPlanner().search(asked)
    answers = compare_synchronisations(ranking, 200, Choice(name="local-averaging", options={"every": 5}))
    dense = next(one.figures for one in answers if one.found.sync.name == "dense")
    assert dense is not None
    assert (dense.added_bytes, dense.steps_apart) == (0, None)
    assert dense.codecs == dense.unfused == CodecFigures(0.0, 0.0)
    for one in answers:
        assert one.found.candidate is not None
        assert one.found.candidate.plan is not None
        assert one.figures == sync_figures(asked.cost_model, one.found.candidate.plan)
        assert one.figures.prediction == one.found.candidate.prediction
        own, others = one.figures.traffic.between_bytes, dense.traffic.between_bytes
        assert own < others or (own == others and one.found.sync.name not in ("sdp4bit", "local-averaging"))
        assert one.figures.steps_apart == one.found.sync.options.get("every")
    exact = replace(ranking, problem=replace(asked, contract=Contract.EXACT))
    for one in compare_synchronisations(exact, 200):
        assert (one.figures is None) == (one.found.contract > Contract.EXACT)


@pytest.mark.parametrize("bytes_per_s", [1e7, 1e9, 1e12])
def test_the_time_of_codecs_is_hidden_or_exposed(bytes_per_s: float) -> None:
    for one in compare_synchronisations(UniformPlanner().search(problem(bytes_per_s)), 200):
        assert one.figures is not None
        few_bits = one.found.sync.name == "sdp4bit"
        for codecs in (one.figures.codecs, one.figures.unfused):
            assert (codecs.exposed_s > 0.0) == (codecs.busy_s > 0.0) >= few_bits
            assert codecs.hidden_s + codecs.exposed_s == pytest.approx(codecs.busy_s, abs=1e-8)
        # On an accelerator, plain torch takes 85 times as long as kernels that encode, and 14 as those that
        # decode.
        fused, unfused = one.figures.codecs, one.figures.unfused
        assert 10.0 * fused.busy_s <= unfused.busy_s <= 100.0 * fused.busy_s
        assert (unfused.exposed_s > fused.exposed_s) == (fused.busy_s > 0.0)
        keeps_apart = one.found.sync.options.get("weights") != "whole"
        assert not few_bits or (one.figures.added_bytes > 0) == keeps_apart
