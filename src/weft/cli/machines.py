"""Commands about this machine: `doctor`, `measure`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from weft.capture.doctor import MachinePart, examine
from weft.capture.measure import DEGREES_OPTION, MICRO_BATCH_SIZES, RANKS_OPTION, counts_of
from weft.capture.measure import measure as measure_machine
from weft.capture.mixed import measure_mixed
from weft.cli.node_links import measure_links
from weft.cli.output import Json, console, print_json, progressing, refuse_options
from weft.describe.cluster import Cluster
from weft.describe.model import ModelConfig
from weft.describe.models import resolve_model
from weft.describe.units import format_bytes, format_seconds
from weft.destinations import require_folder
from weft.errors import InputError, Violation
from weft.files import weft_home
from weft.lab.inside import lab_cluster
from weft.predict.profile import LayerProfile

_SEQUENCE = "--sequence"
_MICRO_BATCHES = "--micro-batches"


def doctor(*, json: Json = False) -> int:
    """List this machine's parts and abilities; a remedy for each missing one.

    - `weft doctor`
    """
    findings = examine()
    if json:
        print_json([finding.record() for finding in findings])
    else:
        table = Table(box=None, pad_edge=False)
        for title in ("", "part", "found", "remedy"):
            table.add_column(title)
        for finding in findings:
            table.add_row(_mark(finding), *(escape(text) for text in finding.texts))
        console().print(table)
    return 1 if any(finding.needed and not finding.good for finding in findings) else 0


def _mark(finding: MachinePart) -> str:
    if finding.good:
        return "[green]ok[/green]"
    return "[red]missing[/red]" if finding.needed else "[yellow]optional[/yellow]"


def measure(
    model: str | None = None,
    /,
    *,
    sequence: int | None = None,
    precision: str | None = None,
    tensor_parallel: str | None = None,
    micro_batches: str | None = None,
    ranks: str | None = None,
    nodes: Path | None = None,
    json: Json = False,
) -> None:
    """Measure this machine's devices and links, and a model's layers.

    Inside `weft lab`, measure the links between the lab's nodes, and the layers on each kind of its devices.

    - `weft measure gpt-1m`
    - `srun --ntasks-per-node 8 weft measure --nodes cluster.toml`

    Parameters
    ----------
    model
        A preset, a folder with a config.json, or such a file; default: measure the machine alone.
    sequence
        Tokens per sample; default: the longest sequence of the model.
    precision
        fp32, bf16, fp16 or fp64; default: the planner's choice on this machine.
    tensor_parallel
        Degrees of tensor parallelism to measure, such as 1,2; default: 1. Rows of other degrees are kept.
    micro_batches
        Sizes of micro-batches to measure, such as 1,2,4,8,16; default: 1,2,4,8.
    ranks
        Numbers of ranks to measure collectives among, such as 2,4; on CPUs also more than cores. Default:
        powers of two up to this machine's devices, and all of them.
    nodes
        A CLUSTER.toml: measure the links of the nodes that run this command, one rank for each device.
    """
    require_folder(weft_home())
    of_layers = {_SEQUENCE: sequence, DEGREES_OPTION: tensor_parallel, _MICRO_BATCHES: micro_batches}
    if nodes is not None:
        given = {"MODEL": model, "--precision": precision, RANKS_OPTION: ranks, **of_layers}
        refuse_options(given, "does not go with --nodes, which measures links")
        measure_links(nodes, as_json=json)
        return
    idle = [(name, value) for name, value in of_layers.items() if value is not None]
    if model is None and idle:
        what = "is about the layers of a model; name one"
        raise InputError(
            [Violation(name, what, f"weft measure gpt-1m {name} {value}") for name, value in idle]
        )
    config = resolve_model(model, sequence=sequence) if model is not None else None
    degrees = (1,) if tensor_parallel is None else counts_of(DEGREES_OPTION, tensor_parallel)
    sizes = MICRO_BATCH_SIZES if micro_batches is None else counts_of(_MICRO_BATCHES, micro_batches)
    counts = counts_of(RANKS_OPTION, ranks) if ranks is not None else ()
    if (cluster := lab_cluster()) is not None:
        if counts:
            raise InputError(Violation(RANKS_OPTION, "a lab measures its links alone"))
        _measure_lab(cluster, config, precision, sizes, degrees, json)
        return
    with progressing("measuring") as report:
        measured = measure_machine(
            config,
            precision=precision,
            micro_batch_sizes=sizes,
            tensor_degrees=degrees,
            ranks=counts,
            report=report,
        )
    machine = measured.machine
    if json:
        print_json({"device": machine.device, "files": [str(path) for path in measured.files]})
        return
    out = console()
    for name, rows in machine.matmul.items():
        out.print(f"{machine.device}: {name} matmul up to {max(rate for _, rate in rows) / 1e9:,.0f} GFLOP/s")
    out.print(f"{machine.device}: memory up to {format_bytes(max(rate for _, rate in machine.memory))}/s")
    if machine.message:
        size, seconds = machine.message[-1]
        latency = format_seconds(machine.message[0][1])
        out.print(f"link: {latency} latency, {format_bytes(size / seconds)}/s between two ranks")
    for count, rows in machine.collectives.get("all_reduce", {}).items():
        size, seconds = rows[-1]
        out.print(f"all-reduce: {format_bytes(size)} among {count} ranks in {format_seconds(seconds)}")
    if measured.profile is not None:
        out.print(_layer_table([measured.profile]))
    for path in measured.files:
        out.print(f"wrote {path}", soft_wrap=True)


def _measure_lab(
    cluster: Cluster,
    config: ModelConfig | None,
    precision: str | None,
    sizes: tuple[int, ...],
    degrees: tuple[int, ...],
    json: bool,
) -> None:
    with progressing("measuring") as report:
        measured = measure_mixed(
            cluster,
            config,
            precision=precision,
            micro_batch_sizes=sizes,
            tensor_degrees=degrees,
            report=report,
        )
    if json:
        devices = sorted({group.device.name for group in cluster.groups})
        print_json({"devices": devices, "files": [str(path) for path in measured.files]})
        return
    out = console()
    for pair, link in sorted(measured.cluster.links.items()):
        described = format_bytes(cluster.links[pair].bytes_per_s)
        out.print(
            f"link {' - '.join(pair)}: {format_seconds(link.latency_s)} latency, "
            f"{format_bytes(link.bytes_per_s)}/s of {described}/s described"
        )
    if measured.profiles:
        out.print(_layer_table(measured.profiles))
    for path in measured.files:
        out.print(f"wrote {path}", soft_wrap=True)


def _layer_table(profiles: Sequence[LayerProfile]) -> Table:
    titles = ("device", "layer", "tp", "micro-batch size", "forward", "backward", "update")
    table = Table(*titles, box=None, pad_edge=False)
    for timing in (timing for profile in profiles for timing in profile.timings):
        seconds = (timing.forward_s, timing.backward_s, timing.update_s)
        counts = (str(timing.tp), str(timing.micro_batch_size))
        table.add_row(timing.device, timing.layer, *counts, *map(format_seconds, seconds))
    return table
