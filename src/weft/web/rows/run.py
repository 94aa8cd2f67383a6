"""A run that goes on, as figures: its progress, losses, speed and memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from weft.describe.prediction import Prediction
from weft.describe.units import counted, format_bytes, format_count, format_flops_per_s, format_seconds
from weft.planning.throughput import Throughput
from weft.training.directory.overview import RunOverview, RunState

GOOD, BAD = "good", "bad"


class Figure(NamedTuple):
    """A figure with its name and a remark; `tone` is `GOOD`, `BAD` or empty."""

    label: str
    value: str
    detail: str = ""
    tone: str = ""


LIST_HEAD = ("step", "loss", "held out", "tokens/s", "measured", "predicted")


def list_cells(run: RunOverview) -> tuple[str, ...]:
    """Return the figures of a run in a list of runs, under `LIST_HEAD`."""
    return (
        f"{run.done}/{run.steps}",
        _or_dash(run.loss, "{:.4f}".format),
        _or_dash(run.held_out_loss, "{:.4f}".format),
        _or_dash(run.tokens_per_s, format_count),
        _or_dash(run.step_s, format_seconds),
        _or_dash(run.predicted_step_s, format_seconds),
    )


def _or_dash(value: float | None, text: Callable[[float], str]) -> str:
    return "-" if value is None else text(value)


def run_figures(
    run: RunOverview, prediction: Prediction | None, work: Throughput | None, usable_bytes: int | None
) -> list[Figure]:
    """Return the figures of a run; those that it does not have yet are left out.

    Args:
        work: of steps as long as the newest ones; None where its job is unknown.
        usable_bytes: the memory that the plan may use on rank 0's device.
    """
    figures = [Figure("step", f"{run.done}/{run.steps}", _progress(run))]
    if run.loss is not None:
        held_out = ""
        if run.held_out_loss is not None and run.held_out_step is not None:
            held_out = f"held out {run.held_out_loss:.4f} after {counted(run.held_out_step, 'step')}"
        figures.append(Figure("loss", f"{run.loss:.4f}", held_out))
    if run.step_s is not None:
        figures.append(_step(run.step_s, prediction))
    if run.tokens_per_s is not None:
        each = "" if work is None else f"{format_count(run.tokens_per_s / work.devices)} of each device"
        figures.append(Figure("tokens per second", format_count(run.tokens_per_s), each))
    if work is not None:
        rate = f"{format_flops_per_s(work.flops_per_s)} of the model"
        figures.append(Figure("MFU", f"{work.utilisation:.1%}", rate))
    if run.memory_bytes is not None:
        figures.append(_memory(run.memory_bytes, prediction, usable_bytes))
    return figures


def time_left_s(run: RunOverview) -> float | None:
    """Return the seconds until the last step, with steps like the newest; None for a run that stands."""
    if run.state is not RunState.RUNNING or run.step_s is None:
        return None
    return (run.steps - run.done) * run.step_s


def _progress(run: RunOverview) -> str:
    left = time_left_s(run)
    state = str(run.state) if left is None else f"{format_seconds(left)} left"
    return state if run.saved_step is None else f"{state}, saved at {run.saved_step}"


def _step(step_s: float, prediction: Prediction | None) -> Figure:
    measured = format_seconds(step_s)
    if prediction is None:
        return Figure("step time", measured)
    inside = prediction.step_low_s <= step_s <= prediction.step_high_s
    words = f"predicted {format_seconds(prediction.step_s)} ({prediction.interval})"
    return Figure("step time", measured, words, GOOD if inside else BAD)


def _memory(memory_bytes: float, prediction: Prediction | None, usable_bytes: int | None) -> Figure:
    words = [] if prediction is None else [f"predicted {format_bytes(prediction.peak_bytes[0])}"]
    words += [] if usable_bytes is None else [f"{format_bytes(usable_bytes)} usable"]
    return Figure("tensors of rank 0", format_bytes(memory_bytes), ", ".join(words))
