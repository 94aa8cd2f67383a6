"""Measured plans for tests of corrections."""

from __future__ import annotations

from collections.abc import Sequence

from weft.predict.corrections import Observation, Part, Peaks


def observed(
    ratio: float,
    *,
    plan_id: str = "0" * 16,
    predicted_step_s: float = 0.02,
    time_s: float = 0.0,
    source: str = "data sheet",
    half_width: float = 0.3,
    computations: float | None = None,
    peak: float | None = None,
) -> Observation:
    """A plan whose step took `ratio` times as long as predicted, its computations `computations` times.

    Its ranks held `peak` times as much as predicted.
    """
    parts: Sequence[Part] = ()
    if computations is not None:
        parts = [
            Part(kind="computations", device="cpu", share=0.75, ratio=computations),
            Part(kind="messages", share=0.25),
        ]
    return Observation(
        plan_id=plan_id,
        time_s=time_s,
        sources={"cpu": source},
        half_width=half_width,
        predicted_step_s=predicted_step_s,
        measured_step_s=predicted_step_s * ratio,
        parts=tuple(parts),
        peaks=None if peak is None else peaks(peak),
    )


def peaks(ratio: float, predicted_bytes: Sequence[int] = (10**9, 2 * 10**9, 3 * 10**9)) -> Peaks:
    """Ranks that held `ratio` times as much as predicted, in the middle; the fullest one held more."""
    ratios = [*([ratio] * (len(predicted_bytes) - 1)), 2.0 * ratio]
    measured = tuple(round(one * held) for one, held in zip(ratios, predicted_bytes, strict=True))
    return Peaks(predicted_bytes=tuple(predicted_bytes), measured_bytes=measured, half_width=0.04)


def several(ratios: Sequence[float], **more: float) -> list[Observation]:
    """One plan for each ratio, measured one after the other."""
    return [
        observed(ratio, plan_id=f"{place:016x}", time_s=float(place), **more)  # type: ignore[arg-type]
        for place, ratio in enumerate(ratios)
    ]
