"""Plans that must all train like one process: mesh x order x sharding x recomputation x clipping x heads.

`cases` are all of them that can be, `covering` a few in which every two choices that go together meet once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from itertools import combinations
from typing import Any

import torch
from asked_methods import CLIPS, with_head
from small_jobs import SEED, descent, make_program, make_runtime
from tensor_jobs import DividedLoss, divisible, samples_of, tensor_plan, whole_loss, whole_parameters

from weft.describe.model import ModelConfig
from weft.describe.plan import RECOMPUTES, Choice, Plan, Recompute, Sharding
from weft.predict.cost.memory import SHARDINGS
from weft.program.schedules import get_schedule
from weft.program.schedules.base import Pipeline, paths_of
from weft.run.stages import build_stage

STEPS = 2
CLIP_NORM = 0.3
# An auxiliary head behind this block of six, in a first, middle or last stage, and the weight of its loss.
AFTER_BLOCK, HEAD_WEIGHT = 3, 0.3
MICRO_BATCHES = 4
# (schedule, loops); those of the second line are for several devices in line.
ONE_DEVICE = (("gpipe", 1), ("breadth-first", 2))
ORDERS = (
    *ONE_DEVICE,
    *(("1f1b", 1), ("depth-first", 2), ("hybrid", 2), ("zb-h1", 1), ("zb-v", 2), ("chimera", 1)),
)
Outcome = tuple[list[float], dict[str, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class Case:
    """One plan of the matrix."""

    pp: int
    dp: int
    tp: int
    order: tuple[str, int]
    sharding: Sharding
    recompute: Recompute
    clips: bool
    headed: bool = False

    def __str__(self) -> str:
        schedule, loops = self.order
        mesh = f"pp {self.pp} dp {self.dp} tp {self.tp}"
        more = (", clipped" if self.clips else "") + (", headed" if self.headed else "")
        return f"{mesh}, {schedule} x {loops}, {self.sharding}, recompute {self.recompute}{more}"

    @property
    def ranks(self) -> int:
        return self.pp * self.dp * self.tp

    @property
    def clip_norm(self) -> float | None:
        return CLIP_NORM if self.clips else None

    def plan(self) -> Plan:
        schedule, loops = self.order
        plan = tensor_plan(
            model(),
            tp=self.tp,
            pp=self.pp,
            dp=self.dp,
            loops=loops,
            schedule=schedule,
            micro_batches=MICRO_BATCHES,
        )
        stages = tuple(stage.model_copy(update={"recompute": self.recompute}) for stage in plan.stages)
        methods = (*(CLIPS if self.clips else ()), *self.heads)
        return plan.model_copy(update={"stages": stages, "sharding": self.sharding, "methods": methods})

    @property
    def heads(self) -> tuple[Choice, ...]:
        return (with_head(AFTER_BLOCK, HEAD_WEIGHT),) if self.headed else ()


@cache
def model() -> ModelConfig:
    """Eight layers and four groups of heads, so that up to eight ranks divide them either way."""
    return replace(divisible("llama", heads=4), layers=6)


def cases(most_ranks: int) -> Iterator[Case]:
    """Every case on at most so many ranks; every other one clips, some of those without tensor ranks have a
    head."""
    number = 0
    for pp in (1, 2, 4, 8):
        for dp in (1, 2, 3, 4, 8):
            for tp in (1, 2, 4):
                if pp * dp * tp > most_ranks:
                    continue
                for order, sharding in _orders(pp, dp):
                    for recompute in RECOMPUTES:
                        headed = tp == 1 and number % 5 < 2
                        yield Case(pp, dp, tp, order, sharding, recompute, number % 2 == 1, headed)
                        number += 1


def _orders(pp: int, dp: int) -> Iterator[tuple[tuple[str, int], Sharding]]:
    for name, loops in ONE_DEVICE if pp == 1 else ORDERS:
        schedule = get_schedule(name)
        stages = pp * loops
        if stages > model().layers + 2 or schedule.refuse(Pipeline(pp, stages, MICRO_BATCHES), {}):
            continue
        replicas = dp * paths_of(schedule)
        for sharding in SHARDINGS if replicas > 1 else SHARDINGS[:1]:
            yield (name, loops), sharding


def covering(of: Sequence[Case]) -> list[Case]:
    """Cases in which every two choices meet that meet in any of them, found greedily in their order."""
    left = {pair for case in of for pair in _pairs(case)}
    chosen = []
    while left:
        best = max(of, key=lambda case: len(left & _pairs(case)))
        left -= _pairs(best)
        chosen.append(best)
    return chosen


@cache
def _pairs(case: Case) -> frozenset[tuple[object, ...]]:
    choices = [(field.name, getattr(case, field.name)) for field in fields(Case)]
    return frozenset(
        pair
        for pair in combinations(choices, 2)
        # Every order under every sharding, and to the bit: tests/run/test_sharded.py.
        if {name for name, _ in pair} != {"order", "sharding"}
    )


def train(rank: int, ranks: int, case: Case) -> Outcome:
    """Losses and whole parameters of the rank's stages."""
    plan = case.plan()
    program = make_program(model(), plan)
    runtime = make_runtime(rank, model(), plan, program, loss_fn=DividedLoss(), clip_norm=case.clip_norm)
    losses = [runtime.step(step, samples_of(model(), plan, step)).loss for step in range(STEPS)]
    parameters = whole_parameters(runtime)
    runtime.close()
    return losses, parameters


def alone(rank: int, ranks: int, case: Case) -> Outcome:
    """One process that accumulates the micro-batches in their order."""
    plan = case.plan()
    whole = build_stage(model(), range(model().layers + 2), SEED, torch.float64, methods=case.heads)
    optimizer, losses = descent(whole), []
    for step in range(STEPS):
        batch, total = samples_of(model(), plan, step), 0.0
        for number in range(plan.micro_batches):
            inputs, targets = batch(number)
            loss, auxiliary = _losses(whole, inputs, targets, case)
            ((loss + HEAD_WEIGHT * auxiliary) / plan.micro_batches).backward()
            total += loss.item() / plan.micro_batches
        losses.append(total)
        if case.clips:
            torch.nn.utils.clip_grad_norm_(whole.parameters(), CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()
    return losses, {name: value.detach().clone() for name, value in whole.named_parameters()}


def _losses(whole: Any, inputs: torch.Tensor, targets: torch.Tensor, case: Case) -> tuple[torch.Tensor, ...]:
    """That of the model, and that of its auxiliary head, 0 without one."""
    value, auxiliary = inputs, torch.zeros(())
    for layer, function in enumerate(whole.layer_functions(inputs)):
        value = function(value)
        if case.headed and layer == AFTER_BLOCK:
            auxiliary = whole_loss(whole.auxiliary_head(value), targets)
    return whole_loss(value, targets), auxiliary


def difference(found: Sequence[Outcome], expected: Outcome) -> float:
    """The largest of all differences, of losses relative, of parameters beside 1 + their size.

    Infinite where a parameter of the model is on no rank.
    """
    expected_losses, whole = expected
    if {name for _, parameters in found for name in parameters} != set(whole):
        return float("inf")
    losses = (
        abs(loss / wanted - 1.0)
        for one, _ in found
        for loss, wanted in zip(one, expected_losses, strict=True)
    )
    parameters = (
        ((value - whole[name]).abs() / (1.0 + whole[name].abs())).max().item()
        for _, own in found
        for name, value in own.items()
    )
    return max(*losses, *parameters)
