"""Laws of two-way exchanges: nothing gets lost, replicas agree, bytes are those of the formula."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import isfinite, prod, sqrt
from pathlib import Path
from typing import Any

import pytest
import torch
from equality_jobs import LOSSES
from equality_table import Row, together, train
from hypothesis import given
from hypothesis import strategies as st
from pool import WorkerPool
from saved_checkpoints import save_checkpoint
from small_jobs import SEED, batch_of, make_runtime, parameters_of
from small_plans import divisible, make_plan, make_program, tiny
from thread_group import ThreadGroup, in_groups

from weft.describe.model import ModelConfig
from weft.describe.plan import Choice, Plan
from weft.methods.clan.options import CODECS, NAME, ClanOptions
from weft.methods.clan.ranges import pieces_of
from weft.methods.clan.runtime.exchange import TwoWaySums
from weft.run.runtime import RankRuntime
from weft.run.state.synchroniser_state import SYNCHRONISER, UNSENT
from weft.sync.base import Meeting, ParameterPlace
from weft.training.checkpoint import checkpoints
from weft.training.checkpoint.tensor_shares import join_shares
from weft.training.checkpoint.training_state import TrainingState
from weft.training.optimizer.optimizers import OptimizerSettings, optimizer_factory

# Parameters with gaps between them; the second and the last are small.
SHAPES = ((12, 10), (7,), (9, 3, 4), (30, 7), (5,))
LARGE = (0, 2, 3)
LENGTH = 12 * 40
EXACT = 1e-12


def table(codec: str = "scaled-sign", **changes: Any) -> ClanOptions:
    given_ = {"codec": codec, "block": 32, "ratio": 8.0, "minimum_bytes": 400, **changes}
    return ClanOptions.model_validate(given_)


def places() -> list[ParameterPlace]:
    starts = [sum(prod(shape) + 2 for shape in SHAPES[:number]) for number in range(len(SHAPES))]
    return [ParameterPlace(start, shape) for start, shape in zip(starts, SHAPES, strict=True)]


def gradient_of(rank: int, step: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator, flat = torch.Generator().manual_seed(10 * step + rank), torch.zeros(LENGTH, dtype=dtype)
    for start, shape in places():
        flat[start : start + prod(shape)] = torch.randn(prod(shape), generator=generator, dtype=dtype)
    return flat


class Replica:
    """One replica of a stage in a group of threads."""

    def __init__(
        self, options: ClanOptions, group: ThreadGroup, pieces: int = 2, dtype: torch.dtype = torch.float64
    ) -> None:
        self.sums, self.group, self.pieces = TwoWaySums(options), group, pieces
        self.sums.lay_out(0, places())
        self.sums.cut(0, pieces, group)
        self.sums.begin(0, torch.zeros(LENGTH, dtype=dtype))

    def step(self, gradient: torch.Tensor, step: int) -> torch.Tensor:
        """The sum of all replicas' gradients; instructions of pieces in the order of the program."""
        flat = gradient.clone()
        meeting = Meeting(group=self.group, stage=0, step=step, replica=self.group.place, seed=SEED)
        order = ("compress", "push", "aggregate", "pull", "decompress")
        later = (0, 0, 1, 1, 2)
        for turn in range(self.pieces + 2):
            for name, lag in zip(order, later, strict=True):
                if 0 <= turn - lag < self.pieces:
                    getattr(self.sums, name)(flat, replace(meeting, part=turn - lag))
        self.sums.reduce(flat, meeting)
        return flat

    def steps(
        self, gradients: Callable[[int, int], torch.Tensor], steps: Sequence[int]
    ) -> list[torch.Tensor]:
        return [self.step(gradients(self.group.place, step), step) for step in steps]


def all_codecs() -> st.SearchStrategy[ClanOptions]:
    return st.builds(
        table,
        st.sampled_from(list(CODECS)),
        errors=st.sampled_from(["by codec", "kept", "dropped"]),
        bits=st.integers(2, 8),
        value_bits=st.sampled_from([16, 32]),
        block=st.sampled_from([32, 64]),
        piece_codecs=st.sampled_from(["", "0.0 fp32", "0.1 top-k, 0.0 natural-dithering"]),
    )


