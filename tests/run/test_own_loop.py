"""`weft.Runtime` inside a user's own loop: learns like one process, refuses what does not fit."""

import gc
import math
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from equality_table import Row
from small_plans import divisible, make_plan, tiny
from torch import nn

import weft
from weft.describe.models import resolve_model
from weft.describe.plan import MICRO_BATCH_CLIPPING, PACKING, Choice
from weft.describe.plan_file import PlanFile
from weft.errors import InputError, RunError


def loss_fn(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def train(rank: int, ranks: int, path: Path, steps: int) -> list[float]:
    config = tiny()
    generator = torch.Generator().manual_seed(3)
    with weft.Runtime(path, config, loss_fn) as runtime:
        shape = (runtime.plan.global_batch, config.sequence)
        losses = []
        for _ in range(steps):
            tokens = torch.randint(config.vocabulary, shape, generator=generator)
            losses.append(runtime.step(tokens, tokens.roll(-1, 1)))
    return losses


def written(path: Path, **layout: int) -> Path:
    path.write_text(PlanFile(make_plan(tiny(), **layout)).to_json())
    return path


def test_two_plans_of_a_job_have_the_same_losses(worker_pool, tmp_path):
    alone = written(tmp_path / "one.json", micro_batches=8)
    pair = written(tmp_path / "two.json", pp=2, loops=2, schedule="breadth-first", micro_batches=8)
    expected = worker_pool.run(train, alone, 3, ranks=1)[0]
    for losses in worker_pool.run(train, pair, 3, ranks=2):
        assert losses == pytest.approx(expected, abs=1e-9)
    assert expected[0] != expected[1]


def fail_on_rank_1(rank: int, ranks: int, path: Path) -> str:
    config = tiny()
    try:
        with weft.Runtime(path, config, loss_fn) as runtime:
            if rank == 1:
                raise ValueError("the user's own")
            inputs = torch.zeros(runtime.plan.global_batch, config.sequence, dtype=torch.long)
            runtime.step(inputs, inputs)
    except (RunError, ValueError) as error:
        return str(error)
    return "trained"


def test_a_loop_that_fails_ends_the_other_ranks_by_name(worker_pool, tmp_path):
    plan = written(tmp_path / "two.json", pp=2)
    told, own = worker_pool.run(fail_on_rank_1, plan, ranks=2)
    assert own == "the user's own"
    assert told.endswith("; rank 1 is gone")


def step_of_few_tokens(rank: int, ranks: int, path: Path) -> str:
    config = tiny()
    tokens = torch.zeros(make_plan(config).global_batch, config.sequence - 2, dtype=torch.long)
    with pytest.raises(RunError) as caught, weft.Runtime(path, config, loss_fn) as runtime:
        runtime.step(tokens, tokens)
    return str(caught.value)


def test_samples_of_other_lengths_end_the_step(worker_pool, tmp_path):
    """A receiver counts bytes: it would wait for the rest, or take them of the next message."""
    plan = written(tmp_path / "two.json", pp=2)
    first, second = worker_pool.run(step_of_few_tokens, plan, ranks=2)
    assert "rank 0, step 0, instruction F0.0: TypeError: the message is [" in first
    assert second.endswith("; rank 0 is gone")


def step_of_two_inputs(rank: int, ranks: int) -> float:
    config = resolve_model("own_models:conditioned")
    plan = make_plan(config, precision="fp32")
    inputs = torch.zeros(plan.global_batch, 1, 8, 8), torch.zeros(plan.global_batch, 3)
    with weft.Runtime(plan, config, nn.functional.cross_entropy) as runtime:
        return runtime.step(inputs, torch.zeros(plan.global_batch, dtype=torch.long))


def test_inputs_of_a_model_with_several_are_a_tuple(worker_pool):
    (loss,) = worker_pool.run(step_of_two_inputs, ranks=1)
    assert loss == pytest.approx(math.log(10), rel=0.5)


def refused(rank: int, ranks: int, path: Path) -> list[str]:
    config = tiny()
    messages = []
    packed = make_plan(config).model_copy(update={"methods": (Choice(name=PACKING),)})
    clip = Choice(name=MICRO_BATCH_CLIPPING, options={"micro": "min", "samples": 1, "sources": 2})
    by_source = make_plan(config).model_copy(update={"methods": (clip,)})
    wrong = (path, tiny(layers=5)), (make_plan(config, pp=2), config), (packed, config), (by_source, config)
    for plan, model in wrong:
        with pytest.raises(InputError) as caught:
            weft.Runtime(plan, model, loss_fn)
        messages.append(str(caught.value))
    runtime = weft.Runtime(path, config, loss_fn)
    with pytest.raises(InputError) as caught:
        runtime.step(torch.zeros(3, 8, dtype=torch.long), torch.zeros(3, 8, dtype=torch.long))
    messages.append(str(caught.value))
    inputs = torch.zeros(8, 8, dtype=torch.long)
    with pytest.raises(InputError, match=r"runtime\.step: NoneType: must be a tensor"):
        runtime.step(inputs, None)
    runtime.close()
    for given, changed, problem in (
        ((None, config, loss_fn), {}, "^plan: None: must be a Plan, as weft.plan"),
        ((path, 3, loss_fn), {}, "^runtime.model: 3: must be a name, a path or a ModelConfig$"),
        ((path, config, None), {}, "^runtime.loss_fn: None: must be a function$"),
        ((path, config, loss_fn), {"optimizer_factory": 3}, "optimizer_factory: 3: must be a function$"),
        ((path, config, loss_fn), {"clip_norm": -1.0}, "clip_norm: -1.0: must be greater than 0$"),
    ):
        with pytest.raises(InputError, match=problem):
            weft.Runtime(*given, **changed)
    for loss, problem in (
        (
            lambda logits, targets: logits.mean((1, 2)),
            r"the loss is \[\d\]; it must be a tensor of one number",
        ),
        (lambda logits, targets: 3.0, "the loss is float; it must be"),
    ):
        with pytest.raises(RunError, match=problem), weft.Runtime(path, config, loss) as runtime:
            runtime.step(inputs, inputs)
    return messages


def test_what_does_not_fit_is_refused_in_one_line(worker_pool, tmp_path):
    path = written(tmp_path / "plan.json")
    model, ranks, packed, by_source, batch = worker_pool.run(refused, path, ranks=1)[0]
    assert "the plan is for tiny-gpt" in model
    assert "the job has 1 rank, the plan has 2" in ranks
    assert "a loop of your own does not tell their documents" in packed
    assert "the plan clips by sources" in by_source
    assert "global batch is 8" in batch


def group_threads() -> int:
    found = 0
    for task in Path("/proc/self/task").iterdir():
        # Other threads may end meanwhile.
        with suppress(FileNotFoundError, ProcessLookupError):
            found += "gloo" in (task / "comm").read_text()
    return found


def threads_over_time(rank: int, ranks: int, path: Path) -> list[int]:
    """Threads of process groups: while a runtime is open, and after each of two is closed."""
    config = divisible("gpt")
    found = []
    gc.disable()  # groups end when their runtime is closed, not when somebody happens to collect
    try:
        for _ in range(2):
            runtime = weft.Runtime(path, config, loss_fn)
            inputs = torch.zeros(runtime.plan.global_batch, config.sequence, dtype=torch.long)
            runtime.step(inputs, inputs)
            found.append(group_threads())
            runtime.close()
            runtime.close()
            found.append(group_threads())
            with pytest.raises(RunError, match="this runtime is closed"):
                runtime.step(inputs, inputs)
    finally:
        gc.enable()
    return found


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads the names of threads from /proc")
@pytest.mark.parametrize("layout", [{"pp": 2, "tp": 1}, {"pp": 1, "tp": 2}], ids=["pipeline", "tensor"])
def test_closing_ends_the_threads_of_all_groups(worker_pool, tmp_path, layout):
    # One that outlives the runtime can abort the process when the interpreter goes down.
    path = tmp_path / "plan.json"
    path.write_text(PlanFile(Row(divisible("gpt"), **layout).plan).to_json())
    for first, after_first, _, after_second in worker_pool.run(threads_over_time, path, ranks=2):
        assert first > after_first
        assert after_first == after_second


A_WHOLE_PROGRAM = """
import sys
from contextlib import suppress
from pathlib import Path

import torch

import weft

def loss_fn(logits, targets):
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

with weft.Runtime(sys.argv[1], "gpt-1m", loss_fn) as runtime:
    inputs = torch.zeros(runtime.plan.global_batch, runtime.plan.sequence, dtype=torch.long)
    runtime.step(inputs, inputs)
    # A second time, at the end of the block, it does nothing.
    runtime.close()
print([name for task in Path("/proc/self/task").iterdir() if "gloo" in (name := (task / "comm").read_text())])
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads the names of threads from /proc")
def test_a_program_that_is_done_has_no_threads_of_groups(tmp_path):
    plan = tmp_path / "plan.json"
    plan.write_text(PlanFile(make_plan(resolve_model("gpt-1m", sequence=16), micro_batches=1)).to_json())
    finished = subprocess.run(
        [sys.executable, "-c", A_WHOLE_PROGRAM, str(plan)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout == "[]\n"
