"""Benchmarks of experts: what a watched group notes, the predictions over a link, and what a GPU measures."""

from __future__ import annotations

import os
import sys
from dataclasses import replace

import expert_layers as on_gpu
import expert_links
import experts
import pytest
import torch
from expert_links import MICRO_BATCHES, Trial, beside, mixture, plan_of
from harness import Report
from predict.cost.machines import profile_of
from torch import nn
from watched_group import GRADIENTS, ROWS, SMALL, WatchedGroup

from weft.describe.cluster import Link
from weft.describe.families import layer_graph
from weft.predict.profile import MachineMeasurement
from weft.run.stage.experts import IMPLEMENTATION


class Pair:
    """A group of two, seen from its second rank, whose calls do nothing."""

    size, place = 2, 1

    def all_to_all_rows(self, *given: object) -> None: ...

    def all_gather(self, *given: object) -> None: ...

    def add_up(self, *given: object) -> None: ...

    def broadcast(self, *given: object) -> None: ...


def test_a_watched_group_notes_what_expert_ranks_call() -> None:
    group = WatchedGroup(Pair())
    rows = torch.zeros(5, 8)
    group.all_gather(rows, rows)
    group.all_to_all_rows(rows, rows, [1, 4], [3, 2])
    group.broadcast(rows, 0)
    group.add_up(rows)
    group.all_to_all_rows(rows[:0], rows[:0], [0, 0], [0, 0])
    assert [call.name for call in group.calls] == [SMALL, ROWS, GRADIENTS, ROWS]
    # Its own two rows stay: three rows of eight numbers of four bytes leave.
    assert [call.leaving_bytes for call in group.calls] == [0.0, 3 * 8 * 4, 0.0, 0.0]
    assert all(call.begin_s <= call.end_s for call in group.calls)
    assert (group.size, group.place) == (2, 1)


def trial() -> Trial:
    config = mixture()
    graph = layer_graph(config)
    nothing = {"matmul": {}, "memory": (), "message": (), "collectives": {}}
    machine = MachineMeasurement(
        device="core",
        **nothing,
        launch_s=0.0,
        instruction_s=0.0,
        compute_slowdown=1.0,
        communication_slowdown=1.0,
        spread=0.0,
    )
    return Trial(config, graph, plan_of(graph), machine, profile_of(graph, device="core"))


def test_half_of_the_rows_cross_the_link_four_times_in_each_mixture() -> None:
    made, link = trial(), Link(1e7, 0.0)
    plan = made.plan
    rows = plan.micro_batch_size // 2 * plan.sequence * made.config.architecture.experts.active
    assert made.even_bytes() == rows * made.config.hidden * 4
    exchanges = made.exchanges(made.costs(link))
    crossing_s = made.config.layers * 2 * made.even_bytes() / 2 / link.bytes_per_s
    assert exchanges.backward_s == pytest.approx(crossing_s)
    # The counts of rows and the loss take little.
    assert crossing_s < exchanges.forward_s < 1.01 * crossing_s


def test_a_late_link_is_in_every_exchange() -> None:
    made = trial()
    soon, late = (made.exchanges(made.costs(Link(1e7, latency_s))) for latency_s in (0.0, 1e-3))
    layers = made.config.layers
    assert late.backward_s - soon.backward_s == pytest.approx(2e-3 * layers)
    assert late.forward_s - soon.forward_s == pytest.approx(3e-3 * layers + 1e-3)
    assert made.plan.micro_batches == MICRO_BATCHES


@pytest.mark.parametrize(("predicted_s", "met"), [(0.91, True), (1.09, True), (0.89, False), (1.11, False)])
def test_errors_of_both_signs_are_judged(predicted_s: float, met: bool) -> None:
    found = beside("step", predicted_s, [0.9, 1.0, 2.0], 0.1)
    assert found["step, error"].value == pytest.approx(predicted_s - 1.0)
    assert found["step, error"].judged() is met
    assert beside("rest", predicted_s, [1.0], None)["rest, error"].judged() is None


def test_links_need_root(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(sys, "argv", ["expert_links.py", "--quick"])
    assert expert_links.main() == 0
    assert capsys.readouterr().out == "skipped: it needs root to make network namespaces\n"


def test_implementations_without_memory_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    made = experts.layer_of

    def layer_of(sizes: experts.Sizes, name: str, device: str, precision: torch.dtype) -> nn.Module:
        if name == "batched_mm":
            raise torch.OutOfMemoryError
        return made(sizes, name, device, precision)

    monkeypatch.setattr(experts, "layer_of", layer_of)
    least = experts.least_s((16, 32, 4, 2, 8), (IMPLEMENTATION, "eager", "batched_mm"), "cpu", torch.float32)
    assert list(least) == [IMPLEMENTATION, "eager"]
    assert min(least.values()) > 0.0


def test_layers_on_a_gpu_have_the_sizes_of_the_presets() -> None:
    assert on_gpu.sizes_of(on_gpu.LARGE) == [
        (2048, 1024, 64, 8, 4096),
        (2048, 1024, 64, 8, 16384),
        (2048, 768, 128, 8, 4096),
        (2048, 768, 128, 8, 16384),
        (4096, 14336, 8, 2, 4096),
        (4096, 14336, 8, 2, 16384),
    ]
    parameters = layer_graph(on_gpu.stack_of(on_gpu.LARGE)).parameters()
    assert 0.9e9 < parameters < 1.1e9


def test_expert_ranks_need_as_many_gpus(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    summary = {"tokens_per_s": 10.0, "measured_step_s": 1.0, "predicted_step_s": 1.02}
    monkeypatch.setattr(on_gpu, "on_ranks", lambda scale, ranks: summary | {"tokens_per_s": 9.0 * ranks})
    report = Report("gpu_experts", on_gpu.options().parse_args([]))
    on_gpu.add_ranks(report, on_gpu.LARGE, 1)
    assert "needs 2 GPUs" in capsys.readouterr().out
    on_gpu.add_ranks(report, on_gpu.LARGE, 2)
    told = capsys.readouterr().out
    assert "needs 4 GPUs" in told
    assert report.values(f"ep 2: {on_gpu.shape_of(on_gpu.LARGE)}")["tokens over one device"] == 2.0
    assert report.values(f"ep 2: {on_gpu.shape_of(replace(on_gpu.LARGE, blocks=3))}") == {}


def test_without_a_gpu_nothing_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["experts.py"])
    assert on_gpu.main() == 0
    assert capsys.readouterr().out == "no CUDA device: nothing was measured\n"