@given(all_codecs(), st.integers(1, 4), st.integers(1, 20))
def test_replicas_agree_nothing_gets_lost_and_bytes_are_those_of_the_formula(
    options: ClanOptions, replicas: int, pieces: int
) -> None:
    def work(group: ThreadGroup) -> tuple[list[torch.Tensor], torch.Tensor | None, dict[str, int]]:
        one = Replica(options, group, pieces)
        sums = one.steps(gradient_of, range(2))
        return sums, one.sums.carried(0), dict(group.sent_bytes)

    results = in_groups(replicas, work)
    sums, carried, _ = results[0]
    for others, left, _ in results:
        assert all(torch.equal(one, other) for one, other in zip(sums, others, strict=True))
        assert (left is None) != options.keeps_errors
        assert left is None or torch.equal(left, carried)
    given_ = [sum(gradient_of(rank, step) for rank in range(replicas)) for step in range(2)]
    if carried is not None:
        torch.testing.assert_close(sum(sums) + carried, sum(given_), rtol=0.0, atol=EXACT)
    for number, (start, shape) in enumerate(places()):
        if number not in LARGE:
            one = slice(start, start + prod(shape))
            assert all(torch.equal(found[one], exact[one]) for found, exact in zip(sums, given_, strict=True))
    elements = sum(prod(SHAPES[number]) for number in LARGE)
    lengths = [elements * (n + 1) // pieces - elements * n // pieces for n in range(pieces)]
    sent = sum(
        options.of_piece(0, part).payload_bytes(-(-length // (replicas * options.block)))
        for part, length in enumerate(lengths)
    )
    for _, _, counted in results:
        assert counted["all_to_all"] == 2 * (replicas - 1) * sent
        assert counted["all_gather"] == 2 * (replicas - 1) * sent


@given(st.sampled_from(["top-k", "fp32"]), st.integers(1, 4), st.integers(1, 5))
def test_a_codec_that_leaves_nothing_out_is_a_plain_sum(codec: str, replicas: int, pieces: int) -> None:
    options = table(codec, ratio=1.0)

    def single(rank: int, step: int) -> torch.Tensor:
        return gradient_of(rank, step, torch.float32)

    found = in_groups(
        replicas, lambda group: Replica(options, group, pieces, torch.float32).steps(single, range(2))
    )
    for step in range(2):
        exact = single(0, step)
        for rank in range(1, replicas):
            exact = exact + single(rank, step)
        assert all(torch.equal(sums[step], exact) for sums in found)


@pytest.mark.parametrize("codec", [name for name, one in CODECS.items() if one.biased])
@pytest.mark.parametrize("number", [torch.inf, torch.nan])
def test_errors_outlive_a_gradient_that_is_not_finite(codec: str, number: float) -> None:
    def broken(place: int, step: int) -> torch.Tensor:
        flat = gradient_of(place, step)
        if place == 1:
            flat[[5, 300]] = number
        return flat

    def work(group: ThreadGroup) -> tuple[bool, list[torch.Tensor]]:
        # Both pieces have such a number.
        with_it, without = Replica(table(codec), group), Replica(table(codec), group)
        before = [one.steps(gradient_of, [0, 1]) for one in (with_it, without)]
        assert torch.equal(*(one[1] for one in before))
        spoilt = with_it.step(broken(group.place, 2), 2)
        after = [one.steps(gradient_of, [3, 4]) for one in (with_it, without)]
        same = all(torch.equal(one, other) for one, other in zip(*after, strict=True))
        return same, [spoilt[:120].isfinite().all(), spoilt[260:340].isfinite().all()]

    for same, finite in in_groups(2, work):
        assert same
        assert not any(finite)


@pytest.mark.parametrize("ratio", [2.0, 8.0])
def test_norms_of_errors_keep_to_their_bound(ratio: float) -> None:
    options = table("top-k", ratio=ratio)

    def work(group: ThreadGroup) -> list[float]:
        one, norms = Replica(options, group), []
        for step in range(60):
            gradient = gradient_of(group.place, step)
            one.step(gradient / gradient.norm(), step)
            norms.append(one.sums.tensors()["error/0"].norm().item())
        return norms

    # Blocks of a share may be shorter than others, and send no smaller part.
    left = sqrt(1.0 - options.kept / options.block)
    for norms in in_groups(2, work):
        assert 0.0 < norms[0] <= left
        assert max(norms) <= left / (1.0 - left)


@pytest.mark.parametrize("codec", ["random-k", "natural-dithering"])
def test_draws_depend_on_the_step_and_not_on_the_steps_before(codec: str) -> None:
    def work(group: ThreadGroup) -> tuple[torch.Tensor, torch.Tensor]:
        first, second = Replica(table(codec), group), Replica(table(codec), group)
        first.steps(gradient_of, range(3))
        for name, value in first.sums.tensors().items():
            second.sums.tensors()[name].copy_(value)
        return first.step(gradient_of(group.place, 3), 3), second.step(gradient_of(group.place, 3), 3)

    assert all(torch.equal(*pair) for pair in in_groups(2, work))


def test_a_weight_of_several_stages_is_summed_as_it_is() -> None:
    def work(group: ThreadGroup) -> torch.Tensor:
        flat = gradient_of(group.place, 0)
        Replica(table(), group).sums.reduce(flat, Meeting(group=group, stage=-1))
        return flat

    assert all(torch.equal(one, gradient_of(0, 0) + gradient_of(1, 0)) for one in in_groups(2, work))


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 300)), max_size=6),
    st.integers(1, 9),
    st.integers(1, 4),
)
def test_pieces_and_shares_cover_all_ranges_once(
    gaps: list[tuple[int, int]], count: int, shares: int
) -> None:
    ranges, begins = [], 0
    for gap, length in gaps:
        ranges.append(slice(begins + gap, begins + gap + length))
        begins = ranges[-1].stop
    pieces = pieces_of(ranges, count, 32, shares)
    assert len(pieces) == count
    wanted = [index for one in ranges for index in range(one.start, one.stop)]
    assert [
        index for one in pieces for r in one.ranges for index in range(r.flat.start, r.flat.stop)
    ] == wanted
    for one in pieces:
        owned = [part for place in range(shares) for part in one.owned_ranges(place, 32)]
        assert sum(part.flat.stop - part.flat.start for part in owned) == one.elements
        assert sum(one.elements_of(place, 32) for place in range(shares)) == one.elements
        assert all(part.place >= 0 and part.own.stop <= 32 * one.blocks for part in owned)


