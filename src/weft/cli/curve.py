"""`weft plan --curve`: utilisation over the batch per device, with the resulting time and cost."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from weft.cli.output import console, print_json
from weft.cli.tables.curve import curve_record, layouts_table, trade_off_table, utilisation_table
from weft.errors import InputError, Violation
from weft.planning.curve import curve, default_cluster_sizes, default_critical_batch
from weft.planning.problem import Problem
from weft.web.charts.curve import curve_svg

# A table of 80 columns has room for every third cluster size.
SHOWN_EVERY = 3


def show_curve(problem: Problem, *, critical_batch: float | None, svg: Path | None, json: bool) -> None:
    """Search the best layouts of all methods, and print or draw them.

    Raises:
        InputError: if the critical batch is not positive, no layout fits, or `curve` raises it.
    """
    if critical_batch is not None and not critical_batch > 0:
        raise InputError(Violation("--critical-batch", f"{critical_batch:g} samples; more than 0 is needed"))
    assumed = {key: text for key, text in problem.assumed.items() if key != "global_batch"}
    if critical_batch is None:
        critical_batch = default_critical_batch(problem.job)
        assumed["critical_batch"] = f"{critical_batch:.0f} samples, by the model's size (arXiv 2001.08361)"
    answer = curve(problem)
    if not any(point.candidate for point in answer.points):
        raise InputError([Violation("no layout fits", point.reason) for point in answer.points[:1]])
    devices = default_cluster_sizes(problem.job)
    if svg is not None:
        svg.write_text(curve_svg(answer, devices, critical_batch), encoding="utf-8")
    if json:
        print_json({"assumed": assumed, **curve_record(answer, devices, critical_batch)})
        return
    out = console()
    job = problem.job
    out.print(
        f"[bold]{job.graph.name}[/bold] on {job.cluster.name}: {job.cluster.ranks} devices, {job.precision}"
    )
    for key, text in assumed.items():
        out.print(f"[dim]assumed {key.replace('_', ' ')}: {text}[/dim]")
    out.print("\nutilisation by samples per device: flops of the model over the devices' peak")
    out.print(utilisation_table(answer))
    out.print("\nlayouts")
    out.print(layouts_table(answer))
    out.print(
        f"\ncost at the cheapest samples per device, critical batch {critical_batch:.0f} samples;\n"
        "1 is the least samples at full utilisation, and a time of 1 is what they take on these devices"
    )
    out.print(trade_off_table(answer, devices[::SHOWN_EVERY], critical_batch))
    if svg is not None:
        print(f"wrote {svg}")


def refuse_options(names: Sequence[str], problem: str) -> None:
    """Refuse options that make no sense with the others.

    Raises:
        InputError: if there are names; it names each of them.
    """
    if names:
        raise InputError([Violation(name, problem) for name in names])
