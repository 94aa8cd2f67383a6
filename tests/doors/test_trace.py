"""Traces: what is busy, what waits, what the figures say; on a trace of devices, of the host, and of weft."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.doors.trace.analysis import Analysis, analyse, says, union
from weft.doors.trace.classes import CLASSES, classified, shown_name
from weft.doors.trace.events import is_trace, read_bytes, read_trace
from weft.errors import InputError
from weft.predict.abstract import simulate_schedule
from weft.timeline.perfetto import perfetto_trace

GEMM = "ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_tn"
FLASH = "void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<128, 64> >(Params)"
REDUCE = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
NORM = "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float>(int)"


def event(name: str, category: str, start: float, length: float, **places: Any) -> dict[str, Any]:
    """One event of a trace; times in milliseconds."""
    place = {"pid": places.pop("pid", 0), "tid": places.pop("tid", 7)}
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "ts": 1e3 * start,
        "dur": 1e3 * length,
        "args": places,
    } | place


def kernel(name: str, start: float, length: float, stream: int = 7) -> dict[str, Any]:
    return event(name, "kernel", start, length, tid=stream, device=0, stream=stream)


# Two steps of 10 ms: products, attention and a norm on stream 7, a reduction on stream 20 whose end nothing
# hides, and a copy.
DEVICE = {
    "schemaVersion": 1,
    "deviceProperties": [{"id": 0, "name": "NVIDIA A100-SXM4-80GB"}],
    "distributedInfo": {
        "backend": "nccl",
        "rank": 3,
        "world_size": 16,
        "pg_config": [
            {"pg_name": "0", "pg_desc": "default_pg", "pg_size": 16, "ranks": []},
            {"pg_name": "1", "pg_desc": "mesh_tp", "pg_size": 4, "ranks": [0, 1, 2, 3]},
        ],
    },
    "traceEvents": [
        {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "python"}},
        event("ProfilerStep#5", "user_annotation", 100, 10, pid=99, tid=99),
        event("ProfilerStep#6", "user_annotation", 110, 10, pid=99, tid=99),
        event("ProfilerStep#5", "gpu_user_annotation", 100.5, 9.5),
        event("aten::linear", "cpu_op", 100, 1, pid=99, tid=99),
        event("aten::addmm", "cpu_op", 100.1, 0.5, pid=99, tid=99),
        event("cudaStreamSynchronize", "cuda_runtime", 112, 4, pid=99, tid=99),
        kernel(GEMM, 100, 4),
        kernel(FLASH, 104, 2),
        kernel(NORM, 106, 1),
        kernel(REDUCE, 105, 5, stream=20),
        event("Memcpy HtoD (Pageable -> Device)", "gpu_memcpy", 110, 2, tid=24, device=0, stream=24),
        kernel(GEMM, 116, 4),
        {"ph": "i", "name": "not a span", "ts": 1},
        "not an event",
        {"ph": "X", "name": "no time"},
    ],
}


def analysed(record: Any) -> Analysis:
    return analyse(read_trace(json.dumps(record).encode(), "trace.json"))


def test_a_trace_of_a_device() -> None:
    found = analysed(DEVICE)
    assert found.span_s == pytest.approx(0.020)
    assert found.busy_s == pytest.approx(0.016)
    assert found.stream_busy_s == pytest.approx(
        {"device 0 stream 7": 0.011, "device 0 stream 20": 0.005, "device 0 stream 24": 0.002}
    )
    by_class = {
        "matmul": 0.008,
        "attention": 0.002,
        "collective": 0.005,
        "memory copy": 0.002,
        "other": 0.001,
    }
    assert found.class_s == pytest.approx(by_class)
    # From 107 to 110 ms nothing runs beside the reduction.
    assert found.exposed_s == pytest.approx(0.003)
    assert found.collective_s == pytest.approx(0.005)
    assert found.step_s == pytest.approx({5: 0.010, 6: 0.010})
    [gap] = found.gaps
    assert (gap.start_s, gap.length_s) == (pytest.approx(0.012), pytest.approx(0.004))
    assert (gap.step, gap.host) == (6, "cudaStreamSynchronize")
    name, kind, count, total_s = found.largest[0]
    assert (name, kind, count, total_s) == (GEMM, "matmul", 2, pytest.approx(0.008))


def test_what_the_figures_say() -> None:
    found = analysed(DEVICE)
    assert says(found) == [
        "devices do nothing for 20% of the time",
        "15% of the time only collectives run; 60% of them is not overlapped: fewer ranks per group, "
        "overlap, or "
        "another layout",
        "copies are 11% of the work: offloading, or data that is not pinned",
        "rank 3 of 16; groups of 4 ranks besides: axes of the mesh",
    ]
    record = found.record()
    assert record["groups"] == [
        {"name": "0", "purpose": "default_pg", "size": 16},
        {"name": "1", "purpose": "mesh_tp", "size": 4},
    ]
    assert record["device"] == "NVIDIA A100-SXM4-80GB"
    assert json.dumps(record)


def test_kernels_too_short_for_their_host() -> None:
    short = [kernel(NORM, 0.02 * index, 0.005) for index in range(100)]
    lines = says(analysed({"traceEvents": short}))
    assert lines == [
        "devices do nothing for 75% of the time; half of all kernels are shorter than 5.0 us, so that the "
        "host "
        "cannot keep up: larger micro-batches, compiled layers or graphs",
        "100% of the work is neither products nor attention: fused or compiled layers",
    ]


def test_a_step_that_took_longer_than_others() -> None:
    marks = [event(f"ProfilerStep#{index}", "user_annotation", 10 * index, 10) for index in range(4)]
    events = [*marks, event("ProfilerStep#4", "user_annotation", 40, 30), kernel(GEMM, 0, 70)]
    assert says(analysed({"traceEvents": events})) == ["step 4 took 3.0 times the median"]


def test_events_outside_of_the_steps_do_not_count() -> None:
    events = [event("ProfilerStep#1", "user_annotation", 10, 10), kernel(GEMM, 0, 12), kernel(GEMM, 15, 5)]
    found = analysed({"traceEvents": events})
    assert found.span_s == pytest.approx(0.010)
    assert found.busy_s == pytest.approx(0.007)


def test_steps_that_no_event_lies_in_do_not_count() -> None:
    events = [event("ProfilerStep#1", "user_annotation", 1000, 10), kernel(GEMM, 0, 12)]
    assert analysed({"traceEvents": events}).span_s == pytest.approx(0.012)


def test_a_trace_of_the_host_counts_each_time_once() -> None:
    place = {"pid": 1, "tid": 1}
    events = [
        event("aten::linear", "cpu_op", 0, 10, **place),
        event("aten::addmm", "cpu_op", 1, 8, **place),
        event("aten::gelu", "cpu_op", 10, 4, **place),
        event("aten::empty", "cpu_op", 11, 1, **place),
        event("c10d::allreduce_", "cpu_op", 15, 5, **place),
    ]
    found = analysed({"traceEvents": events})
    # What lies in a product is the product's, what lies in something else is its own.
    assert {name: (count, round(1e3 * total_s)) for name, _, count, total_s in found.largest} == {
        "aten::linear": (1, 10),
        "aten::gelu": (1, 3),
        "aten::empty": (1, 1),
        "c10d::allreduce_": (1, 5),
    }
    assert found.busy_s == pytest.approx(0.019)
    assert found.exposed_s == pytest.approx(0.005)
    assert found.record()["trace"] == "host"
    assert says(found)[0].startswith("25% of the time only collectives run; 100% of them")


def test_an_idle_host() -> None:
    events = [event("aten::mm", "cpu_op", 0, 1), event("aten::mm", "cpu_op", 9, 1)]
    assert says(analysed({"traceEvents": events})) == ["the host does nothing for 80% of the time"]


def test_a_trace_that_weft_wrote_is_read_like_any_other() -> None:
    figures = simulate_schedule("1f1b", devices=2, micro_batches=2)
    found = analysed(perfetto_trace([figures.timeline], figures.program))
    assert set(found.stream_busy_s) >= {"rank 0 predicted compute", "rank 1 predicted compute"}
    assert found.class_s["matmul"] > 0


def test_predictions_beside_measurements_do_not_count() -> None:
    figures = simulate_schedule("1f1b", devices=2, micro_batches=2)
    measured = replace(figures.timeline, clock="monotonic")
    both = analysed(perfetto_trace([figures.timeline, measured], figures.program))
    alone = analysed(perfetto_trace([measured], figures.program))
    assert both.stream_busy_s == alone.stream_busy_s


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (GEMM, "matmul"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", "matmul"),
        ("nvjet_tst_256x128_64x4_1x2_h_bz_coopA_TNT", "matmul"),
        ("Cijk_Ailk_Bljk_BBH_MT128x128x32", "matmul"),
        ("aten::mm", "matmul"),
        (FLASH, "attention"),
        ("fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention)", "attention"),
        ("aten::_scaled_dot_product_flash_attention", "attention"),
        (REDUCE, "collective"),
        ("ncclKernel_AllGather_RING_LL_Sum_int8_t", "collective"),
        ("gloo:all_reduce", "collective"),
        ("Memcpy DtoD (Device -> Device)", "memory copy"),
        ("Memset (Device)", "memory copy"),
        ("aten::copy_", "memory copy"),
        (NORM, "other"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::AddOp>", "other"),
    ],
)
def test_classes_of_kernels(name: str, kind: str) -> None:
    assert CLASSES[classified(name)] == kind


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), max_size=20))
def test_a_union_covers_what_its_intervals_cover(pairs: list[tuple[int, int]]) -> None:
    start = np.array([float(begin) for begin, _ in pairs])
    found = union(start, start + np.array([float(length) for _, length in pairs]))
    covered = {point for begin, length in pairs for point in range(begin, begin + length)}
    assert sum(end - begin for begin, end in found) == len(covered)
    assert all(end < begin for (_, end), (begin, _) in pairwise(found))


@pytest.mark.parametrize(
    ("data", "line"),
    [
        (b'{"traceEvents": [', "t: not a JSON file: "),
        (b'{"traceEvents": 3}', "t: traceEvents: a list of events is needed"),
        (
            b'{"traceEvents": []}',
            "t: no event of the trace took any time (nearest valid: a trace with ph X events)",
        ),
        (b'[{"ph": "M"}]', "t: no event of the trace took any time"),
        (
            b'[{"ph": "X", "name": "gemm", "ts": 1e300, "dur": 2}]',
            "t: event 'gemm' at 1e+300 us lasts 2 us",
        ),
        (b'[{"ph": "X", "name": "gemm", "ts": 1, "dur": NaN}]', "t: event 'gemm' at 1 us lasts nan us"),
    ],
)
def test_a_broken_trace_is_refused(data: bytes, line: str) -> None:
    assert is_trace(data)
    with pytest.raises(InputError) as refused:
        read_trace(data, "t")
    assert str(refused.value).startswith(line)


def test_a_trace_may_be_packed_and_a_list(tmp_path: Path) -> None:
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(json.dumps(DEVICE["traceEvents"]).encode()))
    data = read_bytes(path)
    assert is_trace(data)
    assert analyse(read_trace(data, "t")).busy_s == pytest.approx(0.016)


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gz"
    broken.write_bytes(gzip.compress(b"x" * 1000)[:20])
    for path, problem in (
        (tmp_path / "none", "no such file"),
        (tmp_path, "a folder, not a file"),
        (broken, "not a whole gzip file: "),
    ):
        with pytest.raises(InputError, match=problem):
            read_bytes(path)


def test_names_are_shown_without_their_templates() -> None:
    assert shown_name(FLASH) == "pytorch_flash::flash_fwd_kernel"
    assert len(shown_name("x" * 200)) == 60
