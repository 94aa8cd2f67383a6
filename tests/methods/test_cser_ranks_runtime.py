"""Laws of CSER on ranks: stopped runs go on to the bit, lost replicas come back, missed resets are named."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from convolutional_jobs import images_of
from convolutional_jobs import tiny as convolutional
from equality_table import Row
from methods.test_local_averaging_runtime import resume
from methods.test_lost_replicas_runtime import broken_after
from pool import WorkerPool
from small_jobs import batch_of, descent, make_runtime, parameters_of
from small_plans import divisible, make_plan, make_program, tiny
from torch import nn

from weft.describe.families import layer_graph
from weft.describe.model import ModelConfig
from weft.describe.plan import Choice, Plan
from weft.errors import InputError
from weft.methods.cser.options import DISAGREEMENT, STALEST
from weft.methods.cser.runtime.replicas import CserReplicas
from weft.methods.cser.traffic import part_sizes
from weft.methods.local_averaging.options import LEFT_OUT
from weft.run.stage.batch_norm import StepBatchNorm

pytestmark = pytest.mark.processes


def with_sync(plan: Plan, method: str, **options: Any) -> Plan:
    return plan.model_copy(update={"sync": Choice(name=method, options=options)})


PAPER = {"update_ratio": 8.0, "reset_ratio": 2.0, "every": 3}


@pytest.mark.parametrize(
    ("pp", "precision", "options"),
    [
        (2, "bf16", PAPER),
        (1, "fp32", {**PAPER, "keep_errors": True, "order": "shuffled"}),
        (1, "bf16", {"compressor": "top-k", "ratio": 8.0}),
        (2, "fp32", {"variant": "code", **PAPER}),
        # Stopped while replica 1 is away.
        (1, "bf16", {**PAPER, "every": 2, "keep_errors": True, "absent": "1: 1", "rounds": 4}),
    ],
)
def test_a_run_resumed_between_resets_goes_on_to_the_bit(
    worker_pool: WorkerPool, tmp_path: Path, pp: int, precision: str, options: dict[str, Any]
) -> None:
    config = tiny(layers=2, tied=True)
    plan = with_sync(make_plan(config, pp=pp, dp=2, precision=precision), "cser", **options)
    replicas = worker_pool.run(resume, config, plan, tmp_path, 4, ranks=plan.ranks)
    for (losses, whole), (first, _), (second, resumed) in replicas:
        assert first + second == losses
        assert all(torch.equal(value, whole[name]) for name, value in resumed.items())
    one, other = replicas[0][1][1], replicas[pp][1][1]
    assert any(not torch.equal(value, other[name]) for name, value in one.items()), "replicas differ"


def train(
    rank: int, ranks: int, config: ModelConfig, plan: Plan, steps: range, broken: tuple[int, ...] = ()
) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
    """What every step told, and the weights; the weights of rank 1 are spoiled after `broken` steps."""
    factory: Any = descent
    if broken:
        factory = partial(broken_after, steps=broken[0] if rank == 1 else -1)
    runtime = make_runtime(rank, config, plan, make_program(config, plan), optimizer_factory=factory)
    results = [runtime.step(step, batch_of(config, plan, step)) for step in steps]
    told = [{"lost": result.lost_ranks, **result.totals} for result in results]
    weights = parameters_of(runtime)
    runtime.close()
    return told, weights


def let_in(rank: int, ranks: int, config: ModelConfig, plan: Plan) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The weights minus errors of every part, and the errors, once a new replica 1 is let in."""
    runtime = make_runtime(rank, config, plan, make_program(config, plan))
    for step in range(3):
        runtime.step(step, batch_of(config, plan, step))
    state = runtime.methods["cser"]
    assert isinstance(state, CserReplicas)
    parts = [one for stage in state.stages for one in state.synced_parts(stage)]
    errors = [one.tensors()[f"errors/{one.name}"] for one in parts]
    if rank == 1:
        for one, error in zip(parts, errors, strict=True):
            one.flat.fill_(7.0)
            error.zero_()
    state.take_in(away=rank == 1)
    common = [one.flat - error for one, error in zip(parts, errors, strict=True)]
    runtime.close()
    return common, torch.cat(errors)


def test_a_new_replica_takes_the_common_weights_of_the_others(worker_pool: WorkerPool) -> None:
    config = tiny(layers=2)
    plan = with_sync(Row(config, dp=2).plan, "cser", **PAPER, keep_errors=True)
    (mine, errors), (new, none) = worker_pool.run(let_in, config, plan, ranks=2)
    assert errors.any()
    assert not none.any()
    for one, other in zip(mine, new, strict=True):
        assert torch.allclose(one, other, rtol=0.0, atol=1e-12)
    assert (
        worker_pool.run(refuse_to_let_in, config, with_sync(plan, "cser", **PAPER), ranks=2)
        == ["plan: sync.options: replicas keep no errors (nearest valid: keep_errors = true)"] * 2
    )


def statistics_of(rank: int, ranks: int, config: ModelConfig, plan: Plan) -> tuple[list[torch.Tensor], ...]:
    """The running statistics of a rank before and after a new replica 2 is let in."""
    runtime = make_runtime(
        rank, config, plan, make_program(config, plan), loss_fn=nn.functional.cross_entropy
    )
    for step in range(2):
        runtime.step(step, images_of(config, plan, step))
    norms = [part for part in runtime.stages[0].modules() if isinstance(part, StepBatchNorm)]
    found = [value for part in norms for value in part.statistics()]
    for value in found if rank == 2 else ():
        value.fill_(7.0)
    before = [value.clone() for value in found]
    state = runtime.methods["cser"]
    assert isinstance(state, CserReplicas)
    state.take_in(away=rank == 2)
    after = [value.clone() for value in found]
    runtime.close()
    return before, after


