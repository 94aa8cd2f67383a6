"""Measurements: complete, plausible, the same after a file; layers keep what is predicted."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from functools import cache
from importlib.metadata import PackageNotFoundError
from unittest.mock import patch

import convolutional_jobs as convolutional
import pytest
import torch
from ledger_writer import record
from pydantic import TypeAdapter
from small_plans import tiny

from weft.capture import doctor, interference, layers
from weft.capture.collectives import collective_tables, rank_counts
from weft.capture.interference import measure_interference
from weft.capture.layers import profile_layers
from weft.capture.machine import measure_machine
from weft.capture.timing import summarise
from weft.describe.amount import Shape
from weft.describe.families import layer_graph
from weft.describe.model import model_from
from weft.describe.models import PRESETS, resolve_model
from weft.describe.this_machine import this_machine
from weft.predict.cost.calibration import (
    load_machine,
    load_profile,
    profile_from_record,
    save_machine,
    save_profile,
)
from weft.predict.cost.memory import stage_kept_bytes
from weft.predict.ledger import Ledger
from weft.predict.profile import COLLECTIVES
from weft.progress import WorkDone

# Tokens of a sample of the small training in which work and messages overlap.
SHORT = 32


@pytest.fixture(scope="module")
def profile_of(worker_pool):
    """The profile of a preset, measured once for all tests."""
    return cache(lambda name: worker_pool.run(profiled, name, ranks=1)[0])


def profiled(rank: int, ranks: int, name: str):
    config = resolve_model(name, sequence=64)
    device = torch.device("cpu")
    return profile_layers(
        config, layer_graph(config), "cpu", device, precision="fp32", micro_batch_sizes=(1, 2)
    )


@pytest.mark.parametrize("name", ["gpt-1m", "llama-1m"])
def test_a_profile_covers_every_kind_and_its_memory_is_the_predicted_one(profile_of, name):
    profile = profile_of(name)
    graph = layer_graph(resolve_model(name, sequence=64))
    kinds = {layer.kind: index for index, layer in enumerate(graph.layers)}
    assert {(t.layer, t.micro_batch_size) for t in profile.timings} == {(k, s) for k in kinds for s in (1, 2)}
    for timing in profile.timings:
        assert min(timing.forward_s, timing.backward_s, timing.update_s) > 0
        if timing.layer == "block":
            shape = Shape(timing.micro_batch_size, 64)
            kept = stage_kept_bytes(graph, (kinds["block"],), shape, "fp32")
            assert timing.activation_bytes == pytest.approx(kept, rel=0.15)


def profiled_images(rank: int, ranks: int):
    config = convolutional.tiny("resnet")
    profile = profile_layers(
        config, layer_graph(config), "cpu", torch.device("cpu"), precision="fp32", micro_batch_sizes=(2,)
    )
    assert model_from(json.loads(json.dumps(asdict(config)))) == config
    return profile


def test_a_profile_of_a_convolutional_network_has_every_layer(worker_pool):
    profile = worker_pool.run(profiled_images, ranks=1)[0]
    graph, shape = layer_graph(convolutional.tiny("resnet")), Shape(2, 1)
    kept = {layer.kind: 4 * layer.kept(shape) + layer.kept_bytes(shape) for layer in graph.layers}
    assert {timing.layer for timing in profile.timings} == set(kept)
    for timing in profile.timings:
        assert min(timing.forward_s, timing.backward_s, timing.update_s) > 0
        if timing.layer.startswith("block"):
            # Alone, a layer keeps what it gives, and the norms' own tensors count, too.
            sent = max(layer.sent(shape) for layer in graph.layers if layer.kind == timing.layer)
            assert kept[timing.layer] <= timing.activation_bytes <= kept[timing.layer] + 4 * sent + 1024


def profiled_towers(rank: int, ranks: int):
    config = PRESETS["dlrm-tiny"]
    return profile_layers(
        config, layer_graph(config), "cpu", torch.device("cpu"), precision="fp32", micro_batch_sizes=(2,)
    )


def test_a_profile_of_towers_has_every_layer(worker_pool):
    profile = worker_pool.run(profiled_towers, ranks=1)[0]
    graph, shape = layer_graph(PRESETS["dlrm-tiny"]), Shape(2, 1)
    kept = {layer.kind: 4 * layer.kept(shape) + layer.kept_bytes(shape) for layer in graph.layers}
    assert {timing.layer for timing in profile.timings} == set(kept)
    for timing in profile.timings:
        assert min(timing.forward_s, timing.backward_s, timing.update_s) > 0
        if timing.layer.startswith("table"):
            assert timing.activation_bytes == kept[timing.layer]


def profiled_own(rank: int, ranks: int, name: str):
    config = resolve_model(name)
    return profile_layers(
        config, layer_graph(config), "cpu", torch.device("cpu"), precision="fp32", micro_batch_sizes=(1, 2)
    )


@pytest.mark.parametrize("name", ["images", "diamond", "conditioned", "captured_branches", "captured_tied"])
def test_a_profile_of_a_model_of_ones_own_has_every_layer(worker_pool, name):
    profile = worker_pool.run(profiled_own, f"own_models:{name}", ranks=1)[0]
    graph = layer_graph(resolve_model(f"own_models:{name}"))
    assert {(t.layer, t.micro_batch_size) for t in profile.timings} == {
        (layer.kind, size) for layer in graph.layers for size in (1, 2)
    }
    assert all(min(timing.forward_s, timing.backward_s) > 0 for timing in profile.timings)
    # Another layer of that kind would have other costs.
    costs = {}
    for layer in graph.layers:
        assert costs.setdefault(layer.kind, replace(layer, name="")) == replace(layer, name="")


def throttled_profile(rank: int, ranks: int):
    config = tiny(tied=False)
    # Rounds for no time at all: as few as there may be.
    layers.THROTTLED_S = 0.0
    return profile_layers(
        config,
        layer_graph(config),
        "cpu",
        torch.device("cpu"),
        precision="fp32",
        micro_batch_sizes=(1,),
        throttled=True,
    )


def test_throttled_ranks_keep_their_own_times(worker_pool):
    profiles = worker_pool.run(throttled_profile, ranks=2)
    assert profiles[0].timings != profiles[1].timings
    for timing in profiles[0].timings:
        assert min(timing.forward_s, timing.backward_s, timing.update_s) > 0


def tied_profile(rank: int, ranks: int) -> int:
    config = tiny(tied=True)
    device = torch.device("cpu")
    profile = profile_layers(
        config, layer_graph(config), "cpu", device, precision="fp32", micro_batch_sizes=(1,)
    )
    return len(profile.timings)


def test_a_tied_model_can_be_profiled(worker_pool):
    assert worker_pool.run(tied_profile, ranks=1)[0] == 3


def machine(rank: int, ranks: int):
    told: list[WorkDone] = []
    with patch.object(interference, "SEQUENCE", SHORT):
        measured = measure_machine(this_machine(), torch.device("cpu"), budget_s=0.005, report=told.append)
    return measured, told


@pytest.fixture(scope="module")
def told_machines(worker_pool):
    """The measurement of this machine by each of two ranks, and the progress that it told."""
    return worker_pool.run(machine, ranks=2)


@pytest.fixture(scope="module")
def machines(told_machines):
    return [measured for measured, _ in told_machines]


def require_counted(told: list[WorkDone], work: str) -> None:
    """Counts of one piece of work, from nothing to all of it, one by one."""
    total = told[0].total
    assert told == [WorkDone(work, done, total, "parts") for done in range(total + 1)]


def test_a_measurement_tells_of_every_part(told_machines, worker_pool):
    for _, told in told_machines:
        require_counted(told, "this machine")
    for throttled in (False, True):
        (told,) = worker_pool.run(told_layers, throttled, ranks=1)
        require_counted(told, "layers of tiny-gpt")


def told_layers(rank: int, ranks: int, throttled: bool) -> list[WorkDone]:
    told: list[WorkDone] = []
    config, layers.THROTTLED_S = tiny(), 0.0
    sizes = {"precision": "fp32", "micro_batch_sizes": (1, 2)}
    cpu = torch.device("cpu")
    profile_layers(config, layer_graph(config), "cpu", cpu, **sizes, throttled=throttled, report=told.append)
    return told


def test_every_rank_returns_the_same_complete_measurement(machines):
    first, second = machines
    assert first == second
    assert min(first.compute_slowdown, first.communication_slowdown) >= 1.0
    assert first.instruction_s > 0
    assert set(first.collectives) == set(COLLECTIVES)
    assert all(set(tables) == {2} for tables in first.collectives.values())
    sums = [table for tables in first.collectives.values() for table in tables.values()]
    for table in (*first.matmul.values(), first.memory, first.message, *sums):
        sizes = [size for size, _ in table]
        assert sizes == sorted(set(sizes))
        assert all(value > 0 for _, value in table)


def collectives(rank: int, ranks: int):
    return collective_tables(2, torch.device("cpu"), (4096, 10_000), rounds=3)


def test_collectives_are_measured_in_groups_with_ranks_left_over(worker_pool):
    first, *others = worker_pool.run(collectives, ranks=3)
    assert all(other == first for other in others)
    assert set(first) == set(COLLECTIVES)
    for table in first.values():
        assert [size for size, _ in table] == [4096.0, 10_000.0]
        assert all(seconds > 0 for _, seconds in table)


@pytest.mark.parametrize(("ranks", "counts"), [(1, ()), (2, (2,)), (6, (2, 4, 6)), (8, (2, 4, 8))])
def test_collectives_are_measured_at_powers_of_two_and_among_all_ranks(ranks, counts):
    assert rank_counts(ranks) == counts


def alone(rank: int, ranks: int):
    with patch.object(interference, "SEQUENCE", SHORT):
        return measure_interference(this_machine(), torch.device("cpu"))


def test_a_single_rank_is_slowed_by_nobody(worker_pool):
    found = worker_pool.run(alone, ranks=1)[0]
    assert (found.compute_slowdown, found.communication_slowdown) == (1.0, 1.0)
    assert found.instruction_s > 0


def test_measurements_survive_the_worker_and_the_file(profile_of, machines, tmp_path):
    profile, measured = profile_of("gpt-1m"), machines[0]
    assert profile_from_record(json.loads(json.dumps(asdict(profile)))) == profile
    save_profile(profile, tmp_path)
    assert load_profile(profile.model_fingerprint, "cpu", 64, "fp32", tmp_path) == profile
    record = json.loads(json.dumps(asdict(measured)))
    assert TypeAdapter(type(measured)).validate_python(record) == measured
    save_machine(measured, tmp_path)
    assert load_machine(measured.device, tmp_path) == measured


def test_the_spread_is_relative():
    timing = summarise([1.0, 1.0, 1.0, 1.0])
    assert (timing.seconds, timing.spread) == (1.0, 0.0)
    assert summarise([0.9, 1.0, 1.1]).spread == pytest.approx(summarise([9.0, 10.0, 11.0]).spread)


def test_calls_that_take_longer_now_and_then_count_as_a_step_meets_them():
    assert summarise([1.0] * 8 + [2.0, 2.0]).seconds == pytest.approx(1.2)


def test_one_call_that_met_something_else_counts_as_three_usual_ones():
    assert summarise([1.0] * 9 + [500.0]).seconds == pytest.approx(1.2)


def test_the_doctor_finds_predictions_that_do_not_hold(monkeypatch, tmp_path):
    monkeypatch.setenv("WEFT_HOME", str(tmp_path))
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        ledger.score(record(ledger), 100.0)
    found = {part.part: part for part in doctor.examine()}["predictions"]
    assert (found.good, found.needed) == (False, False)
    assert "0% inside their interval" in found.found
    assert found.remedy.startswith("weft measure")


def test_the_doctor_names_the_remedy_for_what_is_missing(monkeypatch, tmp_path):
    monkeypatch.setenv("WEFT_HOME", str(tmp_path))
    present = {finding.part: finding for finding in doctor.examine()}
    assert present["torch"].good
    assert not present["measurements"].good
    assert present["measurements"].remedy == "weft measure"

    def missing(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(doctor, "version", missing)
    absent = {finding.part: finding for finding in doctor.examine()}
    assert not absent["torch"].good
    assert ".[torch]" in absent["torch"].remedy
