"""Laws: backward passes start from all roots of a stage, and none before its coefficients are there."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from balanced_roots import NAME, WEIGHT, balanced, in_use
from late_streams import late
from pool import WorkerPool
from program.mutations import twice, without_edge, without_row
from small_jobs import SEED, batch_of, descent, loss_of, make_runtime, parameters_of
from small_plans import make_plan, make_program, tiny

from weft.describe.model import ModelConfig
from weft.describe.plan import Plan
from weft.errors import RunError
from weft.program.kinds import KINDS
from weft.program.program import Program
from weft.program.verify import require_valid, verify
from weft.run.stage.build import build_stage
from weft.run.stage.roots import Root, StageRoots
from weft.run.streams import Value

STEPS = 2


@dataclass(frozen=True)
class Case:
    """A plan whose layer `layer`, of six, has a penalty on the mean over all micro-batches."""

    layer: int
    schedule: str = "gpipe"
    pp: int = 2
    micro_batches: int = 4
    recompute: str = "none"
    seed: int | None = None

    @property
    def config(self) -> ModelConfig:
        return tiny(layers=4)

    @property
    def plan(self) -> Plan:
        plan = make_plan(self.config, pp=self.pp, schedule=self.schedule, micro_batches=self.micro_batches)
        stages = tuple(stage.model_copy(update={"recompute": self.recompute}) for stage in plan.stages)
        return plan.model_copy(update={"stages": stages, "methods": (balanced(self.layer),)})

    @property
    def program(self) -> Program:
        return make_program(self.config, self.plan)


def train(rank: int, ranks: int, case: Case) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Parameters, and the edges that no instruction has stated, where streams are late."""
    plan, config = case.plan, case.config
    with in_use(), nullcontext() if case.seed is None else late(case.seed + rank) as clock:
        program = case.program
        runtime = make_runtime(rank, config, plan, program)
        for step in range(STEPS):
            runtime.step(step, batch_of(config, plan, step))
        runtime.gather_weights()
        parameters = parameters_of(runtime)
        unstated = [] if clock is None else clock.missing(program, rank, STEPS)
        runtime.close()
    return parameters, unstated


def alone(case: Case) -> dict[str, torch.Tensor]:
    plan, config = case.plan, case.config
    model = build_stage(config, range(config.layers + 2), SEED, torch.float64)
    optimizer = descent(model)
    for step in range(STEPS):
        batch, losses, squares = batch_of(config, plan, step), [], []
        for number in range(plan.micro_batches):
            value, targets = batch(number)
            for layer, function in enumerate(model.layer_functions(value)):
                value = function(value)
                if layer == case.layer:
                    squares.append((value**2).mean())
            losses.append(loss_of(value, targets))
        (torch.stack(losses).mean() + WEIGHT / 2 * torch.stack(squares).mean() ** 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: one.detach().clone() for name, one in model.named_parameters()}


CASES = (
    # Of the last stage, with its loss; of the first one, whose input part has weights to start from.
    Case(5, recompute="selective", seed=3),
    Case(1, "zb-h1", micro_batches=2, recompute="full"),
)


@pytest.mark.processes
@pytest.mark.parametrize("case", CASES, ids=str)
def test_late_coefficients_give_the_gradients_of_one_process(worker_pool: WorkerPool, case: Case) -> None:
    expected = alone(case)
    for parameters, unstated in worker_pool.run(train, case, ranks=case.pp):
        assert unstated == []
        for name, value in parameters.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-9, atol=1e-9)


def test_a_stage_that_does_not_name_its_layers_is_refused() -> None:
    root = Root(layer=4, make=lambda now, output, targets: output.sum(), coefficient=lambda *now: Value())
    growth = StageRoots(1, [3], [root]).growth(0, 0, None)
    for function in growth.on(lambda inputs, step: (torch.neg,))(torch.ones(2), 0):
        function(torch.ones(2))
    with pytest.raises(RunError, match="stage 1 names no layer 4, which has a root"):
        growth.take()


def row_of(program: Program) -> int:
    [row] = np.flatnonzero(program.columns.kind == KINDS.code(NAME)).tolist()
    return row


def test_every_edge_of_a_late_coefficient_is_needed() -> None:
    with in_use():
        program = Case(2).program
        require_valid(program)
        row = row_of(program)
        touching = np.flatnonzero((program.edges.source == row) | (program.edges.target == row)).tolist()
        # From the forward passes of its stage, and to their backward passes.
        assert len(touching) == 8
        for edge in touching:
            problems = [str(one) for one in verify(without_edge(program, edge))]
            assert any("'balance_" in one for one in problems), edge


def test_a_backward_pass_before_its_coefficient_is_refused() -> None:
    with in_use():
        program = Case(1, "1f1b").program
        problems = [str(one) for one in verify(program)]
    assert any("'balance_coefficient'" in one for one in problems), problems


def test_a_coefficient_that_is_made_twice_or_never_is_refused() -> None:
    with in_use():
        program = Case(2).program
        for broken in (twice(program, row_of(program)), without_row(program, row_of(program))):
            assert any("'balance_" in str(one) for one in verify(broken))
