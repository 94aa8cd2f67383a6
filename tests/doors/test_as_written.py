"""What a plan is worth in the words of another stack."""

from __future__ import annotations

from typing import Any

import pytest
from doors.jobs import planned, run_of

from weft.cli.emit import as_written
from weft.doors.emit import EMITTERS, NO_LAYOUTS, OWN_RUNS, emit
from weft.doors.explained import explain_text
from weft.doors.implied import Answers
from weft.moves.layout_of_plan import layout_of
from weft.planning.planned_job import PlannedJob

STACKS = sorted(set(EMITTERS) - NO_LAYOUTS)


def job(**choices: Any) -> PlannedJob:
    run = run_of("llama-1b", global_batch=64, sequence=1024)
    return planned(run, **({"pp": 4, "dp": 4, "sharding": "zero-1"} | choices))


@pytest.mark.parametrize("stack", STACKS)
def test_what_a_stack_lacks_is_predicted_as_its_nearest(stack: str) -> None:
    plan = job(schedule="zb-h1", recompute="full")
    written = as_written(plan, stack, emit(plan, stack))
    assert written is not None
    layout = layout_of(written.plan)
    assert layout.schedule == "1f1b"
    assert (layout.pp, layout.dp, layout.micro_batch_size) == (4, 4, 1)
    assert layout.recompute == "full"
    assert written.prediction.step_s > 0


@pytest.mark.parametrize("stack", STACKS)
def test_stages_that_recompute_unlike_each_other_are_written_as_the_one_that_recomputes_most(
    stack: str,
) -> None:
    plan = job(recompute="full", recompute_per_stage=("full", "selective", "none", "none"))
    emitted = emit(plan, stack)
    assert "stages recompute full, none, selective; " in str(emitted.losses[0])
    assert emitted.losses[0].nearest == "full in all"
    written = as_written(plan, stack, emitted)
    assert written is not None
    assert len({stage.recompute for stage in written.plan.stages}) == 1


def test_where_nothing_is_lost_the_plan_is_what_is_written() -> None:
    plan = job()
    assert as_written(plan, "megatron", emit(plan, "megatron")) is None


@pytest.mark.parametrize("stack", sorted(OWN_RUNS))
def test_wefts_own_runtime_executes_the_plan_itself(stack: str) -> None:
    plan = job(schedule="gpipe")
    assert as_written(plan, stack, emit(plan, stack)) is None


def run_on_v100s() -> PlannedJob:
    run = run_of("llama-1b", global_batch=64, sequence=1024, precision="fp16", on="8xv100-32gb")
    return planned(run, pp=1, dp=8, sharding="zero-3")


def test_a_lost_precision_is_predicted_in_the_nearest() -> None:
    plan = run_on_v100s()
    emitted = emit(plan, "torchtitan-toml")
    assert any("fp16" in str(loss) for loss in emitted.losses)
    written = as_written(plan, "torchtitan-toml", emitted)
    assert written is not None
    assert written.plan.precision == "fp32"
    assert written.prediction.step_s > 2 * plan.prediction.step_s


@pytest.mark.parametrize("stack", ["megatron", "torchtitan", "torchtitan-toml"])
def test_stages_of_unlike_sizes_are_predicted_as_written(stack: str) -> None:
    plan = job(schedule="zb-h1", pp=2, dp=8, layers_per_stage=(12, 6))
    written = as_written(plan, stack, emit(plan, stack))
    assert written is not None
    assert [len(stage.layers) for stage in written.plan.stages] == [12, 6]


@pytest.mark.parametrize("stack", ["torchtitan", "torchtitan-toml"])
@pytest.mark.parametrize(
    ("schedule", "loops", "name"),
    [
        ("depth-first", 1, "1F1B"),
        ("breadth-first", 1, "GPipe"),
        ("depth-first", 2, "Interleaved1F1B"),
        ("breadth-first", 2, "LoopedBFS"),
    ],
)
def test_torchtitan_gets_an_order_for_as_many_stages(
    stack: str, schedule: str, loops: int, name: str
) -> None:
    plan = job(schedule=schedule, loops=loops)
    emitted = emit(plan, stack)
    assert f'"{name}"' in emitted.text.replace("'", '"')
    lost = [str(loss) for loss in emitted.losses if "one stage per device" in str(loss)]
    assert len(lost) == (name == "1F1B")
    found = explain_text(
        emitted.text, emitted.file, Answers(model="llama-1b", on="16xa100-80gb"), search=False
    )
    assert not [one for one in found.findings if "stages per device" in str(one)]
