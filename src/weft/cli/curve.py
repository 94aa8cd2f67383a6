"""`weft plan --curve`: utilisation over the batch per device, with the resulting time and cost."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from weft.cli.output import (
    console,
    plain_table,
    print_json,
    progressing,
    ranked_table,
    say_written,
    write_asked,
)
from weft.cli.tables.candidates import candidate_record
from weft.describe.units import counted, format_bytes, format_seconds
from weft.errors import InputError, Violation
from weft.planning.curve import Curve, CurvePoint, curve, default_cluster_sizes, default_critical_batch
from weft.planning.problem import Problem
from weft.web.charts.curve import curve_svg, fitting_methods, relative_time, share_text
from weft.web.pages.curve import curve_page


def curve_record(curve: Curve, devices: Sequence[int], critical_batch: float) -> dict[str, Any]:
    """Return plain figures, None if no layout fits; times and costs are relative as in `trade_off_table`."""
    return {
        "critical_batch": critical_batch,
        "points": [_point_record(point) for point in curve.points],
        "trade_off": [
            {
                "method": method.name,
                "devices": choice.devices,
                "samples_per_device": choice.samples_per_device,
                "utilisation": choice.utilisation,
                "cost": choice.cost,
                "time": relative_time(curve, choice),
            }
            for method in fitting_methods(curve)
            for choice in curve.trade_offs(method.name, devices, critical_batch)
        ],
    }


def utilisation_table(curve: Curve) -> Table:
    """Return a table of the utilisation of each method by samples per device, the best in bold."""
    table = _table("method", [share_text(share) for share in curve.samples_per_device])
    best = {share: curve.best(share).utilisation for share in curve.samples_per_device}
    for method in curve.methods:
        points = [curve.point(method.name, share) for share in curve.samples_per_device]
        cells = [
            "-"
            if point.candidate is None
            else _emphasised(f"{point.utilisation:.1%}", point.utilisation == best[point.samples_per_device])
            for point in points
        ]
        table.add_row(method.name, *cells)
    return table


def layouts_table(points: Iterable[CurvePoint]) -> Table:
    """Return a table of the layouts behind utilisations, or of the reasons if no layout fits."""
    table = ranked_table(("samples", "step", "peak memory"), "best layout, and why it stands here")
    for point in points:
        words = Text(point.method.name, style="bold")
        step, peak = "-", "-"
        if point.candidate is not None:
            step, peak = format_seconds(point.step_s), format_bytes(point.candidate.peak_bytes)
            words.append(f"\n{point.candidate.words}", style="not bold")
        words.append(f"\n{point.reason}", style="not bold dim")
        table.add_row(share_text(point.samples_per_device), step, peak, words)
    return table


def trade_off_table(curve: Curve, devices: Sequence[int], critical_batch: float) -> Table:
    """Return a table of the cost of training on larger clusters, with the cheapest batch of each method.

    Cost 1 is the cost of the least samples at full utilisation. Time 1 is their time on the described
    cluster.
    """
    table = _table("devices", [str(count) for count in devices])
    chosen = {
        method: curve.trade_offs(method.name, devices, critical_batch) for method in fitting_methods(curve)
    }
    least = [min(choices, key=lambda choice: choice.cost) for choices in zip(*chosen.values(), strict=True)]
    for method, choices in chosen.items():
        cells = [
            _emphasised(f"{choice.cost:.3g} at {share_text(choice.samples_per_device)}", choice == best)
            for choice, best in zip(choices, least, strict=True)
        ]
        table.add_row(method.name, *cells)
    table.add_row("least time", *(f"{relative_time(curve, choice):.3g}" for choice in least), style="dim")
    return table


def _point_record(point: CurvePoint) -> dict[str, Any]:
    record = {
        "method": point.method.name,
        "samples_per_device": point.samples_per_device,
        "utilisation": None if point.candidate is None else point.utilisation,
        "reason": point.reason,
    }
    if point.candidate is not None:
        record.update(
            {key: value for key, value in candidate_record(point.candidate).items() if key not in record}
        )
    return record


def _table(first: str, others: Sequence[str]) -> Table:
    table = plain_table()
    table.add_column(first)
    for name in others:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _emphasised(text: str, best: bool) -> str:
    return f"[bold]{text}[/bold]" if best else text


# A table of 80 columns has room for every third cluster size.
SHOWN_EVERY = 3


def show_curve(
    problem: Problem,
    *,
    critical_batch: float | None,
    every: bool,
    svg: Path | None,
    report: Path | None,
    json: bool,
) -> None:
    """Search the best layouts of all methods, print them, and draw them to `svg` and on the page `report`.

    The text lists the best layout for each number of samples per device; with `every`, that of each method.

    Raises:
        InputError: if the critical batch is not positive, no layout fits, or `curve` raises it.
    """
    if critical_batch is not None and not critical_batch > 0:
        raise InputError(Violation("--critical-batch", f"{critical_batch:g} samples; more than 0 is needed"))
    assumed = {key: text for key, text in problem.assumed.items() if key != "global_batch"}
    if critical_batch is None:
        critical_batch = default_critical_batch(problem.job)
        assumed["critical_batch"] = f"{critical_batch:.0f} samples, by the model's size (arXiv 2001.08361)"
    with progressing("searching the best layouts of each batch") as progress:
        answer = curve(problem, report=progress)
    if not any(point.candidate for point in answer.points):
        raise InputError([Violation("no layout fits", point.reason) for point in answer.points[:1]])
    devices, job = default_cluster_sizes(problem.job), problem.job
    title = f"{job.graph.name} on {job.cluster.name}, {job.precision}"
    said = [f"assumed {key.replace('_', ' ')}: {text}" for key, text in assumed.items()]
    drawing = partial(curve_svg, answer, devices, critical_batch, title=title)
    page = partial(curve_page, answer, devices, critical_batch, said)
    write_asked([(svg, drawing), (report, page)])
    if json:
        print_json({"assumed": assumed, **curve_record(answer, devices, critical_batch)})
        return
    out = console()
    out.print(
        f"[bold]{job.graph.name}[/bold] on {job.cluster.name}: "
        f"{counted(job.cluster.ranks, 'device')}, {job.precision}"
    )
    for text in said:
        out.print(f"[dim]{text}[/dim]")
    out.print("\nutilisation by samples per device: flops of the model over the devices' peak")
    out.print(utilisation_table(answer))
    points = [answer.best(share) for share in answer.samples_per_device]
    if every:
        points = sorted(answer.points, key=lambda point: point.samples_per_device)
    out.print("\nlayouts" if every else "\nbest layouts; --all lists those of every method")
    out.print(layouts_table(points))
    out.print(
        f"\ncost at the cheapest samples per device, critical batch {critical_batch:.0f} samples;\n"
        "1 is the least samples at full utilisation, and a time of 1 is what they take on these devices"
    )
    out.print(trade_off_table(answer, devices[::SHOWN_EVERY], critical_batch))
    say_written(svg, report)
