"""Fixtures shared by all rooms."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import settings
from pool import WorkerPool

# Other processes share the cores: how long an example takes says nothing about the code.
settings.register_profile("weft", deadline=None)
settings.load_profile("weft")


@pytest.fixture(scope="session")
def worker_pool() -> Iterator[WorkerPool]:
    """Worker processes for tests of more than one rank."""
    pool = WorkerPool()
    yield pool
    pool.close()
