"""What sharding refuses stands in its bundle: of layouts, with the nearest, and of edited plans."""

from __future__ import annotations

import pytest

from weft.bundles import bundles, parts_of
from weft.describe.cluster_file import parse_cluster
from weft.describe.families import layer_graph
from weft.describe.job import Job
from weft.describe.layout import Layout
from weft.describe.models import PRESETS
from weft.describe.plan import Choice, Plan, Replica, Sharding, Stage
from weft.describe.plan_file import PlanRule
from weft.moves.composition import Composition

BUNDLE = bundles()["sharding"]
GRAPH = layer_graph(PRESETS["gpt-1m"])
JOB = Job(graph=GRAPH, cluster=parse_cluster("8xa100-80gb"), global_batch=8, sequence=256)


def plan(copies: tuple[int, ...], sharding: Sharding, island: int | None) -> Plan:
    """Stages of one layer with so many replicas each."""
    alone = {"model": "any", "model_fingerprint": "0", "cluster": "any", "cluster_fingerprint": "0"}
    stages = [
        Stage(
            layers=(index,), replicas=tuple(Replica(ranks=(rank,), micro_batches=1) for rank in range(count))
        )
        for index, count in enumerate(copies)
    ]
    return Plan(
        **alone,
        sequence=1,
        global_batch=8,
        micro_batch_size=1,
        mesh={"pp": 1, "dp": copies[0]},
        stages=tuple(stages),
        schedule=Choice(name="1f1b"),
        sharding=sharding,
        island=island,
    )


def layout(**changes: object) -> Layout:
    usual = {"pp": 1, "dp": 8, "loops": 1, "micro_batch_size": 1, "schedule": "1f1b", "sharding": "zero-1"}
    return Layout(**{**usual, **changes})


@pytest.mark.parametrize(
    ("copies", "sharding", "island", "expected"),
    [
        ((4, 4), "zero-0", None, []),
        ((1, 1), "zero-0", None, []),
        ((4, 4), "zero-3", 2, []),
        (
            (4, 1),
            "zero-1",
            2,
            [
                "plan: sharding: zero-1 shares states out over replicas; stages 1 have one "
                "(nearest valid: zero-0)"
            ],
        ),
        (
            (4, 6),
            "zero-1",
            4,
            ["plan: island: 6 replicas cannot make whole islands of 4 (nearest valid: 3)"],
        ),
        (
            (4, 1),
            "zero-0",
            2,
            [
                "plan: island: islands of 2 replicas share states out, and zero-0 shares nothing "
                "(nearest valid: zero-1)"
            ],
        ),
        (
            (1,) * 8,
            "zero-1",
            None,
            [
                "plan: sharding: zero-1 shares states out over replicas; "
                "stages 0, 1, 2, 3, 4, 5, ... have one (nearest valid: zero-0)"
            ],
        ),
    ],
)
def test_a_plan_shares_among_replicas_that_it_has(
    copies: tuple[int, ...], sharding: Sharding, island: int | None, expected: list[str]
) -> None:
    (rule,) = parts_of(PlanRule, [BUNDLE])
    assert [str(problem) for problem in rule.refuse(plan(copies, sharding, island), GRAPH)] == expected


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"island": 2}, None),
        ({"dp": 1}, "zero-1 shares states out over replicas, and dp is 1; nearest sharding: zero-0"),
        ({"dp": 1, "schedule": "chimera", "pp": 2}, None),
        (
            {"sharding": "zero-0", "island": 2},
            "islands of 2 replicas share states out, and zero-0 shares nothing; nearest sharding: zero-1",
        ),
        ({"island": 3}, "8 replicas cannot make whole islands of 3; nearest island: 2"),
        ({"island": 1}, "an island of 1 replica has nobody to share with; nearest island: 2"),
    ],
)
def test_a_layout_shares_among_replicas_that_it_has(changes: dict[str, object], expected: str | None) -> None:
    found = [one.refuse(JOB, layout(**changes)) for one in parts_of(Composition, [BUNDLE])]
    assert [reason for reason in found if reason is not None] == ([] if expected is None else [expected])


@pytest.mark.parametrize(
    ("sharding", "island", "reducers", "sharers"),
    [("zero-0", None, 8, 1), ("zero-1", None, 8, 8), ("zero-3", 4, 4, 4)],
)
def test_those_that_reduce_together_share_what_is_shared_out(
    sharding: Sharding, island: int | None, reducers: int, sharers: int
) -> None:
    one = plan((8,), sharding, island)
    assert (one.reducers(0), one.sharers(0)) == (reducers, sharers)
