"""Tests that start processes stay on one runner, file by file."""

import pytest


@pytest.mark.processes
def test_pytest_xdist_knows_the_group_of_a_test(request: pytest.FixtureRequest) -> None:
    if not request.config.getoption("loadgroup", False):
        pytest.skip("runs with `-n N --dist loadgroup`")
    assert request.node.nodeid.endswith("@test_runners.py")
