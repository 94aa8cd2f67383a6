"""Tests that start processes stay on one runner, file by file, long tables on two, and runners start warm."""

import sys

import pytest
from warm_starts import Template


@pytest.mark.processes
def test_pytest_xdist_knows_the_group_of_a_test(request: pytest.FixtureRequest) -> None:
    if not request.config.getoption("loadgroup", False):
        pytest.skip("runs with `-n N --dist loadgroup`")
    assert request.node.nodeid.endswith("@test_runners.py")


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere every start is cold")
def test_a_runner_is_a_copy_that_has_a_template(request: pytest.FixtureRequest) -> None:
    if not hasattr(request.config, "workerinput"):
        pytest.skip("runs with `-n N`")
    assert Template.own is not None


def test_a_long_table_has_two_runners(request: pytest.FixtureRequest) -> None:
    table = [item for item in request.session.items if item.path.name == "test_equality_table.py"]
    if not request.config.getoption("loadgroup", False) or not table:
        pytest.skip("runs with the table and with `-n N --dist loadgroup`")
    groups = {item.nodeid.partition("@")[2] for item in table if "trains_like_one_process" in item.name}
    assert groups <= {"run/test_equality_table.py 0", "run/test_equality_table.py 1"}
