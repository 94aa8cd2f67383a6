"""Fixtures shared by all rooms."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pool import WorkerPool


@pytest.fixture(scope="session")
def worker_pool() -> Iterator[WorkerPool]:
    """Worker processes for tests of more than one rank."""
    pool = WorkerPool()
    yield pool
    pool.close()
