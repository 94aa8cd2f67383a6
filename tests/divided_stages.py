"""What ranks that divide stages, by tensors or by tokens, are asked alike."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from small_jobs import SEED, descent, make_runtime
from small_plans import make_program
from tensor_jobs import samples_of, whole_loss

from weft.describe.families import layer_graph
from weft.describe.model import ModelConfig
from weft.describe.plan import Plan
from weft.errors import InputError
from weft.planning.compile import compile_evaluation_part
from weft.program.rank_program import part_of
from weft.run.resources import LossFunction
from weft.run.runtime import RankRuntime
from weft.run.stage.build import build_stage


def evaluate_and_train(
    rank: int, ranks: int, config: ModelConfig, plan: Plan, loss: Callable[[], LossFunction]
) -> tuple[float, float]:
    """The loss of the same samples, evaluated and in a step."""
    runtime = make_runtime(rank, config, plan, make_program(config, plan), loss_fn=loss())
    program = compile_evaluation_part(plan, layer_graph(config), rank)
    evaluated = runtime.evaluate(program, [samples_of(config, plan, 0)])
    trained = runtime.step(0, samples_of(config, plan, 0)).loss
    runtime.close()
    return evaluated, trained


def losses_of_three_steps(
    rank: int, ranks: int, config: ModelConfig, plan: Plan, loss: Callable[[], LossFunction]
) -> list[float]:
    """All on the same samples."""
    runtime = make_runtime(rank, config, plan, make_program(config, plan), loss_fn=loss())
    losses = [runtime.step(step, samples_of(config, plan, 0)).loss for step in range(3)]
    runtime.close()
    return losses


def refusal_of_whole_stages(rank: int, ranks: int, config: ModelConfig, plan: Plan) -> str:
    """What a rank is told that is given all of a stage."""
    stages = {0: build_stage(config, plan.stages[0].layers, SEED, torch.float64)}
    with pytest.raises(InputError) as caught:
        RankRuntime(
            plan,
            part_of(make_program(config, plan), rank),
            stages,
            whole_loss,
            descent,
            device="cpu",
            seed=SEED,
        )
    return str(caught.value)
