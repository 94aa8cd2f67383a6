"""Tests that start processes stay on one runner, file by file, and runners start warm."""

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
