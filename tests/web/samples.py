"""A realistic run for the tests of pictures and reports: two ranks, breadth-first, simulated with noise."""

from __future__ import annotations

import dataclasses

import numpy as np

from weft.predict.abstract import simulate_schedule
from weft.predict.costs import Costs
from weft.predict.simulator import simulate
from weft.program.kinds import BACKWARD, FORWARD, KINDS, SEND_ACTIVATION, SEND_GRADIENT, STEP
from weft.program.program import Program
from weft.timeline.timeline import TIMELINE_COLUMNS, Timeline
from weft.web.pages.report_data import RankMemory, ReportData, StepInterval

HOSTILE = (
    "</script><script>window.harmed = true</script>"
    "<img src=x onerror=\"window.harmed = true\"> & {{data}} 'quoted'"
)


def breadth_first(devices: int = 4, loops: int = 2, micro_batches: int = 8) -> Timeline:
    return simulate_schedule(
        "breadth-first", devices=devices, loops=loops, micro_batches=micro_batches
    ).timeline


def without_rows(timeline: Timeline) -> Timeline:
    empty = {name: getattr(timeline, name)[:0] for name in TIMELINE_COLUMNS}
    return dataclasses.replace(timeline, **empty)


def sample_program(micro_batches: int = 8) -> Program:
    return simulate_schedule("breadth-first", devices=2, loops=2, micro_batches=micro_batches).program


def simulated_step(program: Program, step: int, spread: float = 0.0) -> Timeline:
    """One step whose durations are off by about `spread`, drawn for this step only."""
    occupancy_ns = np.zeros(len(KINDS))
    for kind, duration_ms in (
        (FORWARD, 9.0),
        (BACKWARD, 18.0),
        (SEND_ACTIVATION, 1.1),
        (SEND_GRADIENT, 1.3),
        (STEP, 6.0),
    ):
        occupancy_ns[kind] = duration_ms * 1e6
    noise = np.random.Generator(np.random.Philox(step)).lognormal(0.0, spread, len(program))
    costs = Costs(
        occupancy=(occupancy_ns[program.columns.kind] * noise).astype(np.int64),
        latency=np.zeros(len(program), dtype=np.int64),
        tick_s=1e-9,
        synchronous=np.ones(program.ranks, dtype=np.bool_),
        live_bytes=np.zeros(len(program), dtype=np.int64),
        base_bytes=np.zeros(program.ranks, dtype=np.int64),
    )
    timeline = simulate(program, costs, max_cycles=1).timeline
    return dataclasses.replace(timeline, run="demo", plan_id="5f1e", step=np.full(len(timeline), step))


def measured_steps(program: Program, steps: int) -> Timeline:
    """Consecutive noisy steps; the first two are slow, as they are where code is loaded and compiled."""
    parts, start_ns = [], 0
    for step in range(steps):
        one = simulated_step(program, step, spread=0.08 if step > 1 else 0.6)
        shift = start_ns - int(one.start_ns.min())
        moved = {name: getattr(one, name) + shift for name in ("posted_ns", "start_ns", "end_ns")}
        parts.append(dataclasses.replace(one, **moved))
        start_ns = int(parts[-1].end_ns.max()) + 2_000_000
    columns = {name: np.concatenate([getattr(part, name) for part in parts]) for name in TIMELINE_COLUMNS}
    return Timeline(run="demo", plan_id="5f1e", clock="monotonic", **columns)


def replicated(timeline: Timeline, replicas: int) -> Timeline:
    """The same on more ranks, with ids and micro-batches of their own."""
    ranks, batches = (int(column.max()) + 1 for column in (timeline.rank, timeline.micro_batch))
    columns = {name: np.tile(getattr(timeline, name), replicas) for name in TIMELINE_COLUMNS}
    replica = np.repeat(np.arange(replicas), len(timeline))
    columns["id"] = columns["id"] ^ replica.astype(columns["id"].dtype)
    columns["rank"] = columns["rank"] + ranks * replica
    moved = columns["micro_batch"] + batches * replica
    columns["micro_batch"] = np.where(columns["micro_batch"] < 0, columns["micro_batch"], moved)
    return dataclasses.replace(timeline, **columns)


def sample_report(
    run: str = "demo", steps: int = 40, micro_batches: int = 8, replicas: int = 1
) -> ReportData:
    program = sample_program(micro_batches)
    predicted = replicated(simulated_step(program, 0), replicas)
    measured = replicated(measured_steps(program, steps), replicas)
    seconds = [
        float(measured.end_ns[rows].max() - measured.start_ns[rows].min()) / 1e9
        for rows in (measured.step == step for step in range(steps))
    ]
    step_s = float(predicted.end_ns.max()) / 1e9
    losses = [(step, 2.4 + 3.1 * 0.9**step + 0.05 * ((step * 7) % 5)) for step in range(steps)]
    live = [
        (0.01 * index, 61_000_000 + 9_000_000 * min(index, 16, max(0, 40 - index))) for index in range(45)
    ]
    return ReportData(
        run=run,
        model="gpt-1m",
        cluster="this-machine",
        plan=(
            ("plan", "5f1e0a77c2d4b913"),
            ("mesh", "pp 2 x dp 1"),
            ("schedule", "breadth-first, 2 loops"),
            ("micro-batches", f"{micro_batches} of 4 samples"),
            ("stage 0", "embedding to block.0, ranks 0"),
            ("stage 1", "block.1, ranks 1"),
            ("stage 2", "block.2, ranks 0"),
            ("stage 3", "block.3 to head, ranks 1"),
        ),
        predicted=predicted,
        measured=measured,
        interval=StepInterval(step_s=step_s, low_s=0.9 * step_s, high_s=1.1 * step_s),
        step_times=list(enumerate(seconds)),
        losses=losses,
        held_out=[(0, 5.62), (steps // 2, 3.1), (steps, 2.51)],
        memory=[
            RankMemory(
                rank=0,
                predicted_bytes=205_000_000,
                measured_bytes=331_000_000,
                capacity_bytes=512_000_000,
                live=live,
            ),
            RankMemory(rank=1, predicted_bytes=188_000_000, measured_bytes=317_000_000, live=live[::2]),
        ],
        summary={
            "predicted_step_s": step_s,
            "measured_step_s": float(np.median(seconds)),
            "steps": steps,
            "tokens_per_s": 21_400.0,
            "final_loss": 2.51,
            "max_rss_bytes": [331_000_000, 317_000_000],
            "plan": "plan.json",
        },
    )
