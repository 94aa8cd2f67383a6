"""Synchronisation methods side by side, as text: their steps, their bytes and their codecs."""

from __future__ import annotations

from weft.describe.synchronisation import sync_words
from weft.describe.units import format_bytes, format_seconds
from weft.planning.sync_comparison import SyncAnswer, SyncFigures

STEP_HEAD = ("method", "step", "90 % interval", "contract", "steps apart")
TRAFFIC_HEAD = ("method", "sent out", "inside", "states")
CODEC_HEAD = ("method", "codecs hidden", "exposed", "unfused hidden", "exposed")
TRAFFIC_NOTE = (
    "per step: sent by one node, out to others and inside, for its replicas to agree, without messages "
    "between stages; states that a rank holds beyond dense ones"
)
CODEC_NOTE = (
    "per step of the busiest rank: codecs beside other work, and the time that they add to the step; "
    "in fused kernels, and unfused in plain torch"
)


def step_row(answer: SyncAnswer, figures: SyncFigures) -> tuple[str, ...]:
    """Return the row of `STEP_HEAD` of a method that was priced."""
    apart, found = figures.steps_apart, answer.found
    return (
        sync_words(found.sync),
        format_seconds(figures.prediction.step_s) if found.fits else "too big",
        figures.prediction.interval if found.fits else "-",
        found.contract.word,
        "-" if apart is None else str(apart),
    )


def traffic_row(answer: SyncAnswer, figures: SyncFigures) -> tuple[str, ...]:
    """Return the row of `TRAFFIC_HEAD` of a method that was priced, per step, node and rank."""
    sent = figures.traffic
    return (
        sync_words(answer.found.sync),
        format_bytes(round(sent.between_bytes)),
        format_bytes(round(sent.inside_bytes)),
        format_bytes(figures.added_bytes),
    )


def codec_row(answer: SyncAnswer, figures: SyncFigures) -> tuple[str, ...]:
    """Return the row of `CODEC_HEAD` of a method that encodes what it sends."""
    each = (figures.codecs, figures.unfused)
    times = (second for one in each for second in (one.hidden_s, one.exposed_s))
    return (sync_words(answer.found.sync), *map(format_seconds, times))
