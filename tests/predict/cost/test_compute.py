from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from predict.cost.machines import CPU, GPU, MACHINE, MODEL, profile_of

from weft.describe.amount import Amount, Shape
from weft.describe.families import layer_graph
from weft.describe.layer import Matmul, PassWork
from weft.describe.plan import RECOMPUTES, Recompute
from weft.errors import InputError
from weft.predict.cost.compute import (
    DATA_SHEET_HALF_WIDTH,
    MACHINE_HALF_WIDTH,
    PROFILE_HALF_WIDTH,
    ComputeModel,
    StageTimes,
)
from weft.predict.cost.layer_times import MATMUL_SHARE, MEMORY_SHARE, DataSheetSpeeds, MeasuredSpeeds, pass_s
from weft.predict.cost.memory import stage_input_bytes
from weft.predict.cost.profiled import HALF_WIDTHS_OF_AN_OCTAVE, at_size
from weft.predict.profile import value_at

GRAPH = layer_graph(MODEL)
ALL = tuple(range(len(GRAPH.layers)))
SHAPE = Shape(4, GRAPH.sequence)
PARTS = ("forward_s", "backward_input_s", "backward_weight_s", "update_s")


def total_s(times: StageTimes) -> float:
    return sum(getattr(times, part) for part in PARTS)


@given(st.integers(1, 64), st.integers(1, 64), st.sampled_from([GPU, CPU]))
def test_more_samples_never_take_less_time(fewer: int, more: int, device) -> None:
    times = [
        ComputeModel().stage_times(GRAPH, ALL, Shape(size, GRAPH.sequence), "fp32", device)
        for size in sorted((fewer, more))
    ]
    for part in PARTS:
        assert getattr(times[0], part) <= getattr(times[1], part)


@given(st.floats(0.1, 10.0), st.sampled_from([GPU, CPU]))
def test_a_device_faster_in_everything_is_as_much_faster(factor: float, device) -> None:
    faster = replace(
        device,
        memory_bytes_per_s=device.memory_bytes_per_s * factor,
        flops_per_s={name: peak * factor for name, peak in device.flops_per_s.items()},
        launch_s=device.launch_s / factor,
    )
    before, after = (ComputeModel().stage_times(GRAPH, ALL, SHAPE, "fp32", one) for one in (device, faster))
    assert total_s(after) * factor == pytest.approx(total_s(before))


@given(
    st.sampled_from([ComputeModel(), ComputeModel(machine=MACHINE), ComputeModel(profile=profile_of(GRAPH))])
)
def test_a_stage_is_the_sum_of_its_layers(model: ComputeModel) -> None:
    whole = model.stage_times(GRAPH, ALL, SHAPE, "fp32", CPU)
    single = [model.stage_times(GRAPH, (layer,), SHAPE, "fp32", CPU) for layer in ALL]
    for part in PARTS:
        assert getattr(whole, part) == pytest.approx(sum(getattr(times, part) for times in single))


@pytest.mark.parametrize("model", [ComputeModel(), ComputeModel(profile=profile_of(GRAPH))])
def test_recomputing_runs_forward_again_before_the_input_gradient(model: ComputeModel) -> None:
    kept = model.stage_times(GRAPH, ALL, SHAPE, "fp32", CPU)
    again = model.stage_times(GRAPH, ALL, SHAPE, "fp32", CPU, recompute="full", update_share=0.25)
    assert again.forward_s == kept.forward_s
    assert again.backward_input_s == pytest.approx(kept.backward_input_s + kept.forward_s)
    assert again.backward_weight_s == kept.backward_weight_s
    assert again.update_s == pytest.approx(kept.update_s / 4)


@pytest.mark.parametrize("model", [ComputeModel(), ComputeModel(profile=profile_of(GRAPH))])
def test_recomputing_keeps_inputs_and_makes_the_rest_again(model: ComputeModel) -> None:
    each = [model.kept_bytes(GRAPH, (layer,), SHAPE, "fp32", CPU) for layer in ALL]
    assert model.kept_bytes(GRAPH, ALL, SHAPE, "fp32", CPU) == pytest.approx(sum(each), abs=len(each))
    inputs = stage_input_bytes(GRAPH, ALL, SHAPE, "fp32")
    assert model.kept_bytes(GRAPH, ALL, SHAPE, "fp32", CPU, "full") == inputs
    for layer, kept in zip(ALL, each, strict=True):
        left = model.kept_bytes(GRAPH, (layer,), SHAPE, "fp32", CPU, "full")
        taken = [model.taken_bytes(GRAPH, (layer,), SHAPE, "fp32", CPU, word) for word in ("none", "full")]
        assert taken[1] - taken[0] == pytest.approx(kept - left, abs=2)


