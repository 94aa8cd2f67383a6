"""The page of `weft show --report`: a plan's cluster, stages, memory and one predicted step."""

from __future__ import annotations

from weft.describe.plan import precision_words, shared_out
from weft.describe.units import format_seconds
from weft.planning.planned import PlannedJob
from weft.web.charts.cluster import cluster_svg
from weft.web.charts.memory import memory_svg
from weft.web.charts.timeline import timeline_svg
from weft.web.pages.page import page_html, picture_section, table_section
from weft.web.rows.plan import BREAKDOWN_HEAD, STAGE_HEAD, breakdown_rows, stage_rows


def show_page(planned: PlannedJob) -> str:
    """Return a self-contained page of a plan and its prediction."""
    plan, cluster = planned.plan, planned.problem.job.cluster
    prediction = planned.prediction
    memory = [cluster.device_of(rank).memory_bytes for rank in range(plan.ranks)]
    subtitle = (
        f"plan {plan.plan_id}: {plan.global_batch} samples of {plan.sequence} tokens in micro-batches of "
        f"{plan.micro_batch_size}, {plan.schedule.name}, {shared_out(plan)}, "
        f"{precision_words(plan)}; a step of {format_seconds(prediction.step_s)} "
        f"({format_seconds(prediction.step_low_s)} to {format_seconds(prediction.step_high_s)}), "
        f"times from {prediction.source}"
    )
    used = f"{plan.ranks} of {cluster.ranks} devices used"
    sections = [
        picture_section("cluster", "Cluster", cluster_svg(cluster, plan, title=f"{cluster.name}: {used}")),
        table_section(
            "stages", "Stages", STAGE_HEAD, stage_rows(plan, prediction, cluster), words=STAGE_HEAD[:4]
        ),
        picture_section(
            "memory", "Memory", memory_svg(prediction.peak_bytes, memory, title="Predicted peak of each rank")
        ),
        table_section(
            "breakdown", "Where a step goes", BREAKDOWN_HEAD, breakdown_rows(planned.step_breakdown)
        ),
        picture_section(
            "timeline",
            "One step",
            timeline_svg(planned.predicted.simulation.timeline, title="One step, predicted"),
        ),
    ]
    return page_html(f"{plan.model} on {plan.cluster}", subtitle, sections)
