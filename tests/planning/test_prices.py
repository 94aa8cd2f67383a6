"""What steps cost, and plans that cost the least."""

from __future__ import annotations

from dataclasses import replace

import pytest

from weft.cli.main import run
from weft.describe.cluster import Cluster
from weft.describe.cluster_file import parse_cluster
from weft.describe.layout import PartialLayout
from weft.planning.goals import cost_of, price_per_hour
from weft.planning.planners import Candidate, get_planner
from weft.planning.problem import problem_of


def priced(text: str, *prices: float) -> Cluster:
    cluster = parse_cluster(text)
    groups = tuple(
        replace(group, device=replace(group.device, price_per_hour=price))
        for group, price in zip(cluster.groups, prices, strict=True)
    )
    return replace(cluster, groups=groups)


def best(text: str, prices: tuple[float, ...], minimise: str) -> tuple[Cluster, Candidate]:
    cluster = priced(text, *prices)
    problem = problem_of(
        model="gpt2",
        on=text,
        global_batch=64,
        sequence=256,
        precision="fp16",
        minimise=minimise,
        pins=PartialLayout(recompute="none", loops=1),
    )
    problem = replace(problem, job=replace(problem.job, cluster=cluster))
    return cluster, get_planner("weft").search(problem).fitting[0]


def test_nodes_are_paid_for_as_a_whole_and_only_those_that_are_used():
    cluster = priced("16xa100-80gb+8xt4", 2.0, 0.5)
    assert price_per_hour(cluster) == 16 * 2.0 + 8 * 0.5
    assert price_per_hour(cluster, 8) == 16.0
    assert price_per_hour(cluster, 9) == 32.0
    assert price_per_hour(cluster, 17) == 32.0 + 2.0
    assert price_per_hour(parse_cluster("8xt4"), 8) is None


@pytest.mark.parametrize(
    ("text", "prices", "ranks"),
    [("16xa100-80gb", (2.0,), (8, 16)), ("4xa100-80gb+4xt4", (2.0, 0.5), (4, 4))],
    ids=["one of two nodes is cheaper", "slow devices are left out"],
)
def test_the_cheapest_plan_costs_no_more_than_the_fastest_and_is_no_faster(text, prices, ranks):
    (cluster, cheap), (_, fast) = best(text, prices, "cost"), best(text, prices, "time")
    cost, most = (cost_of(cluster, one.step_s, one.plan.ranks) for one in (cheap, fast))
    assert (cheap.plan.ranks, fast.plan.ranks) == ranks
    assert cost <= most
    assert cheap.step_s >= fast.step_s
    assert f"{1000 * cost:.4g} per 1,000 steps" in cheap.reason


def test_a_goal_of_cost_needs_prices(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("WEFT_HOME", str(tmp_path))
    path = tmp_path / "run.toml"
    path.write_text('[model]\npreset = "gpt2"\n[cluster]\nuse = "8xa100-80gb"\n[goal]\nminimise = "cost"\n')
    assert run(["plan", str(path)]) == 2
    assert "[device.a100-80gb] price_per_hour" in capsys.readouterr().err