def test_a_new_replica_takes_the_means_of_running_statistics(worker_pool: WorkerPool) -> None:
    config = convolutional("resnet")
    plan = with_sync(make_plan(config, dp=3, micro_batches=1), "cser", **PAPER, keep_errors=True)
    one, other, new = worker_pool.run(statistics_of, config, plan, ranks=3)
    assert one[0]
    for before, after in (one, other):
        assert all(map(torch.equal, before, after))
    for mine, its, found in zip(one[0], other[0], new[1], strict=True):
        assert torch.allclose(found, (mine + its) / 2, rtol=1e-12, atol=1e-12)


def refuse_to_let_in(rank: int, ranks: int, config: ModelConfig, plan: Plan) -> str:
    """What a plan without errors says."""
    runtime = make_runtime(rank, config, plan, make_program(config, plan))
    state = runtime.methods["cser"]
    assert isinstance(state, CserReplicas)
    try:
        state.take_in(away=rank == 1)
    except InputError as error:
        return str(error)
    finally:
        runtime.close()
    return ""


def test_whole_resets_of_tensor_ranks_are_local_averaging(worker_pool: WorkerPool) -> None:
    config = divisible("llama")
    plan = Row(config, dp=2, tp=2).plan
    found, expected = (
        worker_pool.run(train, config, with_sync(plan, method, every=2, **options), range(4), ranks=4)
        for method, options in (("cser", {"reset_ratio": 1.0}), ("local-averaging", {}))
    )
    for (_, mine), (_, its) in zip(found, expected, strict=True):
        for name, value in mine.items():
            assert torch.allclose(value, its[name], rtol=1e-12, atol=1e-14), name


@pytest.mark.parametrize("keep_errors", [False, True])
def test_a_lost_replica_is_back_when_resets_have_brought_its_blocks_back(
    worker_pool: WorkerPool, keep_errors: bool
) -> None:
    """With an error for every weight, the step that broke it is taken back at once."""
    config = tiny(layers=2)
    options = {"update_ratio": 8.0, "reset_ratio": 2.0, "every": 1, "order": "shuffled"}
    plan = with_sync(Row(config, dp=2).plan, "cser", keep_errors=keep_errors, **options)
    for told, weights in worker_pool.run(train, config, plan, range(6), (2,), ranks=2):
        # Two resets bring all blocks back, and meanwhile one step has a loss that is not finite.
        assert [step[LEFT_OUT] for step in told] == [0.0, 1.0, float(not keep_errors), 0.0, 0.0, 0.0]
        assert [step["lost"] for step in told] == [(), (), () if keep_errors else (1,), (), (), ()]
        assert all(one.isfinite().all() for one in weights.values())
        assert max(step[STALEST] for step in told) <= 2.0
        apart = [step[DISAGREEMENT] > 0.0 for step in told]
        assert apart == [True, keep_errors, keep_errors, True, True, True]


def test_copies_of_a_weight_stay_equal_where_one_stage_of_a_replica_is_lost(worker_pool: WorkerPool) -> None:
    """The other stage gets no finite gradient meanwhile; copies have one gradient, so they step alike."""
    config = tiny(layers=2, tied=True)
    options = {"update_ratio": 8.0, "reset_ratio": 8.0, "every": 1, "order": "shuffled"}
    plan = with_sync(Row(config, "1f1b", pp=2, dp=2).plan, "cser", **options)
    outcomes = worker_pool.run(train, config, plan, range(12), (2,), ranks=4)
    left_out = [step[LEFT_OUT] for step in outcomes[0][0]]
    assert left_out[0] == left_out[-1] == 0.0
    assert sum(left_out) > 1.0
    for first, last in ((outcomes[0], outcomes[1]), (outcomes[2], outcomes[3])):
        [name] = first[1].keys() & last[1].keys()
        assert name.endswith("wte.weight")
        assert torch.equal(first[1][name], last[1][name])
        assert all(one.isfinite().all() for one in (*first[1].values(), *last[1].values()))


def sizes_of(rank: int, ranks: int, config: ModelConfig, plan: Plan) -> dict[int, list[int]]:
    """The numbers of the parts of a rank's stages."""
    runtime = make_runtime(rank, config, plan, make_program(config, plan))
    state = runtime.methods["cser"]
    assert isinstance(state, CserReplicas)
    found = {stage: [len(one.flat) for one in state.synced_parts(stage)] for stage in state.stages}
    runtime.close()
    return found


@pytest.mark.parametrize("tp", [1, 2])
def test_parts_have_the_numbers_that_the_program_counts(worker_pool: WorkerPool, tp: int) -> None:
    config = replace(divisible("llama"), layers=2, tied_embeddings=tp == 1)
    plan = with_sync(Row(config, "1f1b", pp=2, dp=2, tp=tp).plan, "cser", ratio=8.0)
    for found in worker_pool.run(sizes_of, config, plan, ranks=4 * tp):
        for stage, sizes in found.items():
            counted = part_sizes(layer_graph(config), plan.stages[stage].layers, plan.shape(stage))
            # Tensor ranks fill shares that do not divide with zeros.
            assert sizes == (counted if tp == 1 else pytest.approx(counted, rel=0.01))
            assert len(sizes) == 3 - tp
