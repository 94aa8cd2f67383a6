"""The line of a job that no layout fits: each reason once, of the layout that comes closest."""

from __future__ import annotations

import pytest

from weft.describe.run_file import parse_run
from weft.planning.nothing_fits import NothingFitsError
from weft.planning.planned import plan_run


def refused(**tables: object) -> NothingFitsError:
    record = {"model": {"preset": "gpt-1m"}, "cluster": {"use": "2xa100-80gb"}, "train": {"global_batch": 16}}
    with pytest.raises(NothingFitsError) as caught:
        plan_run(parse_run({**record, **tables}))
    return caught.value


def test_a_reason_of_many_layouts_is_told_once() -> None:
    pins = {"pp": 2, "dp": 1, "schedule": "1f1b"}
    error = refused(bubble={"work": ["kfac"]}, goal={"contract": "empirical"}, plan=pins)
    reasons = [one.reason for one in error.ranking.closest]
    assert len(reasons) > len(set(reasons))
    assert any("4 ranks, the cluster has 2" in one for one in reasons)
    (told,) = error.violations
    assert told.where == "no layout fits; closest: pp 2 x dp 1, 1f1b, micro-batch size 1"
    assert "'kfac' is not asked for" in told.problem


def test_layouts_that_lack_other_amounts_are_told_one_by_one() -> None:
    error = refused(model={"preset": "llama-7b"}, cluster={"use": "1xt4"})
    assert len(error.violations) == 3
    assert all("more than its device has" in one.problem for one in error.violations)


@pytest.mark.parametrize(
    ("pins", "near"), [({"pp": 2}, "dp 1"), ({"dp": 2}, "pp 1"), ({"tp": 2}, "pp 1 and dp 1")]
)
def test_degrees_that_leave_devices_of_an_odd_cluster_idle_need_both_pins(
    pins: dict[str, int], near: str
) -> None:
    (told,) = refused(cluster={"use": "3xl4"}, plan=pins).violations
    assert told.problem.startswith("no layout of all 3 devices in nodes of 3 has ")
    assert told.nearest == f"{near}, which leaves devices idle"
    pinned = {"pp": 1, "dp": 1} | pins
    record = {"model": {"preset": "gpt-1m"}, "cluster": {"use": "3xl4"}, "train": {"global_batch": 16}}
    assert plan_run(parse_run(record | {"plan": pinned})).plan.ranks == 2


def test_servers_that_leave_no_layout_are_named() -> None:
    asked = {"method": "clan", "servers": 4}
    error = refused(cluster={"use": "4xl4"}, sync=asked, goal={"contract": "empirical"})
    (told,) = error.violations
    assert told.problem.startswith(
        "no layout of all 4 devices in nodes of 4 has sync clan (4 servers leave 0 for"
    )


def test_more_tensor_ranks_than_a_node_has_are_priced_over_nodes() -> None:
    """The second node has fewer devices than a replica has tensor ranks."""
    error = refused(cluster={"use": "4xl4+2xa100-80gb"}, plan={"pp": 1, "dp": 2, "tp": 4})
    assert "8 ranks, the cluster has 6" in error.violations[0].problem
