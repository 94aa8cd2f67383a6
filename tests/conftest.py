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


@pytest.fixture(scope="session")
def worker_pool() -> Iterator[WorkerPool]:
    """Worker processes for tests of more than one rank."""
    pool = WorkerPool()
    yield pool
    pool.close()