CONFIG = tiny(layers=2)
STEPS, DONE = 5, 3
ADAMW = OptimizerSettings(name="adamw", learning_rate=0.05, betas=(0.9, 0.95), weight_decay=0.2)
SMALL = {"codec": "top-k", "ratio": 8.0, "block": 32, "minimum_bytes": 512, "piece_bytes": 4096}


def compressed(plan: Plan, **options: Any) -> Plan:
    return plan.model_copy(update={"sync": Choice(name=NAME, options={**SMALL, **options})})


def opened(rank: int, plan: Plan, generation: int = 0, config: ModelConfig = CONFIG) -> RankRuntime:
    return make_runtime(
        rank,
        config,
        plan,
        make_program(config, plan),
        loss_fn=LOSSES["columns"],
        optimizer_factory=optimizer_factory(ADAMW),
        generation=generation,
    )


def parts_of(runtime: RankRuntime) -> tuple[Any, ...]:
    return runtime.stages, runtime.optimizers, runtime.stepped, runtime.methods


def save(runtime: RankRuntime, plan: Plan, folder: Path) -> None:
    scalars = {"seed": SEED, "samples": 0, "model": "", "precision": "", "data": "", "first_loss": 0.0}
    state = TrainingState(step=DONE, plan_id=plan.plan_id, **scalars)
    save_checkpoint(folder, state, *parts_of(runtime), keep=1)


def resume(
    rank: int, ranks: int, plan: Plan, folder: Path
) -> list[tuple[list[float], dict[str, torch.Tensor]]]:
    """Trained in one go, stopped, and resumed."""
    outcomes = []
    for start, end in ((0, STEPS), (0, DONE), (DONE, STEPS)):
        runtime = opened(rank, plan, len(outcomes))
        if start:
            checkpoints.load(folder / f"step-{DONE:08}", *parts_of(runtime), plan_ids={plan.plan_id})
        losses = [runtime.step(step, batch_of(CONFIG, plan, step)).loss for step in range(start, end)]
        if end == DONE:
            save(runtime, plan, folder)
        outcomes.append((losses, parameters_of(runtime)))
        runtime.close()
    return outcomes


