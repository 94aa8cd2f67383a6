"""The streams of a GPU, where there is one: kernels run behind the host, and a plan trains as on the CPU."""

from __future__ import annotations

import pytest
import torch
from pool import WorkerPool
from small_jobs import SEED, batch_of, descent, loss_of, parameters_of
from small_plans import make_plan, make_program, tiny

from weft.describe.plan import Plan
from weft.program.rank_program import part_of
from weft.run.accelerator import TorchAccelerator, to_device
from weft.run.device_streams import CopyQueue, DeviceClock, KernelStream
from weft.run.runtime import RankRuntime
from weft.run.stage.build import build_stages
from weft.run.state.precision import STEPPED
from weft.run.streams import Value

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

LONG_CYCLES = 500_000_000
CONFIG = tiny(tied=False)


def test_kernels_run_behind_the_host_and_copies_follow_them() -> None:
    device = torch.device("cuda", 0)
    accelerator = TorchAccelerator(device)
    compute = KernelStream("computation", accelerator, DeviceClock(accelerator))
    queue = CopyQueue("copies", accelerator)
    numbers, sent = to_device(torch.arange(1000.0), device), []

    def work() -> None:
        torch.cuda._sleep(LONG_CYCLES)
        numbers.add_(1.0)

    launched = compute.run("F0", work)
    assert launched.times is None
    queue.run("S0", lambda: sent.append(numbers.to("cpu")), Value.of(numbers, launched)).wait()
    assert torch.equal(sent[0], torch.arange(1.0, 1001.0))
    assert launched.times is not None
    assert launched.times[1] > launched.times[0]
    queue.close()


def trained(
    rank: int, ranks: int, plan: Plan, transport: str | None
) -> tuple[list[float], list[torch.Tensor]]:
    """Losses and parameters of three steps: on the CPU, on one GPU for all ranks, or on one for each."""
    device = {None: "cpu", "host": "cuda:0", "device": f"cuda:{rank}"}[transport]
    stages = build_stages(plan, CONFIG, rank, SEED, STEPPED[plan.precision])
    for stage in stages.values():
        stage.to(device)
    program = part_of(make_program(CONFIG, plan), rank)
    runtime = RankRuntime(
        plan, program, stages, loss_of, descent, device=device, seed=SEED, transport=transport
    )
    losses = [runtime.step(step, batch_of(CONFIG, plan, step)).loss for step in range(3)]
    runtime.gather_weights()
    found = [parameter.to("cpu") for parameter in parameters_of(runtime).values()]
    runtime.close()
    return losses, found


@pytest.mark.parametrize("transport", ["host", "device"])
@pytest.mark.parametrize(
    ("layout", "sharding"),
    [
        ({}, "zero-0"),
        ({"pp": 2, "schedule": "1f1b"}, "zero-0"),
        ({"pp": 2, "loops": 2, "schedule": "breadth-first"}, "zero-0"),
        ({"dp": 2}, "zero-0"),
        ({"dp": 2}, "zero-3"),
    ],
)
def test_a_plan_trains_as_on_the_cpu(
    worker_pool: WorkerPool, layout: dict[str, object], sharding: str, transport: str
) -> None:
    plan = make_plan(CONFIG, precision="fp32", **layout).model_copy(update={"sharding": sharding})
    if transport == "device" and torch.cuda.device_count() < plan.ranks:
        pytest.skip("NCCL needs a GPU for each rank")
    expected = worker_pool.run(trained, plan, None, ranks=plan.ranks)
    for _ in range(2):
        for ours, theirs in zip(
            worker_pool.run(trained, plan, transport, ranks=plan.ranks), expected, strict=True
        ):
            assert ours[0] == pytest.approx(theirs[0], rel=1e-4)
            for found, on_cpu in zip(ours[1], theirs[1], strict=True):
                torch.testing.assert_close(found, on_cpu, rtol=1e-3, atol=1e-5)
