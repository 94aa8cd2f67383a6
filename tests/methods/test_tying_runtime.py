"""Law: copies of a tied embedding stay equal bit by bit, and train like one weight in one process."""

from __future__ import annotations

import pytest
import torch
from pool import WorkerPool
from small_jobs import batch_of, make_plan, make_program, make_runtime, parameters_of, tiny, train_alone

from weft.describe.model import ModelConfig
from weft.describe.plan import Plan
from weft.errors import InputError
from weft.methods.tying.runtime import copies_of
from weft.program.verify import require_valid
from weft.run.stages import build_stage

STEPS = 3
TABLES = {"gpt": "transformer.wte.weight", "llama": "model.embed_tokens.weight"}


def train(
    rank: int, ranks: int, config: ModelConfig, plan: Plan
) -> tuple[list[float], dict[int, dict[str, torch.Tensor]]]:
    """Losses, and by stage the parameters that this rank ends with."""
    runtime = make_runtime(rank, config, plan, make_program(config, plan))
    losses = [runtime.step(step, batch_of(config, plan, step)).loss for step in range(STEPS)]
    parameters = {
        stage: {name: value.detach().clone() for name, value in module.named_parameters()}
        for stage, module in runtime.stages.items()
    }
    assert set(parameters_of(runtime)) == {name for found in parameters.values() for name in found}
    runtime.close()
    return losses, parameters


def alone(
    rank: int, ranks: int, config: ModelConfig, plan: Plan
) -> tuple[list[float], dict[str, torch.Tensor]]:
    return train_alone(config, plan, STEPS)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("family", "schedule", "pp", "dp", "loops"),
    [
        ("gpt", "1f1b", 2, 2, 1),
        ("gpt", "breadth-first", 1, 1, 2),
        ("llama", "breadth-first", 2, 2, 2),
        ("llama", "zb-h1", 2, 1, 1),
        ("gpt", "zb-v", 2, 1, 2),
        ("gpt", "chimera", 2, 2, 1),
    ],
)
def test_tied_stages_train_like_one_process(
    worker_pool: WorkerPool, family: str, schedule: str, pp: int, dp: int, loops: int
) -> None:
    config = tiny(family, tied=True)
    plan = make_plan(config, pp=pp, dp=dp, loops=loops, schedule=schedule)
    require_valid(make_program(config, plan))
    [(expected_losses, expected)] = worker_pool.run(alone, config, plan, ranks=1)
    copies = []
    for losses, stages in worker_pool.run(train, config, plan, ranks=plan.ranks):
        assert losses == pytest.approx(expected_losses, rel=1e-12)
        for parameters in stages.values():
            for name, value in parameters.items():
                torch.testing.assert_close(value, expected[name], rtol=1e-9, atol=1e-12)
            copies += [value for name, value in parameters.items() if name == TABLES[family]]
    assert len(copies) == 2 * len(plan.stages[0].replicas)
    assert all(torch.equal(copy, copies[0]) for copy in copies)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("schedule", "loops", "sharding"),
    [("1f1b", 1, "zero-1"), ("breadth-first", 2, "zero-2"), ("breadth-first", 2, "zero-3")],
)
def test_copies_stay_whole_where_states_are_shared_out(
    worker_pool: WorkerPool, schedule: str, loops: int, sharding: str
) -> None:
    config = tiny(tied=True)
    whole = make_plan(config, pp=2, dp=2, loops=loops, schedule=schedule)
    shared = whole.model_copy(update={"sharding": sharding})
    require_valid(make_program(config, shared))
    expected, found = (worker_pool.run(train, config, plan, ranks=4) for plan in (whole, shared))
    for (expected_losses, _), (losses, stages) in zip(expected, found, strict=True):
        assert losses == pytest.approx(expected_losses, rel=1e-12)
        copies = [values[TABLES["gpt"]] for values in stages.values() if TABLES["gpt"] in values]
        for copy in copies:
            torch.testing.assert_close(copy, expected[0][1][0][TABLES["gpt"]], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("family", ["gpt", "llama", "bert"])
def test_copies_begin_with_the_same_bits(family: str) -> None:
    config = tiny(family, tied=True)
    first, last = (build_stage(config, layers, 3, torch.float32) for layers in ([0, 1], [6, 7]))
    copies = copies_of(((0, 2),), 0, {0: first, 2: last})
    assert list(copies) == [0, 2]
    assert torch.equal(copies[0], copies[2])
    # Both have the name that the whole model gives the weight.
    [name] = set(first.state_dict()) & set(last.state_dict())
    assert torch.equal(copies[0], build_stage(config, range(8), 3, torch.float32).state_dict()[name])
    assert build_stage(config, [3], 3, torch.float32).tied_parameters() == ()
    assert build_stage(config, range(8), 3, torch.float32).tied_parameters() == ()


def test_a_stage_that_has_no_copy_is_refused() -> None:
    with pytest.raises(InputError, match="stage 1: has 0 tied parameters, the program gives it 1"):
        copies_of(((0, 1),), 0, {1: torch.nn.Linear(2, 2)})