@pytest.mark.processes
@pytest.mark.parametrize(("codec", "servers"), [("top-k", 0), ("natural-dithering", 0), ("top-k", 2)])
def test_a_resumed_run_goes_on_to_the_bit(
    worker_pool: WorkerPool, tmp_path: Path, codec: str, servers: int
) -> None:
    plan = make_plan(CONFIG, pp=1, dp=2, precision="bf16")
    plan = compressed(plan, codec=codec, servers=servers)
    for whole, stopped, resumed in worker_pool.run(resume, plan, tmp_path, ranks=plan.ranks):
        assert stopped[0] + resumed[0] == whole[0]
        assert all(torch.equal(value, whole[1][name]) for name, value in resumed[1].items())


def begin_and_save(
    rank: int, ranks: int, config: ModelConfig, plan: Plan, folder: Path
) -> dict[str, torch.Tensor]:
    runtime = opened(rank, plan, config=config)
    assert all(isfinite(runtime.step(step, batch_of(config, plan, step)).loss) for step in range(DONE))
    save(runtime, plan, folder)
    left = unsent(runtime)
    runtime.close()
    return left


def load_and_tell(
    rank: int, ranks: int, config: ModelConfig, plan: Plan, folder: Path
) -> dict[str, torch.Tensor]:
    runtime = opened(rank, plan, config=config)
    checkpoints.load(folder / f"step-{DONE:08}", *parts_of(runtime))
    kept = runtime.methods[SYNCHRONISER].rank_tensors()
    assert not any(one.any() for name, one in kept.items() if name.startswith("error/"))
    left = unsent(runtime)
    assert isfinite(runtime.step(DONE, batch_of(config, plan, DONE)).loss)
    runtime.close()
    return left


def unsent(runtime: RankRuntime) -> dict[str, torch.Tensor]:
    """What all replicas together have not sent, by parameter."""
    for one in runtime.methods.values():
        one.agreed({}, {})
    state = runtime.methods[SYNCHRONISER]
    tensors = {f"method/{SYNCHRONISER}/{name}": one for name, one in state.tensors().items()}
    return {name: one.clone() for name, one in join_shares(runtime.stages, tensors).items()}


WIDE = divisible("gpt")


def in_parts(servers: int = 0, **axes: int) -> Plan:
    return compressed(Row(WIDE, precision="fp32", **axes).plan, servers=servers)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("first", "then"),
    [
        ({"dp": 2}, {"dp": 3}),
        ({"dp": 2, "tp": 2}, {"pp": 2, "dp": 2}),
        ({"dp": 2, "servers": 2}, {"dp": 3}),
        ({"dp": 2}, {"pp": 2, "dp": 2, "servers": 1}),
    ],
    ids=str,
)
def test_unsent_gradients_are_the_same_sum_in_another_plan(
    worker_pool: WorkerPool, tmp_path: Path, first: dict[str, int], then: dict[str, int]
) -> None:
    plans, told = [in_parts(**axes) for axes in (first, then)], []
    for work, plan in zip((begin_and_save, load_and_tell), plans, strict=True):
        found = worker_pool.run(work, WIDE, plan, tmp_path, ranks=plan.ranks)
        told.append({name: one for own in found for name, one in own.items()})
    # So the run does not say that it begins anew.
    assert not checkpoints.has_rank_tensors(tmp_path / f"step-{DONE:08}")
    before, after = told
    assert before.keys() == after.keys()
    assert sum(bool(one.any()) for one in before.values()) > 3
    assert all(torch.equal(one, after[name]) for name, one in before.items())
    assert all(name.endswith(f"/{UNSENT}") for name in before)


@pytest.mark.processes
def test_tensor_ranks_decode_alike_what_they_hold_alike(worker_pool: WorkerPool, tmp_path: Path) -> None:
    row = Row(WIDE, dp=2, tp=2, precision="fp32", steps=3)
    plan = compressed(row.plan, minimum_bytes=64)
    # Of every tensor, all ranks have the same bits.
    steps, _ = together(worker_pool.run(train, row, plan, ranks=4))
    assert 0.0 < steps[-1]["contraction_of_stage_0"][0] < 1.0
