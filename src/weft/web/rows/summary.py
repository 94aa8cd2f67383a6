"""The summary of a run as text: the figures of its training, and its memory beside the prediction."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence

from weft.describe.units import format_bytes, format_seconds

MEMORY_HEAD = ("part", "predicted", "measured")
# In this order; other figures follow.
_WORDS = {
    "steps": "steps",
    "world_size": "ranks",
    "first_loss": "held-out loss before training",
    "final_loss": "held-out loss after training",
    "final_metrics": "after training",
    "checkpoints": "checkpoints",
    "checkpoint_bytes": "last checkpoint",
    "checkpoint_stall_s": "training stood still for checkpoints",
    "checkpoint_write_s": "checkpoints written beside training",
    "data_read_bytes": "samples read",
    "weight_log_step_bytes": "logged weights of a step",
}
# Other parts of a page show these.
_ELSEWHERE = frozenset(
    {
        "predicted_step_s",
        "predicted_step_low_s",
        "predicted_step_high_s",
        "predicted_peak_bytes",
        "measured_step_s",
        "tokens_per_s",
        "max_rss_bytes",
        "max_device_bytes",
        "library_bytes",
        "tensor_bytes",
        "plan",
        "plan_id",
    }
)


def summary_rows(summary: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """Yield the figures that no other part of a report shows: name and value."""
    order = {key: place for place, key in enumerate(_WORDS)}
    for key, value in sorted(summary.items(), key=lambda one: order.get(one[0], len(order))):
        if key in _ELSEWHERE or value in ({}, [], ()):
            continue
        if isinstance(value, Mapping):
            yield from ((f"{_name(key)}: {_name(name)}", _text(name, each)) for name, each in value.items())
        else:
            yield _name(key), _text(key, value)


def _name(key: str) -> str:
    return _WORDS.get(key, key.removesuffix("_s").removesuffix("_bytes").replace("_", " "))


def _text(key: str, value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value if isinstance(value, str) else json.dumps(value)
    if key.endswith("_bytes"):
        return format_bytes(value)
    if key.endswith("_s") and not key.endswith("per_s"):
        return format_seconds(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def memory_rows(
    predicted: Mapping[str, int], summary: Mapping[str, Sequence[int]], rank: int
) -> list[tuple[str, ...]]:
    """Return rows under `MEMORY_HEAD` of the peak of a rank; `predicted` are its parts in bytes.

    On an accelerator, the measured part is the memory that torch has allocated there. On a CPU it is the
    process without interpreter and libraries. They and later copies have rows of their own.
    """
    rows: list[tuple[str, ...]] = [(name, format_bytes(size), "") for name, size in predicted.items()]
    total = format_bytes(sum(predicted.values()))
    if device := summary.get("max_device_bytes"):
        return [*rows, ("together", total, format_bytes(device[rank]))]
    whole, tensors, libraries = (
        summary[key][rank] if summary.get(key) else None
        for key in ("max_rss_bytes", "tensor_bytes", "library_bytes")
    )
    rows.append(("together", total, "-" if tensors is None else format_bytes(tensors)))
    if tensors is not None and libraries is not None and whole is not None:
        rows.append(("interpreter and libraries", "-", format_bytes(libraries)))
        rows.append(("checkpoints and evaluation", "-", format_bytes(whole - tensors - libraries)))
    if whole is not None:
        rows.append(("whole process", "-", format_bytes(whole)))
    return rows