@pytest.mark.parametrize("model", [ComputeModel(), ComputeModel(profile=profile_of(GRAPH))])
@pytest.mark.parametrize("recompute", RECOMPUTES)
def test_a_backward_pass_takes_most_at_one_layer_and_has_freed_the_later_ones(
    model: ComputeModel, recompute: Recompute
) -> None:
    asked = SHAPE, "fp32", CPU, recompute
    left = [model.kept_bytes(GRAPH, (layer,), *asked) for layer in ALL]
    taken = [model.taken_bytes(GRAPH, (layer,), *asked) for layer in ALL]
    for first in ALL:
        for end in range(first + 1, len(ALL) + 1):
            moments = [taken[layer] - sum(left[layer + 1 : end]) for layer in range(first, end)]
            found = model.taken_bytes(GRAPH, range(first, end), *asked)
            assert found == pytest.approx(max(moments), abs=len(ALL))


def test_large_kernels_reach_the_declared_share_and_small_ones_less() -> None:
    speeds = DataSheetSpeeds(GPU)
    assert 1e15 / speeds.matmul_s(1e15, "bf16") == pytest.approx(300e12 * MATMUL_SHARE, rel=1e-3)
    assert 1e12 / speeds.memory_s(1e12) == pytest.approx(2e12 * MEMORY_SHARE, rel=1e-3)
    assert 1e6 / speeds.matmul_s(1e6, "bf16") < 0.01 * 300e12


def test_launches_add_to_the_work_of_a_device_that_is_its_own_host() -> None:
    one = Amount.of(1)
    work = PassWork(matmuls=(Matmul(one, Amount.of(100), Amount.of(100), Amount.of(100)),), kernels=50)
    for device, launches_s in ((CPU, 50 * 5e-6), (GPU, 0.0)):
        speeds = DataSheetSpeeds(device)
        product_s = speeds.matmul_s(2e6, "fp32")
        assert pass_s(work, SHAPE, "fp32", device, speeds) == pytest.approx(launches_s + product_s)
        # Beside a stage's passes, a device waits for its host at the least.
        least_s = ComputeModel().work_s(work, SHAPE, "fp32", device)
        assert least_s == pytest.approx(max(50 * 5e-6, launches_s + product_s))


def test_measured_speeds_meet_the_measurements_with_one_launch_in_each() -> None:
    speeds = MeasuredSpeeds(MACHINE, CPU)
    for flops, speed in MACHINE.matmul["fp32"]:
        assert speeds.matmul_s(flops, "fp32") + speeds.launch_s == pytest.approx(flops / speed)
    for moved, speed in MACHINE.memory:
        assert speeds.memory_s(moved) + speeds.launch_s == pytest.approx(moved / speed)


@given(st.floats(0.0, 1e9), st.floats(0.0, 1e9))
def test_tables_rise_between_and_beyond_their_points(left: float, right: float) -> None:
    table = ((10.0, 1.0), (1e3, 2.0), (1e6, 500.0))
    low, high = sorted((left, right))
    assert value_at(table, low) <= value_at(table, high)
    assert [value_at(table, size) for size, _ in table] == [value for _, value in table]
    assert value_at(table, 0.0) == 1.0
    assert value_at(table, 2e6) == 1000.0


@pytest.mark.parametrize(
    ("size", "forward_ms", "backward_ms"), [(1, 2, 3), (2, 3, 5), (5, 6, 11), (8, 9, 17)]
)
def test_profiles_are_interpolated_in_the_micro_batch_size(
    size: int, forward_ms: int, backward_ms: int
) -> None:
    model, shape = ComputeModel(profile=profile_of(GRAPH)), Shape(size, GRAPH.sequence)
    times = model.stage_times(GRAPH, (1, 2), shape, "fp32", CPU)
    assert times.forward_s == pytest.approx(2e-3 * forward_ms)
    assert times.backward_input_s + times.backward_weight_s == pytest.approx(2e-3 * backward_ms)
    assert times.update_s == pytest.approx(8e-3)
    assert times.backward_input_s > times.backward_weight_s > 0.0
    assert model.kept_bytes(GRAPH, (1, 2), shape, "fp32", CPU) == 2000 * size


@given(st.integers(1, 200), st.integers(1, 200), st.booleans())
def test_beyond_measured_sizes_times_rise_with_the_size_and_intervals_widen(
    one: int, other: int, alone: bool
) -> None:
    profile = profile_of(GRAPH)
    if alone:
        rows = tuple(row for row in profile.timings if row.micro_batch_size == 8)
        profile = replace(profile, timings=rows)
    model, sizes = ComputeModel(profile=profile), sorted({row.micro_batch_size for row in profile.timings})
    less, more = (
        model.stage_times(GRAPH, (1, 2), Shape(size, GRAPH.sequence), "fp32", CPU)
        for size in sorted((one, other))
    )
    assert 0.0 < less.forward_s <= more.forward_s
    assert less.passes_s <= more.passes_s * (1 + 1e-12)
    assert less.update_s == more.update_s
    for size, times in zip(sorted((one, other)), (less, more), strict=True):
        near = min(max(size, sizes[0]), sizes[-1])
        octaves = abs(np.log2(size / near))
        each = HALF_WIDTHS_OF_AN_OCTAVE[alone]
        assert times.half_width == pytest.approx(PROFILE_HALF_WIDTH + each * octaves)
        kept = model.kept_bytes(GRAPH, (1, 2), Shape(size, GRAPH.sequence), "fp32", CPU)
        assert kept == pytest.approx(2000 * size)


