"""Laws: throughput counts the model's operations once, and only the devices that a plan uses."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.describe.cluster_file import parse_cluster
from weft.describe.layout import Layout
from weft.moves.layout import build_plan
from weft.planning.planned_job import PlannedJob
from weft.planning.problem import Problem, problem_of
from weft.planning.throughput import Throughput, doubt, peak_flops_per_s, throughput


@pytest.fixture(scope="module")
def problem() -> Problem:
    return problem_of(model="llama-7b", on="4xa100-80gb+2xv100-32gb", global_batch=64, precision="fp16")


@given(step_s=st.floats(1e-3, 1e3), devices=st.integers(1, 6))
def test_all_figures_are_those_of_one_step(problem: Problem, step_s: float, devices: int) -> None:
    job = problem.job
    seen = throughput(job, devices, step_s, reads_tokens=True)
    assert seen.samples_per_s * step_s == pytest.approx(64)
    assert seen.tokens_per_s == pytest.approx(64 * job.sequence / step_s)
    # Slower by half, and more devices at the same speed, use less of their peaks.
    slower = throughput(job, devices, 2 * step_s, reads_tokens=True)
    assert slower.utilisation == pytest.approx(seen.utilisation / 2)
    more = throughput(job, devices + 1, step_s, reads_tokens=True) if devices < 6 else slower
    assert more.utilisation < seen.utilisation
    assert throughput(job, devices, step_s, reads_tokens=False).tokens_per_s is None


def test_the_peak_is_that_of_the_first_devices(problem: Problem) -> None:
    first, second = (group.device.flops_per_s["fp16"] for group in problem.job.cluster.groups)
    sums = [peak_flops_per_s(problem.job.cluster, count, "fp16") for count in (1, 4, 6)]
    assert sums == pytest.approx([first, 4 * first, 4 * first + 2 * second])


def test_operations_are_six_for_each_parameter_and_token_beside_attention(problem: Problem) -> None:
    short = replace(problem.job, sequence=1)
    seen = throughput(short, 1, 1.0, reads_tokens=True)
    tables = 2 * problem.model.vocabulary * problem.model.hidden
    # Rows of the token table are looked up, and not multiplied.
    expected = 6 * (problem.job.graph.parameters() - tables / 2) * 64
    assert seen.flops_per_s == pytest.approx(expected, rel=1e-3)


def test_recomputed_operations_do_not_count(problem: Problem) -> None:
    figures = []
    for recompute in ("none", "full"):
        layout = Layout(pp=1, dp=2, loops=1, micro_batch_size=1, schedule="gpipe", recompute=recompute)
        plan = build_plan(problem.job, layout, [1.0] * len(problem.job.graph.layers))
        job = PlannedJob(run=None, problem=problem, plan=plan)  # type: ignore[arg-type]
        figures.append(job.throughput)
        assert job.throughput.devices == 2
    assert figures[1].flops_per_s * figures[0].samples_per_s == pytest.approx(
        figures[0].flops_per_s * figures[1].samples_per_s
    )
    assert figures[1].utilisation < figures[0].utilisation


@given(utilisation=st.floats(0.0, 1.5))
@pytest.mark.parametrize(
    ("devices", "highest"), [("2xv100-32gb", 0.52), ("2xa100-80gb", 0.72), ("1xv100-32gb+1xt4", 0.72)]
)
def test_a_utilisation_is_doubted_above_the_highest_published_one(
    devices: str, highest: float, utilisation: float
) -> None:
    cluster = parse_cluster(devices)
    assert (doubt(cluster, "fp16", seen_with(utilisation)) is not None) == (utilisation > highest)


def test_single_precision_and_hosts_are_not_doubted() -> None:
    assert doubt(parse_cluster("2xa100-80gb"), "fp32", seen_with(1.2)) is None
    assert doubt(parse_cluster("this-machine"), "bf16", seen_with(1.2)) is None


def seen_with(utilisation: float) -> Throughput:
    return Throughput(
        devices=2, samples_per_s=1.0, tokens_per_s=1.0, flops_per_s=1.0, utilisation=utilisation
    )
