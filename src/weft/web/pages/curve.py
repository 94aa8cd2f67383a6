"""The page of `weft plan --curve --report`: each method's utilisation by batch, and time against cost."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from weft.describe.units import counted, format_bytes, format_seconds
from weft.planning.curve import Curve, CurvePoint
from weft.web.charts.curve import curve_svg, fitting_methods, relative_time, share_text
from weft.web.pages.page import page_html, picture_section, table_section

_BEST = ("samples per device", "method", "utilisation", "step", "peak memory", "layout", "why it stands here")
_TRADE_OFF = ("devices", "method", "samples per device", "cost", "time")
_WORDS = ("method", "layout", "why it stands here")


def curve_page(
    curve: Curve, devices: Sequence[int], critical_batch: float, assumed: Sequence[str] = ()
) -> str:
    """Return a self-contained page: both charts, the best layouts, and the trade-off of every method.

    Args:
        curve: at least one layout fits.
        devices: the sizes of clusters.
        critical_batch: in samples.
        assumed: assumptions to state, in words.
    """
    job = curve.problem.job
    points = sorted(curve.points, key=lambda point: point.samples_per_device)
    traded = [
        (
            str(choice.devices),
            method.name,
            share_text(choice.samples_per_device),
            f"{choice.cost:.3g}",
            f"{relative_time(curve, choice):.3g}",
        )
        for method in fitting_methods(curve)
        for choice in curve.trade_offs(method.name, devices, critical_batch)
    ]
    sections = [
        picture_section(
            "curve", "Utilisation, time and cost", partial(curve_svg, curve, devices, critical_batch)
        ),
        table_section("layouts", "Best layouts", _BEST, [_row(point) for point in points], words=_WORDS),
        table_section("trade-off", "Cost and time", _TRADE_OFF, traded, words=_WORDS),
    ]
    subtitle = "; ".join([f"{counted(job.cluster.ranks, 'device')}, {job.precision}", *assumed])
    return page_html(f"Batches of {job.graph.name} on {job.cluster.name}", subtitle, sections)


def _row(point: CurvePoint) -> tuple[str, ...]:
    first = share_text(point.samples_per_device), point.method.name
    if point.candidate is None:
        return (*first, "-", "-", "-", "none fits", point.reason)
    step, peak = format_seconds(point.step_s), format_bytes(point.candidate.peak_bytes)
    return (*first, f"{point.utilisation:.1%}", step, peak, point.candidate.words, point.reason)
