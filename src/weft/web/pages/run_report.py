"""The `report.html` of a run directory, built from its files and plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from weft.describe.plan import Plan, precision_words, shared_out
from weft.describe.plan_versions import current_id
from weft.describe.synchronisation import sync_words
from weft.planning.planned import PlannedJob
from weft.planning.report_sections import sections_of
from weft.predict.live_bytes import live_curve
from weft.timeline.timeline import Timeline
from weft.training.directory.run_directory import RunDirectory
from weft.web.pages.report import write_report
from weft.web.pages.report_data import RankMemory, ReportData, StepInterval


def write_run_report(directory: RunDirectory, planned: PlannedJob) -> Path:
    """Write `report.html` into the run directory and return its path."""
    path = directory.path / "report.html"
    write_report(path, run_report_data(directory, planned))
    return path


def run_report_data(directory: RunDirectory, planned: PlannedJob) -> ReportData:
    """Return the contents of the page of one finished run."""
    metrics = directory.metrics()
    summary = directory.summary()
    prediction = planned.prediction
    return ReportData(
        run=directory.name,
        model=planned.plan.model,
        cluster=planned.plan.cluster,
        plan=plan_in_words(planned),
        predicted=_of(planned.plan, directory.predicted()),
        measured=_of(planned.plan, directory.measured()),
        interval=StepInterval(
            step_s=prediction.step_s, low_s=prediction.step_low_s, high_s=prediction.step_high_s
        ),
        step_times=[(row["step"], row["step_s"]) for row in metrics],
        losses=[(row["step"], row["loss"]) for row in metrics],
        held_out=[(0, summary["first_loss"]), (summary["steps"], summary["final_loss"])],
        memory=_memory(planned, summary.get("max_device_bytes") or summary["max_rss_bytes"]),
        summary=summary,
        sections=sections_of(planned, metrics),
    )


def _of(plan: Plan, timeline: Timeline) -> Timeline:
    """Return a timeline with the plan's current id, even if an earlier version of weft wrote it."""
    return replace(timeline, plan_id=current_id(timeline.plan_id, plan))


def plan_in_words(planned: PlannedJob) -> list[tuple[str, str]]:
    """Return the plan's decisions as (name, decision) rows."""
    plan = planned.plan
    layers = planned.problem.job.graph.layers
    stages = [
        (
            f"stage {index}",
            f"{layers[stage.layers[0]].name} to {layers[stage.layers[-1]].name}, ranks "
            + ", ".join(str(rank) for copy in stage.replicas for rank in copy.ranks),
        )
        for index, stage in enumerate(plan.stages)
    ]
    return [
        ("plan", plan.plan_id),
        ("mesh", " x ".join(f"{axis} {degree}" for axis, degree in plan.mesh.items())),
        ("schedule", plan.schedule.name),
        ("global batch", f"{plan.global_batch} samples of {plan.sequence} tokens"),
        ("micro-batches", f"{plan.micro_batches} of {plan.micro_batch_size} samples"),
        ("precision", precision_words(plan)),
        ("sharding", shared_out(plan)),
        ("synchronisation", sync_words(plan.sync)),
        *stages,
    ]


def _memory(planned: PlannedJob, measured_bytes: list[int]) -> list[RankMemory]:
    return [
        RankMemory(
            rank=rank,
            predicted_bytes=predicted,
            measured_bytes=measured_bytes[rank] if rank < len(measured_bytes) else None,
            capacity_bytes=planned.problem.job.cluster.device_of(rank).memory_bytes,
            live=live_curve(planned.program, planned.predicted, rank),
        )
        for rank, predicted in enumerate(planned.prediction.peak_bytes)
    ]
