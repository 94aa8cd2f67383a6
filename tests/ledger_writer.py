"""A process that writes into a ledger; importable by name, as spawned processes need."""

from __future__ import annotations

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


def write_many(path: Path, entries: int) -> None:
    for _ in range(entries):
        with Ledger(path) as ledger:
            ledger.score(record(ledger), 2.0)
