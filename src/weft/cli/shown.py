"""Commands about one plan: `show`, `simulate`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from weft.cli.codecs import codec_record, print_codecs
from weft.cli.output import (
    Flag,
    Json,
    WrittenFile,
    WrittenPicture,
    console,
    print_json,
    print_timeline,
    refuse_options,
    say_written,
    write_asked,
)
from weft.cli.rankings import planned_visibly
from weft.cli.schedules import schedule
from weft.cli.tables.plan import (
    breakdown_text,
    chance_text,
    cluster_table,
    host_memory_text,
    memory_bars,
    memory_parts_table,
    stages_table,
    throughput_text,
)
from weft.describe.cluster import Cluster, NodeGroup
from weft.describe.plan import precision_words
from weft.describe.reading import holds_json
from weft.describe.run_file import load_run, naming
from weft.describe.units import counted, format_bytes, format_seconds
from weft.errors import InputError, Violation
from weft.planning.planned_job import PlannedJob
from weft.planning.problem import Problem, problem_of_run
from weft.predict.predict import PredictedStep
from weft.program.kinds import KINDS
from weft.program.program import NONE
from weft.program.table import format_program
from weft.timeline.figures import bubble_fraction, busy_by_kind, peak_in_flight
from weft.training.session import job_in
from weft.web.pages.plan import show_page


def show(
    source: str,
    name: str | None = None,
    /,
    *,
    model: str | None = None,
    on: str | None = None,
    ranks: int | None = None,
    loops: int | None = None,
    micro_batches: int | None = None,
    program: Flag = False,
    svg: WrittenPicture | None = None,
    report: WrittenFile | None = None,
) -> None:
    """Show a plan: cluster, stages, memory and timeline. With `schedule NAME`: the timeline alone.

    - `weft show runs/demo`
    - `weft show plan.json --report plan.html`
    - `weft show schedule breadth-first`

    Parameters
    ----------
    source
        A run directory, a PLAN.json, a RUN.toml, or the word schedule.
    name
        With schedule: its name.
    model
        Show the plan for this model instead: a preset or a folder with a config.json.
    on
        Show the plan on this cluster instead: an expression such as 64xa100-80gb, or a CLUSTER.toml.
    ranks
        With schedule: pipeline devices; default: 4.
    loops
        With schedule: stages per device; default: 1.
    micro_batches
        With schedule: micro-batches; default: 8.
    program
        Print the table of the program instead.
    svg
        Write the timeline to this file as a picture.
    report
        Write everything to this file as a page.
    """
    if source == "schedule":
        if name is None:
            raise InputError(Violation("show schedule", "which one? give its name"))
        of_plans = {"--model": model, "--on": on, "--program": program or None, "--report": report}
        refuse_options(of_plans, "a schedule alone has no model and no cluster")
        devices, count = 4 if ranks is None else ranks, 8 if micro_batches is None else micro_batches
        schedule(name, ranks=devices, loops=loops, micro_batches=count, svg=svg)
        return
    of_schedules = {"NAME": name, "--ranks": ranks, "--loops": loops, "--micro-batches": micro_batches}
    refuse_options(of_schedules, "only with the word schedule as the source")
    planned = job_in(Path(source), model=model, on=on, plan_by=planned_visibly)
    if program:
        print(format_program(planned.program), end="")
        return
    out, plan, cluster = console(), planned.plan, planned.problem.job.cluster
    out.print(f"[bold]{plan.model}[/bold] on {plan.cluster}, plan {plan.plan_id}, {precision_words(plan)}")
    out.print(cluster_table(cluster, plan), highlight=False)
    out.print(stages_table(planned), highlight=False)
    out.print(memory_bars(planned.prediction.peak_bytes, planned.memory_bytes))
    out.print(chance_text(planned))
    out.print(f"memory of rank {planned.fullest_rank} at its peak:")
    out.print(memory_parts_table(planned.memory_parts(planned.fullest_rank)), highlight=False)
    _print_host_memory(planned)
    prediction = planned.predicted.prediction
    low, high = format_seconds(prediction.step_low_s), format_seconds(prediction.step_high_s)
    step = f"{format_seconds(prediction.step_s)} ({low} to {high}, {prediction.source})"
    out.print(f"a step of {step}: {_breakdown(planned)}")
    print_codecs(planned)
    out.print(throughput_text(planned))
    print_timeline(planned.predicted.simulation.timeline, svg, f"{plan.model}, predicted step")
    write_asked([(report, lambda: show_page(planned))])
    say_written(report)


def _print_host_memory(planned: PlannedJob) -> None:
    """Print what ranks keep in the memory of their hosts, if they keep something."""
    held = planned.in_host_memory
    if held:
        console().print(host_memory_text(held, planned.problem.job.cluster), highlight=False)


def _breakdown(planned: PlannedJob) -> str:
    return breakdown_text(planned.step_breakdown, planned.launching_share)


def simulate(
    source: str,
    /,
    *,
    model: str | None = None,
    on: str | None = None,
    ranks: int | None = None,
    svg: WrittenPicture | None = None,
    json: Json = False,
) -> None:
    """Predict one step of a run file, a run directory or a plan file.

    - `weft simulate run.toml`
    - `weft simulate runs/demo --json`
    - `weft simulate plan.json --on 64xh100-80gb`

    Parameters
    ----------
    source
        A RUN.toml, a run directory or a PLAN.json.
    model
        Predict the plan for this model instead: a preset or a folder with a config.json.
    on
        Predict the plan on this cluster instead: an expression such as 64xa100-80gb, or a CLUSTER.toml.
    ranks
        Plan a RUN.toml as if its cluster had this many devices of the same kind; needs no hardware.
    svg
        Write the predicted step to this file as a picture.
    """
    planned = _job_of(Path(source), model, on, ranks)
    record = simulation_record(planned, planned.predicted)
    if json:
        parts = planned.memory_parts(planned.fullest_rank)
        memory = {part.name: round(part.value) for part in parts}
        print_json({**record, **codec_record(planned), "memory": memory})
        return
    out = console()
    out.print(
        f"[bold]{planned.plan.model}[/bold] on {planned.plan.cluster}: {counted(planned.plan.ranks, 'rank')}"
    )
    out.print(
        f"step {format_seconds(record['step_s'])} (first {format_seconds(record['first_step_s'])}), "
        f"bubble {record['bubble_fraction']:.1%}, peak {format_bytes(max(record['peak_bytes']))}, "
        f"{record['instructions']} instructions simulated in {format_seconds(record['simulate_s'])}"
    )
    _print_host_memory(planned)
    out.print(_breakdown(planned))
    print_codecs(planned)
    print_timeline(planned.predicted.simulation.timeline, svg, f"{planned.plan.model}, predicted step")


def _job_of(source: Path, model: str | None, on: str | None, ranks: int | None) -> PlannedJob:
    if ranks is None:
        return job_in(source, model=model, on=on, plan_by=planned_visibly)
    if source.is_dir() or holds_json(source):
        raise InputError(Violation("--ranks", "a plan names its ranks; give the run file"))
    run = naming(load_run(source), model=model, on=on)
    return planned_visibly(run, problem=with_ranks(problem_of_run(run), ranks))


def simulation_record(planned: PlannedJob, predicted: PredictedStep) -> dict[str, Any]:
    """Return the JSON answer; seconds, bytes and counts."""
    simulation = predicted.simulation
    kinds = planned.program.columns.kind[planned.program.columns.rank == 0]
    in_host = {name: held.tolist() for name, held in planned.in_host_memory.items()}
    return {
        "plan_id": planned.plan.plan_id,
        **predicted.prediction.step_record,
        "step_s": simulation.step_s,
        "first_step_s": simulation.first_step_s,
        "bubble_fraction": bubble_fraction(simulation.timeline),
        "peak_in_flight": peak_in_flight(planned.program),
        "peak_bytes": [int(value) for value in simulation.peak_bytes],
        "peak_high_bytes": list(predicted.prediction.peak_high_bytes),
        "chance_to_fit": predicted.prediction.chance_to_fit(planned.unreserved_bytes),
        "peak_instruction": [
            str(planned.program.instruction(position)) if position != NONE else None
            for position in simulation.peak_positions.tolist()
        ],
        **({"host_bytes": in_host} if in_host else {}),
        "gathers": int((kinds == KINDS.code("gather")).sum()),
        "reduces": int((kinds == KINDS.code("reduce")).sum()),
        "instructions": simulation.instructions,
        "breakdown": busy_by_kind(simulation.timeline),
        "step_breakdown": planned.step_breakdown,
        "launching_share": planned.launching_share,
        "simulate_s": simulation.simulate_s,
    }


def with_ranks(problem: Problem, ranks: int) -> Problem:
    """Return the problem on a cluster of `ranks` devices of the same one kind.

    Raises:
        InputError: when the cluster is mixed or the count does not fill nodes.
    """
    if len(problem.job.cluster.groups) != 1:
        raise InputError(
            Violation("--ranks", "the cluster has several kinds of nodes; describe it in a file")
        )
    cluster = resized(problem.job.cluster, ranks)
    return replace(problem, job=replace(problem.job, cluster=cluster))


def resized(cluster: Cluster, ranks: int) -> Cluster:
    """Return a cluster of equal nodes with `ranks` devices."""
    group = cluster.groups[0]
    if ranks < 1 or (ranks > group.devices and ranks % group.devices):
        near = max(group.devices, group.devices * round(ranks / group.devices))
        raise InputError(
            Violation(
                "--ranks",
                f"{counted(ranks, 'rank')} on nodes of {counted(group.devices, 'device')}",
                str(near),
            )
        )
    count, devices = (1, ranks) if ranks <= group.devices else (ranks // group.devices, group.devices)
    groups: tuple[NodeGroup, ...] = (replace(group, count=count, devices=devices),)
    links = dict(cluster.links) or {(group.name, group.name): group.link}
    return replace(cluster, name=f"{ranks}x{group.device.name}", groups=groups, links=links)