def test_times_go_on_along_the_curve_of_the_speeds_with_the_measured_slope() -> None:
    """Two sizes tell the part of a time that does not grow, one tells nothing of it."""
    points = [(1, 3.0), (4, 6.0)]
    assert at_size(points, 8, float) == pytest.approx(10.0)
    assert at_size(points[1:], 8, float) == pytest.approx(12.0)
    # No steeper than in proportion, and never falling.
    assert at_size([(1, 1.0), (4, 8.0)], 8, float) == pytest.approx(16.0)
    assert at_size([(1, 8.0), (4, 7.0)], 8, float) == 7.0
    assert at_size(points, 2, float) == pytest.approx(4.0)
    assert at_size([(2, 4.0), (4, 6.0)], 1, float) == pytest.approx(3.0)
    # Where the curve is flat, its rise is noise.
    assert at_size([(1, 3.0), (4, 3.3)], 8, lambda size: max(size, 6.0)) == pytest.approx(3.3 * 8 / 6)


def test_an_embedding_has_no_input_gradient() -> None:
    times = ComputeModel(profile=profile_of(GRAPH)).stage_times(GRAPH, (0,), SHAPE, "fp32", CPU)
    assert times.backward_input_s == 0.0
    assert times.backward_weight_s > 0.0


@pytest.mark.parametrize(
    ("shape", "precision", "words"),
    [
        (Shape(4, 64), "bf16", ["sequence 32", "64", "precision fp32", "bf16"]),
        (Shape(4, 32, 2), "fp32", ["tensor degree 2 on cpu, only at 1;", "--tensor-parallel 2 adds it"]),
    ],
)
def test_profiles_answer_only_what_they_were_asked_when_taken(
    shape: Shape, precision: str, words: list[str]
) -> None:
    model = ComputeModel(profile=profile_of(GRAPH))
    for ask in (model.stage_times, model.kept_bytes):
        with pytest.raises(InputError) as refused:
            ask(GRAPH, ALL, shape, precision, CPU)
        assert all(word in str(refused.value) for word in words)


def test_a_profile_of_another_model_is_refused() -> None:
    other = layer_graph(replace(MODEL, hidden=128))
    with pytest.raises(InputError, match=GRAPH.fingerprint):
        ComputeModel(profile=profile_of(GRAPH)).stage_times(other, ALL, SHAPE, "fp32", CPU)


def test_the_best_source_that_covers_a_device_answers() -> None:
    both = ComputeModel(machine=MACHINE, profile=profile_of(GRAPH, spread=0.2))
    between = "layer profile, between its micro-batch sizes"
    answers = [
        (both, CPU, between, 0.2),
        (replace(both, profile=profile_of(GRAPH)), CPU, between, PROFILE_HALF_WIDTH),
        (replace(both, profile=None), CPU, "measured machine", MACHINE_HALF_WIDTH),
        (both, GPU, "data sheet", DATA_SHEET_HALF_WIDTH),
    ]
    for model, device, source, half_width in answers:
        times = model.stage_times(GRAPH, ALL, SHAPE, "fp32", device)
        assert (times.source, times.half_width) == (source, half_width)
    assert both.instruction_s(CPU) == MACHINE.instruction_s
    assert both.instruction_s(GPU) == 0.0


def test_a_precision_the_device_lacks_is_refused() -> None:
    with pytest.raises(InputError, match="'bf16' is not supported by cpu; it has fp32"):
        ComputeModel().stage_times(GRAPH, ALL, SHAPE, "bf16", CPU)


@given(size=st.integers(1, 4), tensor_parallel=st.sampled_from([1, 2]))
def test_selective_recomputation_lies_between_none_and_full(size: int, tensor_parallel: int) -> None:
    shape = Shape(size, GRAPH.sequence, tensor_parallel)
    layers = range(len(GRAPH.layers))
    compute = ComputeModel()
    seconds, kept, taken = [], [], []
    for recompute in RECOMPUTES:
        times = compute.stage_times(GRAPH, layers, shape, "bf16", GPU, recompute=recompute)
        seconds.append(times.backward_input_s)
        kept.append(compute.kept_bytes(GRAPH, layers, shape, "bf16", GPU, recompute))
        taken.append(compute.taken_bytes(GRAPH, layers[1:2], shape, "bf16", GPU, recompute))
    assert seconds[0] < seconds[1] < seconds[2]
    assert kept[0] > kept[1] > kept[2]
    assert 0 < taken[0] < taken[1] < taken[2]


def test_a_layer_that_does_not_know_its_products_cannot_be_recomputed_selectively() -> None:
    layers = tuple(replace(layer, products=None) for layer in GRAPH.layers)
    graph = replace(GRAPH, layers=layers)
    assert not graph.knows_products
    with pytest.raises(
        InputError, match=r"embedding: cannot be recomputed selectively: .* \(nearest valid: full\)"
    ):
        ComputeModel().kept_bytes(graph, (0,), Shape(1, graph.sequence), "bf16", GPU, "selective")
