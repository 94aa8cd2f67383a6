"""What loggers are told in tests."""

from __future__ import annotations

from pathlib import Path

from weft.training.loggers.feed import Opening, Record

CONFIG = {"run": {"train": {"steps": 4}}, "plan": {"plan_id": "0123", "model": "gpt-tiny"}}


def opening_of(
    run_dir: Path, *, steps: tuple[Record, ...] = (), held_out: tuple[Record, ...] = (), first_step: int = 0
) -> Opening:
    return Opening(run_dir=run_dir, first_step=first_step, steps=steps, held_out=held_out, config=CONFIG)


def record_of(step: int, loss: float | None = None) -> Record:
    """What the journal says of a step."""
    return {
        "step": step,
        "loss": 5.0 - step if loss is None else loss,
        "learning_rate": 0.125,
        "tokens_per_s": 1000.0,
        "step_s": 0.5,
        "predicted_step_s": 0.4375,
        "epoch": 0,
        "time_s": 1000.0 + step,
        "max_rss_bytes": 4096,
    }
