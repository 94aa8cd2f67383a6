"""Laws of factored sums: replicas agree, nothing gets lost, and messages have the bytes that are priced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import convolutional_jobs
import pytest
import torch
import torch.distributed as dist
from pool import WorkerPool
from small_plans import tiny

from weft.describe.amount import Shape
from weft.describe.families import layer_graph
from weft.describe.model import ModelConfig
from weft.describe.models import resolve_model
from weft.methods.power_sgd.options import PowerSgdOptions
from weft.methods.power_sgd.runtime import FactoredStage, PowerSgd
from weft.methods.power_sgd.traffic import sent_elements
from weft.run.stage.build import build_stage
from weft.run.state.bucket import FlatLayout, make_buckets
from weft.run.transport.host_group import HostGroup
from weft.sync.base import Meeting, ParameterPlace

SHAPES = ((12, 10), (7,), (9, 3, 4), (2, 2), (30, 1))
OPTIONS = PowerSgdOptions(rank=2, minimum_compression=1.5)
LENGTH = 12 * 24


def places() -> list[ParameterPlace]:
    """Parameters with gaps between them."""
    starts = [sum(prod(shape) + 2 for shape in SHAPES[:number]) for number in range(len(SHAPES))]
    return [ParameterPlace(start, shape) for start, shape in zip(starts, SHAPES, strict=True)]


def gradients(rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    flat = torch.zeros(LENGTH, dtype=torch.float64)
    for start, shape in places():
        flat[start : start + prod(shape)] = torch.randn(prod(shape), generator=generator, dtype=flat.dtype)
    return flat


def begun(options: PowerSgdOptions = OPTIONS) -> PowerSgd:
    one = PowerSgd(options)
    one.lay_out(0, places())
    one.begin(0, torch.zeros(LENGTH, dtype=torch.float64))
    return one


def stepped(
    one: PowerSgd, group: HostGroup, steps: Sequence[int], flat_of: Callable[[int, int], torch.Tensor]
) -> list[torch.Tensor]:
    sums = [flat_of(group.place, step) for step in steps]
    for step, flat in zip(steps, sums, strict=True):
        one.reduce(flat, Meeting(group=group, stage=0, step=step))
    return sums


def test_long_enough_matrices_are_factored_and_nothing_else() -> None:
    parts = FactoredStage.of(places(), OPTIONS)
    assert [(one.rows, one.columns, one.rank) for one in parts.matrices] == [(12, 10, 2), (9, 12, 2)]
    assert [one.stop - one.start for one in parts.others] == [7, 4, 30]


def replicas(rank: int, ranks: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    one = begun()
    sums = stepped(one, HostGroup(dist.new_group()), range(4), gradients)
    return sums, one.tensors()["error/0"]


@pytest.mark.processes
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_sums_and_errors_add_up_to_the_gradients(worker_pool: WorkerPool, ranks: int) -> None:
    found = worker_pool.run(replicas, ranks=ranks)
    sums, _ = found[0]
    for others, error in found:
        assert all(torch.equal(one, other) for one, other in zip(sums, others, strict=True))
        assert error.any()
    given = sum(gradients(rank, step) for rank in range(ranks) for step in range(4))
    torch.testing.assert_close(sum(sums) + sum(error for _, error in found), given, rtol=0.0, atol=1e-12)
    first = sum(gradients(rank, 0) for rank in range(ranks))
    for start, shape in places():
        whole = slice(start, start + prod(shape))
        is_factored = shape in ((12, 10), (9, 3, 4))
        assert torch.equal(sums[0][whole], first[whole]) != is_factored
        if is_factored:
            assert torch.linalg.matrix_rank(sums[0][whole].view(shape[0], -1)) == 2


def low_rank(rank: int, step: int) -> torch.Tensor:
    flat = torch.zeros(LENGTH, dtype=torch.float64)
    flat[:120] = torch.outer(torch.arange(1.0, 13.0), torch.arange(10.0) - rank).view(-1)
    return flat


def decode_low_rank(rank: int, ranks: int) -> torch.Tensor:
    one, group = begun(), HostGroup(dist.new_group())
    # A step without any gradient does not spoil the next.
    stepped(one, group, [0], lambda place, step: torch.zeros(LENGTH, dtype=torch.float64))
    return stepped(one, group, [1], low_rank)[0]


@pytest.mark.processes
def test_a_gradient_of_low_rank_arrives_whole(worker_pool: WorkerPool) -> None:
    expected = low_rank(0, 1) + low_rank(1, 1)
    for found in worker_pool.run(decode_low_rank, ranks=2):
        torch.testing.assert_close(found, expected, rtol=0.0, atol=1e-12)


def meet_infinity(rank: int, ranks: int, where: int) -> bool:
    """Whether a step with a number that is not finite changes no later one."""

    def broken(place: int, step: int) -> torch.Tensor:
        flat = gradients(place, step)
        if place == 1:
            flat[where] = float("inf")
        return flat

    group, with_it, without = HostGroup(dist.new_group()), begun(), begun()
    stepped(with_it, group, [0, 1], gradients)
    stepped(without, group, [0, 1], gradients)
    assert not stepped(with_it, group, [2], broken)[0].isfinite().all()
    found, expected = (stepped(one, group, [3, 4], gradients) for one in (with_it, without))
    return all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.processes
@pytest.mark.parametrize("where", [5, 123])
def test_errors_and_factors_outlive_a_gradient_that_is_not_finite(
    worker_pool: WorkerPool, where: int
) -> None:
    assert all(worker_pool.run(meet_infinity, where, ranks=2))


def start_late_and_go_on(rank: int, ranks: int) -> bool:
    """Two dense steps, two with factors, of which another synchroniser goes on with the loaded tensors."""
    options = OPTIONS.model_copy(update={"start_step": 2})
    group, one, other = HostGroup(dist.new_group()), begun(options), begun(options)
    for step, found in enumerate(stepped(one, group, [0, 1], gradients)):
        assert torch.equal(found, gradients(0, step) + gradients(1, step))
    stepped(one, group, [2], gradients)
    for name, value in one.tensors().items():
        other.tensors()[name].copy_(value)
    whole = stepped(one, group, [3], gradients)[0]
    share = other.reduce_scatter(gradients(rank, 3), Meeting(group=group, stage=0, step=3))
    # Weights of several stages have no errors.
    shared = gradients(rank, 3)
    one.reduce(shared, Meeting(group=group, stage=-1, step=3))
    assert torch.equal(shared, gradients(0, 3) + gradients(1, 3))
    return torch.equal(share, whole.view(ranks, -1)[rank])


@pytest.mark.processes
def test_dense_steps_come_first_and_a_copy_of_the_tensors_goes_on(worker_pool: WorkerPool) -> None:
    assert all(worker_pool.run(start_late_and_go_on, ranks=2))


MODELS = {"gpt-1m": 0.01, "tiny-llama": 0.18, "tiny-resnet": 0.0, "own_models:text": 0.0}


def model_of(name: str) -> ModelConfig:
    if name == "tiny-llama":
        return tiny("llama")
    return convolutional_jobs.tiny("resnet") if name == "tiny-resnet" else resolve_model(name)


def sent_by(rank: int, ranks: int, name: str) -> tuple[int, int, int]:
    """The elements of a stage's messages, those of its factors and vectors, and those that the graph says."""
    options, config = PowerSgdOptions(rank=1, minimum_compression=1.0), model_of(name)
    graph, sent = layer_graph(config), []
    layout = FlatLayout.of(build_stage(config, range(len(graph.layers)), 0, torch.float32), ranks)
    bucket = make_buckets({0: layout}, 1, torch.float32)[0]

    class Metered(HostGroup):
        def add_up(self, flat: torch.Tensor, sent_as: torch.dtype | None = None) -> None:
            sent.append(len(flat))
            super().add_up(flat, sent_as)

    one = PowerSgd(options)
    one.lay_out(0, bucket.places)
    one.begin(0, bucket.flat)
    one.reduce(bucket.flat.clone(), Meeting(group=Metered(dist.new_group()), stage=0))
    assert len(sent) == 2
    parts = FactoredStage.of(bucket.places, options)
    factors = sum(each.rank * (each.rows + each.columns) for each in parts.matrices)
    counted = factors + sum(other.stop - other.start for other in parts.others)
    return (
        sum(sent),
        counted,
        sent_elements(options, graph, range(len(graph.layers)), Shape(2, graph.sequence)),
    )


@pytest.mark.processes
@pytest.mark.parametrize("name", MODELS)
def test_messages_have_the_elements_of_the_formula(worker_pool: WorkerPool, name: str) -> None:
    for sent, counted, priced in worker_pool.run(sent_by, name, ranks=3):
        assert counted <= sent < counted + 2 * 3
        assert priced == pytest.approx(counted, rel=MODELS[name])
