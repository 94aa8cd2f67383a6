"""What a measured run says of its prediction, how that is remembered, and what it does to later ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from predict.cost.machines import CPU, GPU, MODEL, cluster, profile_of

from weft.cli.corrections import lesson_text
from weft.describe.cluster import Cluster
from weft.describe.layout import PartialLayout
from weft.describe.prediction import SHARED
from weft.describe.request import request_of
from weft.describe.run_file import run_of_keywords
from weft.planning.planned_job import PlannedJob
from weft.planning.planners import Verdict, get_planner
from weft.planning.planners.bounds import Bounds
from weft.planning.problem import Problem, measured_problem
from weft.planning.residuals import learn, lessons_in, measured_peaks, observe
from weft.planning.what_if import on_cluster
from weft.predict.corrections import Correction, MemoryCorrection, Observation
from weft.predict.corrections_file import residual_files
from weft.predict.cost.calibration import save_profile
from weft.predict.cost.placed_plan import CostModel
from weft.predict.predict import predict
from weft.program.kinds import MESSAGES
from weft.timeline.timeline import TIMELINE_COLUMNS, Timeline

HERE = cluster(nodes=1, devices=2, device=CPU)
SLOW = Correction(factors={("computations", "cpu"): 2.0, ("messages", ""): 3.0, ("collectives", ""): 1.5})
RECEIVES = [receive for _, receive in MESSAGES]


def mixed() -> Cluster:
    """One node of each of two kinds of devices."""
    (group,) = HERE.groups
    link = group.link
    groups = [replace(group, name=name, devices=1, device=replace(CPU, name=name)) for name in ("cpu", "old")]
    return Cluster(name="mixed", groups=tuple(groups), links={("cpu", "old"): link})


def problem(home: Path, where: Cluster = HERE, **pins: int | str) -> Problem:
    pinned = PartialLayout(micro_batch_size=2, **pins)  # type: ignore[arg-type]
    request = request_of(MODEL, where, global_batch=8, precision="fp32", pins=pinned)
    return measured_problem(request, home=home)


def job(home: Path, where: Cluster = HERE, **pins: int | str) -> PlannedJob:
    posed = problem(home, where, **pins)
    plan = get_planner("weft").search(posed).fitting[0].plan
    assert plan is not None
    run = run_of_keywords(model="gpt-1m", on="2xt4", global_batch=8, sequence=32, precision="fp32", pins={})
    return PlannedJob(run=run, problem=posed, plan=plan)


def step_s(one: PlannedJob, correction: Correction | None) -> float:
    return replace(one, problem=one.problem.corrected(correction)).predicted.prediction.step_s


def measured(one: PlannedJob, correction: Correction, steps: int = 3) -> tuple[Timeline, float]:
    """A run that takes what `correction` says, but for its first step, which takes ten times as long."""
    graph, where = one.problem.job.graph, one.problem.job.cluster
    found = predict(CostModel(graph=graph, cluster=where, correction=correction), one.plan, one.program)
    line = found.simulation.timeline
    columns = {name: getattr(line, name) for name in TIMELINE_COLUMNS}
    edges, start = one.program.edges, line.start_ns.copy()
    row_of = np.full(len(one.program), -1)
    row_of[line.position] = np.arange(len(line))
    # A receive is on its way from when its message was sent; its rank waited for that.
    receives = np.isin(one.program.columns.kind[edges.target], RECEIVES)
    start[row_of[edges.target[receives]]] = line.start_ns[row_of[edges.source[receives]]]
    columns |= {"start_ns": start, "posted_ns": start - 1}
    several = []
    for step in range(steps):
        slower = 10 if step == 0 else 1
        times = {name: slower * columns[name] for name in ("posted_ns", "start_ns", "end_ns")}
        several.append({**columns, **times, "step": np.full(len(line), step)})
    joined = {name: np.concatenate([one[name] for one in several]) for name in TIMELINE_COLUMNS}
    return Timeline(run="run", plan_id=one.plan.plan_id, clock="test", **joined), found.prediction.step_s


def observation(one: PlannedJob, correction: Correction, time_s: float = 1.0) -> Observation:
    line, took_s = measured(one, correction)
    return observe(one, line, step_s=took_s, warm_up=1, time_s=time_s)


@pytest.mark.parametrize("pins", [{"pp": 2, "schedule": "gpipe"}, {"dp": 2}])
def test_each_kind_of_instruction_is_seen_by_itself(tmp_path: Path, pins: dict[str, int | str]) -> None:
    one = job(tmp_path, **pins)
    seen = observation(one, SLOW)
    found = {part.key: part for part in seen.parts}
    assert found["computations", "cpu"].ratio == pytest.approx(2.0, rel=1e-4)
    other = ("messages", "") if "pp" in pins else ("collectives", "")
    assert set(found) == {("computations", "cpu"), other}
    assert found[other].ratio == pytest.approx(SLOW.factors[other], rel=1e-3)
    assert sum(part.share for part in seen.parts) == pytest.approx(1.0, abs=0.02)
    assert (seen.half_width, seen.sources) == (pytest.approx(0.3), {"cpu": "data sheet"})
    # What was measured is explained by its parts.
    assert seen.scaled_step_s(SLOW.factors) == pytest.approx(seen.measured_step_s, rel=0.02)


def test_each_kind_of_device_is_seen_by_itself(tmp_path: Path) -> None:
    one = job(tmp_path, mixed(), pp=2, schedule="1f1b")
    factors = {**SLOW.factors, ("computations", "old"): 5.0}
    seen = observation(one, Correction(factors=factors))
    assert seen.sources == {"cpu": "data sheet", "old": "data sheet"}
    ratios = {part.key: part.ratio for part in seen.parts}
    assert ratios["computations", "cpu"] == pytest.approx(2.0, rel=1e-4)
    assert ratios["computations", "old"] == pytest.approx(5.0, rel=1e-4)
    again = [seen.model_copy(update={"time_s": float(time)}) for time in range(40)]
    lesson = learn(one, again, tmp_path)
    assert lesson.subject == "small in fp32 on 1x1xcpu+1x1xold, data sheet"
    after = job(tmp_path, mixed(), pp=2, schedule="1f1b")
    learned = after.problem.measurements.correction
    assert learned is not None
    assert learned.computations("old") / learned.computations("cpu") == pytest.approx(2.5, rel=0.05)


def test_what_is_observed_does_not_depend_on_the_correction_in_force(tmp_path: Path) -> None:
    one = job(tmp_path, pp=2)
    corrected = replace(one, problem=one.problem.corrected(Correction(step=1.7)))
    assert observation(corrected, SLOW) == observation(one, SLOW)


def test_exchanges_inside_computations_leave_them_unmeasured(tmp_path: Path) -> None:
    seen = observation(job(tmp_path, tp=2, dp=1), SLOW)
    assert {part.key: part.ratio for part in seen.parts} == {
        ("computations", "cpu"): None,
        ("collectives", ""): None,
    }
    # They have their share of the step nevertheless.
    assert all(part.share > 0.0 for part in seen.parts)
    assert seen.scaled_step_s(SLOW.factors) == pytest.approx(seen.measured_step_s, rel=0.02)


@pytest.mark.parametrize("scale", [0.25, 4.0])
@pytest.mark.parametrize("pins", [{"pp": 2}, {"dp": 2}, {"tp": 2}])
def test_a_factor_of_everything_is_one_of_the_step(
    tmp_path: Path, scale: float, pins: dict[str, int]
) -> None:
    one = job(tmp_path, **pins)
    assert step_s(one, Correction(step=scale)) == pytest.approx(scale * step_s(one, None), rel=1e-4)


@pytest.mark.parametrize("factor", [0.3, 3.0])
def test_bounds_stay_below_corrected_steps(tmp_path: Path, factor: float) -> None:
    posed = problem(tmp_path).corrected(Correction(factors=SLOW.factors, step=factor))
    candidates = get_planner("weft").search(posed).candidates
    simulated = [one for one in candidates if one.verdict is Verdict.FITS]
    assert len(simulated) > 2
    for one in simulated:
        assert one.plan is not None
        assert one.prediction is not None
        assert one.bound_s <= one.prediction.step_s * (1 + 1e-6)


def test_what_was_learned_is_used_by_the_next_plan_of_the_same_problem(tmp_path: Path) -> None:
    jobs = [job(tmp_path, pp=pp) for pp in (1, 2)]
    lesson = learn(jobs[0], [observation(one, SLOW) for one in jobs], tmp_path)
    assert residual_files(tmp_path) == [lesson.path]
    assert lessons_in(tmp_path) == (lesson,)
    assert lesson.subject == "small in fp32 on 1x2xcpu, data sheet"
    assert lesson.error == pytest.approx(-0.5, rel=0.1)

    after = job(tmp_path, pp=2)
    prediction, before = after.predicted.prediction, jobs[1].predicted.prediction
    assert prediction.source == "data sheet, corrected by 2 measurements"
    assert prediction.step_s == pytest.approx(2.0 * before.step_s, rel=0.25)
    assert prediction.shared < SHARED
    ends = [(one.step_high_s - one.step_low_s) / one.step_s for one in (prediction, before)]
    assert ends[0] < ends[1]
    # A ranking is made of the same predictions.
    assert after.prediction == prediction


def test_measured_peaks_correct_those_of_the_next_plan(tmp_path: Path) -> None:
    """Its peaks, their interval, its chance to fit and the parts, whatever corrected the measured plan."""
    one = job(tmp_path, pp=2)
    predicted = one.predicted.prediction
    assert measured_peaks({"max_device_bytes": [3], "tensor_bytes": [4]}) == [3]
    held = measured_peaks({"tensor_bytes": [round(1.5 * peak) for peak in predicted.peak_bytes]})
    line, took_s = measured(one, SLOW)
    again = one
    for time in range(6):
        seen = observe(again, line, step_s=took_s, warm_up=1, time_s=float(time), peak_bytes=held)
        lesson = learn(one, [seen], tmp_path)
        again = job(tmp_path, pp=2)
    assert "peaks of memory 1.50 of predicted, measured in 6 runs" in lesson_text(lesson)
    assert seen.peaks is not None
    assert seen.peaks.predicted_bytes == predicted.peak_bytes
    corrected, memory = again.predicted.prediction, again.problem.measurements.memory
    assert memory.count == 6
    assert corrected.peak_bytes == pytest.approx([1.5 * peak for peak in predicted.peak_bytes], rel=0.01)
    width, declared = (one.peak_high_bytes[0] / one.peak_bytes[0] - 1.0 for one in (corrected, predicted))
    assert width == pytest.approx(memory.widening * declared, rel=1e-3)
    rooms = [round(1.2 * peak) for peak in predicted.peak_bytes]
    assert predicted.chance_to_fit(rooms) > 0.99 > 0.01 > corrected.chance_to_fit(rooms)
    parts = {part.name: part for part in again.memory_parts(0)}
    assert parts["correction"].source == "measured in 6 runs"
    assert sum(part.value for name, part in parts.items() if name != "reserve") == pytest.approx(
        corrected.peak_bytes[0], rel=1e-6
    )
    assert observe(one, line, step_s=took_s, warm_up=1, time_s=1.0, peak_bytes=[0, 5]).peaks is None


@pytest.mark.parametrize("factor", [0.6, 1.7])
@pytest.mark.parametrize("sharding", ["zero-0", "zero-1"])
def test_bounds_stay_below_corrected_peaks(tmp_path: Path, factor: float, sharding: str) -> None:
    memory = MemoryCorrection(count=3, factor=factor, widening=1.3)
    posed = problem(tmp_path, sharding=sharding).corrected(Correction(memory=memory))
    bounds = Bounds(posed)
    candidates = get_planner("weft").search(posed).candidates
    simulated = [one for one in candidates if one.verdict is Verdict.FITS]
    assert simulated
    for one in simulated:
        assert one.layout is not None
        assert one.prediction is not None
        peaks, at_risk = one.prediction.peak_bytes, one.prediction.needs_at(posed.memory_risk)
        assert bounds.holding(one.layout).total <= max(peaks) + 2
        assert bounds.held_at_risk(one.layout).max() <= max(at_risk) + 2
        assert bounds.held_at_risk(one.layout).max() >= 0.8 * max(at_risk)


def test_measurements_of_the_layers_make_it_another_prediction(tmp_path: Path) -> None:
    one = job(tmp_path, pp=1)
    learn(one, [observation(one, SLOW)], tmp_path)
    assert problem(tmp_path).measurements.correction is not None
    save_profile(profile_of(one.problem.job.graph), tmp_path)
    assert problem(tmp_path).measurements.correction is None
    wider = measured_problem(request_of(replace(MODEL, hidden=128), HERE, precision="fp32"), home=tmp_path)
    assert wider.measurements.correction is None


def test_a_changed_cluster_keeps_it_while_its_devices_are_the_same(tmp_path: Path) -> None:
    one = job(tmp_path, pp=1)
    learn(one, [observation(one, SLOW)], tmp_path)
    posed = problem(tmp_path)
    wider, other = cluster(nodes=2, devices=2, device=CPU), cluster(nodes=1, devices=2, device=GPU)
    assert on_cluster(posed, wider, tmp_path).measurements.correction is not None
    assert on_cluster(posed, other, tmp_path).measurements.correction is None
