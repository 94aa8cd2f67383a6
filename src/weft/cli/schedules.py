"""The command about schedules on abstract stages: `schedule`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Group, Parameter

from weft.cli.output import Flag, Json, WrittenPicture, console, print_json, print_timeline
from weft.describe.units import counted
from weft.errors import InputError, Violation
from weft.predict.abstract import read_stage_times, simulate_schedule
from weft.program.table import format_program

# Options that few need: short help has their names alone.
TIMES = Group("Times", sort_key=1)
SINGLE = Group("Options of single schedules", sort_key=2)
# Some seconds of simulation.
MOST_PASSES = 2**16


def schedule(
    name: str,
    /,
    *,
    ranks: int = 4,
    loops: int | None = None,
    micro_batches: int = 8,
    forward: Annotated[float | None, Parameter(group=TIMES)] = None,
    backward: Annotated[float | None, Parameter(group=TIMES)] = None,
    hop: Annotated[float, Parameter(group=TIMES)] = 0.0,
    weight_share: Annotated[float, Parameter(group=TIMES)] = 0.5,
    group_size: Annotated[int | None, Parameter(group=SINGLE)] = None,
    depth: Annotated[int | None, Parameter(group=SINGLE)] = None,
    k: Annotated[int | None, Parameter(group=SINGLE)] = None,
    whole: Annotated[str | None, Parameter(group=SINGLE)] = None,
    edges: str | None = None,
    frozen_stages: int = 0,
    stage_times: Annotated[Path | None, Parameter(group=TIMES)] = None,
    dump: Flag = False,
    json: Json = False,
    svg: WrittenPicture | None = None,
) -> None:
    """Draw a schedule on abstract stages and print its figures.

    - `weft schedule breadth-first --ranks 4 --loops 2 --micro-batches 8`
    - `weft schedule depth-first --ranks 4 --loops 2 --micro-batches 8 --group-size 8`
    - `weft schedule graph-1f1b --ranks 4 --edges 0-1,0-2,1-3,2-3`

    Parameters
    ----------
    name
        The schedule.
    ranks
        Pipeline devices.
    loops
        Stages per device; default: 1.
    micro_batches
        Micro-batches per step.
    forward
        Time of one micro-batch's forward through all local stages of a device; default: 1.
    backward
        Time of its backward; default: 2.
    hop
        Latency of one message from stage to stage.
    weight_share
        Part of the backward that computes the weight gradient, for schedules that split it.
    group_size
        With depth-first: micro-batches that go through a stage before the device starts its next stage.
    depth
        With hybrid: rounds of breadth-first.
    k
        With graph-1f1b: micro-batches in a turn forward and in one backward.
    whole
        With graph-zb-h1: the stages with whole backwards, such as 0,2.
    edges
        The edges of a graph of stages, such as 0-1,0-2,1-3,2-3; default: a chain.
    frozen_stages
        The number of untrained stages at the beginning: they have no backward.
    stage_times
        A CSV file with the heading forward,backward and the times of every stage; default: uniform times.
    dump
        List every instruction: a table, or with --json the list in place of the count.
    svg
        Write the picture to this file.
    """
    passes = ranks * (loops or 1) * micro_batches
    if passes > MOST_PASSES:
        problem = f"{passes:,} forward passes (ranks x loops x micro-batches); most: {MOST_PASSES:,}"
        near = str(max(1, ranks * MOST_PASSES // passes))
        raise InputError(Violation("--ranks", problem, near))
    options = {"group_size": group_size, "depth": depth, "k": k, "whole": whole}
    figures = simulate_schedule(
        name,
        devices=ranks,
        loops=loops,
        micro_batches=micro_batches,
        forward=forward,
        backward=backward,
        hop=hop,
        weight_share=weight_share,
        stage_times=None if stage_times is None else read_stage_times(stage_times),
        frozen_stages=frozen_stages,
        edges=None if edges is None else _edges(edges),
        options={option: value for option, value in options.items() if value is not None},
    )
    record = figures.record(dump=dump and json)
    if json:
        print_json(record)
        return
    console().print(
        f"[bold]{name}[/bold]: {counted(ranks, 'device')}, {counted(figures.loops, 'loop')}, "
        f"{counted(micro_batches, 'micro-batch')}; "
        f"makespan {record['makespan_s']:g}, bubble {record['bubble_fraction']:.1%} of the time "
        f"({record['bubble_overhead']:.1%} over ideal), in flight {record['peak_in_flight']}"
    )
    if dump:
        print(format_program(figures.program), end="")
    print_timeline(
        figures.timeline, svg, f"{name}, {counted(ranks, 'device')}, {counted(micro_batches, 'micro-batch')}"
    )


def _edges(text: str) -> list[tuple[int, int]]:
    """Return the edges of a stage graph from words such as 0-1,1-2."""
    pairs = [word.strip().split("-") for word in text.split(",")]
    odd = [word for word in pairs if len(word) != 2 or not all(end.isdecimal() for end in word)]
    if odd:
        raise InputError(Violation("--edges", f"{'-'.join(odd[0])!r} is no edge of two stages", "0-1"))
    return [(int(producer), int(consumer)) for producer, consumer in pairs]
