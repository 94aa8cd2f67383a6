"""Messages are measured on every transport of a run."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from pool import WorkerPool

from weft.capture.machine import messages_between
from weft.run.transport.transports import TRANSPORTS, transport_of

CPU = torch.device("cpu")


def passed(rank: int, ranks: int, transport: str) -> list[float]:
    """Seconds of a small and a large message between two of the ranks."""
    chosen = patch(
        "weft.capture.message_line.transport_of", lambda _, device: transport_of(transport, device)
    )
    with chosen:
        return [seconds for _, seconds in messages_between((0, 1), CPU, (0, 2**20))]


@pytest.mark.processes
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_all_ranks_learn_how_long_a_message_takes(worker_pool: WorkerPool, transport: str) -> None:
    first, *others = worker_pool.run(passed, transport, ranks=3)
    assert all(seconds > 0.0 for seconds in first)
    assert others == [first, first]
