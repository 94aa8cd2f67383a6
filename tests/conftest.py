"""Fixtures shared by all rooms."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import settings
from pool import WorkerPool

# Other processes share the cores: how long an example takes says nothing about the code. Continuous
# integration tries the same examples every time; everybody else tries new ones.
settings.register_profile("weft", deadline=None, derandomize=os.environ.get("CI") == "true")
settings.load_profile("weft")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep the tests of a room that start processes together, in their order, on one of two runners.

    Each runner has one pool, and the other one's tests fill the time in which processes wait (pytest-xdist,
    `--dist loadgroup`).
    """
    for item in items:
        fixtures = getattr(item, "fixturenames", ())
        if item.get_closest_marker("processes") is not None or "worker_pool" in fixtures:
            item.add_marker(pytest.mark.xdist_group(item.path.parent.name))


@pytest.fixture(scope="session")
def worker_pool() -> Iterator[WorkerPool]:
    """Worker processes for tests of more than one rank."""
    pool = WorkerPool()
    yield pool
    pool.close()
