"""Events of a run in words, for terminals and pages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from weft.planning.lost_replicas import DIED

_WARNINGS = {
    "checkpoint skipped": "skipped a checkpoint: {reason}",
    "data warning": "{warning}",
    "run warning": "{warning}",
    "codec not measured": "step {step}: no codec changes: {reason}",
    "work not measured": "step {step}: work in bubbles stays in its places: {reason}",
    "hang": "{problem}",
    "hang over": "goes on after {after_s:.0f} s",
    "began anew": "step {step}: what each rank kept to itself under plan {former} is left behind; all "
    "replicas go on from their average",
    DIED: "{told} died in step {reached}; the others go on from the state after {step} steps",
    "restarted": "{reason}; the run starts again, and may do so {left} more times",
    "replicas lost": "step {step}: the loss of ranks {ranks} is not finite; the next average of weights "
    "leaves their replicas out",
    "resume differs": "step {step} has the loss {loss} after resuming; before, it was {recorded}",
}
# A run's terminal tells of these in other ways.
_ALSO_BAD = {
    "left out": "step {step}: no update, the gradient is not finite",
    "diverged": "step {step}: the loss is not finite",
    "logger": "logger {logger}: {problem}",
}
_NEWS = {
    "started": "started",
    "resumed": "resumed from {checkpoint}",
    "evaluated": "held-out loss {held_out_loss:.4f} after {step} steps",
    "checkpoint": "checkpoint after {step} steps",
    "absences": "step {step}: {told}",
    "codec exposed": "codecs delay steps most in {exposed}; no other codec shortens the predicted step",
    "codec changed": "codecs delay steps in {exposed}; {change}",
    "work stays": "{drift}; work in bubbles stays in its places: {reason}",
    "work placed anew": "{drift}; work in bubbles is placed anew: {change}",
    "servers": "gradients are added up by {servers}",
    "plan changed": "plan {now} takes over from plan {former}",
    "stopped": "stopped after {step} steps by {signal}",
    "finished": "finished after {step} steps, held-out loss {held_out_loss:.4f}",
}


def warnings(events: Iterable[Mapping[str, Any]], since_s: float) -> list[str]:
    """Return the warnings to the user from the events since `since_s`, one line each."""
    return [
        text
        for event in events
        if event.get("time_s", 0.0) >= since_s and (text := _words(event, _WARNINGS)) is not None
    ]


def event_words(event: Mapping[str, Any]) -> tuple[str, bool] | None:
    """Return an event in words, and whether it is bad; None for one that says nothing to a user."""
    if (text := _words(event, _NEWS)) is not None:
        return text, False
    text = _words(event, _WARNINGS | _ALSO_BAD)
    return None if text is None else (text, True)


def _words(event: Mapping[str, Any], texts: Mapping[str, str]) -> str | None:
    """Return the text of an event; None if there is none, or another hand wrote the event."""
    form = texts.get(event.get("event", ""))
    try:
        return None if form is None else form.format(**event)
    except (KeyError, ValueError):
        return None
