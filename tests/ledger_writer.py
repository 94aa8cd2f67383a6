"""A process that writes into a ledger; importable by name, as spawned processes need."""

from __future__ import annotations

from collections.abc import Sequence
from multiprocessing.synchronize import Barrier
from pathlib import Path

from weft.predict.ledger import Ledger


def record(ledger: Ledger, predicted: float = 2.0, quantity: str = "step_s") -> int:
    return ledger.record_prediction(
        quantity=quantity,
        subject="plan",
        predicted=predicted,
        low=predicted * 0.9,
        high=predicted * 1.1,
        source="layer profile",
        time_s=1e9,
    )


def write_at_once(paths: Sequence[Path], entries: int, start: Barrier) -> None:
    """Open and write each ledger `entries` times; all writers begin a ledger together."""
    for path in paths:
        start.wait(timeout=60)
        for _ in range(entries):
            with Ledger(path) as ledger:
                ledger.score(record(ledger), 2.0)
