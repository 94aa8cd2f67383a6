"""Law: replicas with unequal shares of the batch, and stages of unequal layers, train like one process."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
from pool import WorkerPool
from run.test_equality import require_equal
from run.test_sharded import require_like_replicated
from run.test_tensor_parallel import require_equal as require_equal_divided
from small_jobs import make_plan, make_program, tiny
from tensor_jobs import divisible

from weft.describe.cluster_file import parse_cluster
from weft.describe.families import layer_graph
from weft.describe.layout import Layout
from weft.describe.model import ModelConfig
from weft.describe.plan import Plan
from weft.errors import InputError
from weft.moves.job import Job
from weft.moves.layout import build_plan, flops_per_layer
from weft.program.verify import require_valid

pytestmark = pytest.mark.processes


def shared_as(plan: Plan, shares: tuple[int, ...]) -> Plan:
    """The plan with so many micro-batches of each replica of every stage."""
    stages = tuple(
        stage.model_copy(
            update={
                "replicas": tuple(
                    copy.model_copy(update={"micro_batches": share})
                    for copy, share in zip(stage.replicas, shares, strict=True)
                )
            }
        )
        for stage in plan.stages
    )
    return plan.model_copy(update={"stages": stages, "global_batch": sum(shares) * plan.micro_batch_size})


def cut_as(plan: Plan, counts: tuple[int, ...]) -> Plan:
    """The plan with so many layers in each stage."""
    borders = [0, *accumulate(counts)]
    stages = tuple(
        stage.model_copy(update={"layers": tuple(range(*pair))})
        for stage, pair in zip(plan.stages, pairwise(borders), strict=True)
    )
    return plan.model_copy(update={"stages": stages})


@pytest.mark.parametrize(
    ("schedule", "pp", "loops", "shares"),
    [("gpipe", 1, 1, (1, 4, 2)), ("1f1b", 2, 1, (5, 2)), ("zb-h1", 2, 1, (3, 2))],
)
def test_unequal_shares_of_the_batch(
    worker_pool: WorkerPool, schedule: str, pp: int, loops: int, shares: tuple[int, ...]
) -> None:
    config = tiny()
    plan = shared_as(make_plan(config, pp=pp, dp=len(shares), loops=loops, schedule=schedule), shares)
    require_valid(make_program(config, plan))
    require_equal(worker_pool, config, plan, bitwise=False)


@pytest.mark.parametrize(("schedule", "loops", "shares"), [("1f1b", 1, (2, 5)), ("breadth-first", 2, (4, 1))])
def test_unequal_shares_of_replicas_that_share_states(
    worker_pool: WorkerPool, schedule: str, loops: int, shares: tuple[int, ...]
) -> None:
    config = tiny()
    even = make_plan(config, pp=2, dp=2, loops=loops, schedule=schedule, precision="fp32")
    require_like_replicated(worker_pool, config, shared_as(even, shares))


@pytest.mark.parametrize(
    ("schedule", "loops", "counts", "shares"),
    [
        ("1f1b", 1, (1, 7), (3, 3)),
        ("breadth-first", 2, (4, 1, 1, 2), (2, 2)),
        ("depth-first", 2, (3, 1, 2, 2), (2, 4)),
        ("gpipe", 1, (6, 2), (1, 3)),
    ],
)
def test_unequal_layers(
    worker_pool: WorkerPool, schedule: str, loops: int, counts: tuple[int, ...], shares: tuple[int, ...]
) -> None:
    config = tiny("llama")
    plan = cut_as(shared_as(make_plan(config, pp=2, dp=2, loops=loops, schedule=schedule), shares), counts)
    require_valid(make_program(config, plan))
    require_equal(worker_pool, config, plan, bitwise=False)


def laid_out(
    config: ModelConfig,
    degrees: tuple[int, int, int],
    layers: tuple[int, ...],
    shares: tuple[int, ...],
    devices: tuple[int, ...],
    precision: str = "fp64",
) -> Plan:
    """The plan of (pp, dp, tp) with so many layers in each stage and micro-batches of each replica."""
    pp, dp, tp = degrees
    layout = Layout(
        pp=pp,
        dp=dp,
        tp=tp,
        loops=1,
        micro_batch_size=2,
        schedule="1f1b",
        layers_per_stage=layers,
        micro_batches_per_replica=shares,
        rank_order=devices,
    )
    job = Job(
        graph=layer_graph(config),
        cluster=parse_cluster("4xa100-80gb"),
        global_batch=sum(shares) * layout.micro_batch_size,
        sequence=config.sequence,
        precision=precision,
    )
    return build_plan(job, layout, flops_per_layer(job))


def require_equal_whole(pool: WorkerPool, config: ModelConfig, plan: Plan) -> None:
    """Float64 to nine digits."""
    require_equal(pool, config, plan, bitwise=False)


@pytest.mark.parametrize(
    ("degrees", "layers", "shares", "devices"),
    [
        ((2, 2, 1), (5, 3), (3, 1), (2, 0, 3, 1)),
        ((1, 2, 2), (4,), (1, 4), (1, 3, 0, 2)),
        ((2, 1, 2), (1, 3), (3,), (1, 3, 0, 2)),
    ],
    ids=["pp and dp", "dp and tp", "pp and tp"],
)
def test_unequal_stages_shares_and_an_order_of_devices(
    worker_pool: WorkerPool,
    degrees: tuple[int, int, int],
    layers: tuple[int, ...],
    shares: tuple[int, ...],
    devices: tuple[int, ...],
) -> None:
    config = tiny() if degrees[2] == 1 else divisible("gpt")
    plan = laid_out(config, degrees, layers, shares, devices)
    equal = require_equal_divided if degrees[2] > 1 else require_equal_whole
    equal(worker_pool, config, plan)


def test_replicas_in_an_order_of_devices_share_states(worker_pool: WorkerPool) -> None:
    config = tiny()
    plan = laid_out(config, (2, 2, 1), (5, 3), (3, 1), (2, 0, 3, 1), precision="fp32")
    require_like_replicated(worker_pool, config, plan)


def test_shares_that_would_come_to_other_collectives_are_refused() -> None:
    config = tiny()
    even = make_plan(config, pp=2, dp=2, loops=3, schedule="depth-first")
    plan = shared_as(even, (4, 2)).model_copy(update={"sharding": "zero-2"})
    with pytest.raises(InputError, match=r"in this order of micro-batches.* \(4, 2 micro-batches\)"):
        make_program(config, plan)
