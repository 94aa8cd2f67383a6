"""Laws of SDP4Bit's exchanges: bytes, sums of one lattice, weights that follow, bits of a resumed run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from methods.rows.sdp4bit import FewBits
from pool import WorkerPool
from saved_checkpoints import save_checkpoint
from small_jobs import SEED, batch_of, make_runtime, parameters_of
from small_plans import make_plan, make_program, tiny

from weft.describe.plan import Choice, Plan
from weft.methods.sdp4bit.options import NAME, Sdp4BitOptions
from weft.methods.sdp4bit.runtime import QuantisedSharding
from weft.run.transport.host_group import HostGroup
from weft.sync.base import Meeting
from weft.training.checkpoint import checkpoints
from weft.training.checkpoint.training_state import TrainingState
from weft.training.optimizer.optimizers import OptimizerSettings, optimizer_factory

CONFIG = tiny(layers=2)
STEPS, DONE = 5, 3
ADAMW = OptimizerSettings(name="adamw", learning_rate=0.05, betas=(0.9, 0.95), weight_decay=0.2)


class Counting(HostGroup):
    """Counts the bytes that this rank sends to others, by call."""

    def __init__(self, group: dist.ProcessGroup, sent: Counter[str]) -> None:
        super().__init__(group)
        self._sent = sent

    def all_to_all(self, taken: torch.Tensor, given: torch.Tensor) -> None:
        self._sent["inside"] += given.nbytes // self.size * (self.size - 1)
        super().all_to_all(taken, given)

    def exchange(self, taken: torch.Tensor, given: torch.Tensor, places: Sequence[int]) -> None:
        self._sent["between"] += given.nbytes // len(places) * (len(places) - 1)
        super().exchange(taken, given, places)

    def all_gather(self, flat: torch.Tensor, share: torch.Tensor) -> None:
        self._sent["weights"] += share.nbytes * (self.size - 1)
        super().all_gather(flat, share)


def reduce_and_gather(
    rank: int, ranks: int, gradients: Sequence[torch.Tensor], options: Sdp4BitOptions
) -> tuple[torch.Tensor, Counter[str]]:
    """This rank's share of the sum of one gradient of each rank, and the bytes that it sent for it."""
    sent: Counter[str] = Counter()
    synchroniser, mine = QuantisedSharding(options), gradients[rank].clone()
    everyone = Counting(dist.new_group(), sent)
    step = options.replicas_per_node
    nodes = [dist.new_group(list(range(first, first + step))) for first in range(0, ranks, step)]
    if options.has_two_levels(ranks):
        inside = Counting(nodes[rank // step], sent)
        for number in range(options.slices):
            synchroniser.reduce_inside(
                mine, ranks, Meeting(group=inside, stage=0, part=number, replica=rank, seed=SEED)
            )
        for number in range(options.slices - 1):
            meeting = Meeting(group=everyone, stage=0, part=number, replica=rank, seed=SEED)
            synchroniser.reduce_between(mine, meeting)
    meeting = Meeting(group=everyone, stage=0, replica=rank, seed=SEED)
    share = synchroniser.reduce_scatter(mine, meeting)
    assert torch.equal(mine, gradients[rank])
    synchroniser.gather(torch.zeros_like(mine), torch.ones_like(share), meeting)
    return share, sent


def payload_bytes(bits: int, group: int, elements: int) -> int:
    """Codes up to whole words of 4 bytes, and a scale of 4 bytes for each group."""
    return 4 * -(-elements * bits // 32) + 4 * -(-elements // group)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("ranks", "per_node", "slices"), [(2, 1, 1), (2, 2, 1), (3, 1, 1), (4, 2, 1), (4, 2, 3), (4, 4, 1)]
)
@pytest.mark.parametrize("length", [16, 400])
def test_bytes_on_the_way_are_those_of_the_formulas(
    worker_pool: WorkerPool, ranks: int, per_node: int, slices: int, length: int
) -> None:
    options = Sdp4BitOptions(
        replicas_per_node=per_node, slices=slices, gradient_group=32, weight_group=64, weight_bits=3
    )
    gradients = [torch.randn(ranks * length) for _ in range(ranks)]
    nodes = ranks // per_node
    weights = (ranks - 1) * payload_bytes(3, 64, length)
    if nodes == 1 or per_node == 1:
        bits = 8 if nodes == 1 else 4
        expected = Counter(inside=(ranks - 1) * payload_bytes(bits, 32, length), weights=weights)
    else:
        # Slices end at whole groups, so together they have the bytes of a whole share.
        expected = Counter(
            inside=(per_node - 1) * nodes * payload_bytes(8, 32, length),
            between=(nodes - 1) * payload_bytes(4, 32, length),
            weights=weights,
        )
    for _, sent in worker_pool.run(reduce_and_gather, gradients, options, ranks=ranks):
        assert sent == expected


@pytest.mark.processes
@pytest.mark.parametrize(("per_node", "slices"), [(1, 1), (2, 1), (2, 2), (4, 1)])
def test_sums_of_one_lattice_are_exact(worker_pool: WorkerPool, per_node: int, slices: int) -> None:
    options = Sdp4BitOptions(replicas_per_node=per_node, slices=slices, smooth=False, gradient_group=32)
    # The largest number of each group or nothing: so are all sums, times a factor.
    one = 127.0 * torch.randint(-1, 2, (4 * 96,)).float()
    one[::32] = 127.0
    shares = worker_pool.run(reduce_and_gather, [one] * 4, options, ranks=4)
    assert torch.equal(torch.cat([share for share, _ in shares]), 4 * one)


@pytest.mark.processes
def test_a_number_that_is_none_stays_in_its_group_and_is_lost_nowhere(worker_pool: WorkerPool) -> None:
    gradients = [torch.randn(4 * 256) for _ in range(4)]
    gradients[2][300] = float("inf")
    options = Sdp4BitOptions(replicas_per_node=2)
    found = torch.cat([share for share, _ in worker_pool.run(reduce_and_gather, gradients, options, ranks=4)])
    assert found.isfinite().logical_not().nonzero().flatten().tolist() == list(range(256, 384))


def follow(
    rank: int, ranks: int, weights: str, precision: torch.dtype
) -> tuple[list[float], float, torch.Tensor]:
    """The distances of weights from their random walk in 2,000 steps: relative to the bound, and absolute."""
    group = HostGroup(dist.new_group())
    table = Sdp4BitOptions(weights=weights, weight_group=64)
    synchroniser, generator = QuantisedSharding(table), torch.Generator().manual_seed(rank)
    master = torch.randn(256, generator=generator)
    shown = torch.empty(ranks * 256, dtype=precision)
    group.all_gather(shown, master.to(precision))
    mine, relative, absolute = shown.view(ranks, 256)[rank], [], 0.0
    for step in range(2000):
        master += 0.01 * torch.randn(256, generator=generator)
        own = master.to(precision)
        scale = (own - mine).float().abs().max() / 7
        synchroniser.gather(shown, own, Meeting(group=group, step=step, replica=rank, seed=SEED))
        ulp = torch.finfo(precision).eps * mine.float().abs()
        distance = (mine.float() - own.float()).abs()
        relative.append((distance / (1.01 * scale + ulp)).max().item())
        absolute += distance.mean().item() / 2000
    return relative, absolute, shown


@pytest.mark.processes
def test_weights_follow_within_a_scale_in_every_step_and_are_equal_on_all_ranks(
    worker_pool: WorkerPool,
) -> None:
    results = worker_pool.run(follow, "difference", torch.bfloat16, ranks=2)
    assert all(max(relative) <= 1.0 for relative, _, _ in results)
    assert torch.equal(results[0][2], results[1][2])
    direct = worker_pool.run(follow, "direct", torch.bfloat16, ranks=2)
    assert all(far > 10.0 * near for (_, near, _), (_, far, _) in zip(results, direct, strict=True))


def test_errors_of_heavy_tails_shrink_with_the_second_level_and_with_smoothing() -> None:
    """16 replicas on 4 nodes. A gradient has a common and an own part, both of Student's t(3)."""
    tails = torch.distributions.StudentT(3.0)
    torch.manual_seed(5)
    common = tails.sample((16 * 2048,))
    flats = [common + tails.sample(common.shape) for _ in range(16)]
    exact, errors = sum(flats)[:2048], []
    for options in ((("inside_bits", 4), ("smooth", False)), (("smooth", False),), ()):
        found = FewBits(16, 4, options=options).share_of(0, flats, 0, 0)
        errors.append(((found - exact).norm() / exact.norm()).item())
    # Measured by others for these three: 0.196, 0.168 and 0.090.
    assert errors == pytest.approx([0.196, 0.168, 0.090], rel=0.15)


def few_bits(plan: Plan, **options: object) -> Plan:
    sync = Choice(name=NAME, options=options)
    return plan.model_copy(update={"sync": sync, "sharding": "zero-1"})


def resume(
    rank: int, ranks: int, plans: Sequence[Plan], folder: Path, looks: bool
) -> list[tuple[list[float], dict[str, torch.Tensor]]]:
    """Trained in one go, stopped, and resumed with the plan that comes last.

    `looks` gathers weights between two steps, before the checkpoint is saved.
    """
    outcomes = []
    runs = ((plans[0], 0, STEPS), (plans[0], 0, DONE), (plans[-1], DONE, STEPS))
    for plan, start, end in runs:
        runtime = make_runtime(
            rank,
            CONFIG,
            plan,
            make_program(CONFIG, plan),
            optimizer_factory=optimizer_factory(ADAMW),
            generation=len(outcomes),
        )
        parts = runtime.stages, runtime.optimizers, runtime.stepped, runtime.methods
        if start:
            checkpoints.load(folder / f"step-{DONE:08}", *parts, plan_ids={plan.plan_id})
            runtime.gather_weights()
        losses = [runtime.step(step, batch_of(CONFIG, plan, step)).loss for step in range(start, end)]
        if looks or end == STEPS:
            runtime.gather_weights()
        if end == DONE:
            state = TrainingState(
                step=DONE, plan_id=plan.plan_id, seed=SEED, samples=0, model="", precision="", data="",
                first_loss=0.0,
            )  # fmt: skip
            save_checkpoint(folder, state, *parts, keep=1)
        outcomes.append((losses, parameters_of(runtime)))
        runtime.close()
    return outcomes


@pytest.mark.processes
@pytest.mark.parametrize(("looks", "precision"), [(False, "bf16"), (True, "fp32")])
def test_a_resumed_run_goes_on_to_the_bit(
    worker_pool: WorkerPool, tmp_path: Path, looks: bool, precision: str
) -> None:
    plan = few_bits(make_plan(CONFIG, pp=1, dp=2, precision=precision), replicas_per_node=1)
    for whole, stopped, resumed in worker_pool.run(resume, [plan], tmp_path, looks, ranks=2):
        assert stopped[0] + resumed[0] == whole[0]
        assert all(torch.equal(value, whole[1][name]) for name, value in resumed[1].items())
