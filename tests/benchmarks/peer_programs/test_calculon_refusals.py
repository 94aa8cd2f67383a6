"""What Calculon cannot say of a plan, and what it takes in place of what it does not know."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from asked_methods import CLIPS
from benchmarks.peer_programs.blocks import layout, question
from benchmarks.peer_programs.stand_ins import ANSWER, says, writing

from benchmarks.peer_programs.calculon import Question, Said
from weft.describe.layout import Layout
from weft.describe.optimizers import PLAIN_SGD
from weft.moves.layout import build_plan
from weft.planning.problem import problem_of


def changed(given: Layout, **fields: Any) -> Question:
    asked = question(given)
    return replace(asked, plan=asked.plan.model_copy(update=fields))


def of_layout(**choices: Any) -> Question:
    """A layout that says more than degrees: eight blocks, 16 samples, 16 devices."""
    asked = question(layout(dp=2), blocks=8, micro_batches=8)
    given = layout(**choices)
    job = problem_of(model="gpt2", on="16xa100-80gb", global_batch=16, precision="bf16").job
    job = replace(job, graph=asked.graph, sequence=512)
    return replace(asked, cluster=job.cluster, plan=build_plan(job, given, (1.0,) * 8))


CANNOT = [
    (lambda: changed(layout(), precision="fp64"), "it has no numbers of fp64"),
    (lambda: of_layout(cp=2), "it does not have cp 2"),
    (
        lambda: of_layout(dp=2, sharding="zero-2", blocking=()),
        "it shares out optimizer states only, not zero-2",
    ),
    (
        lambda: of_layout(dp=2, sharding="zero-3", blocking=()),
        "it shares out optimizer states only, not zero-3",
    ),
    (
        lambda: of_layout(dp=4, sharding="zero-1", island=2),
        "it does not have islands of 2 replicas",
    ),
    (
        lambda: of_layout(pp=2, schedule="zb-h1"),
        "it knows 1f1b and interleaved 1f1b (depth-first), not zb-h1",
    ),
    (
        lambda: of_layout(pp=2, recompute="full", recompute_per_stage=("full", "none"), dp=1),
        "its stages recompute alike, not full in stage 0",
    ),
    (
        lambda: of_layout(dp=2, micro_batches_per_replica=(10, 6)),
        "its replicas have equal shares, not 10+6",
    ),
    (lambda: of_layout(dp=2, rank_order=(1, 0)), "its ranks are devices in their order"),
    (
        lambda: of_layout(pp=2, layers_per_stage=(5, 3)),
        "it deals blocks out equally, not 5+3",
    ),
]


@pytest.mark.parametrize(("asked", "reason"), CANNOT, ids=[reason for _, reason in CANNOT])
def test_what_it_cannot_say_has_a_reason(tmp_path: Path, asked: Any, reason: str) -> None:
    (said,) = says(tmp_path, asked(), body="raise SystemExit(1)")
    assert said == Said(reason=reason)


def test_models_and_devices_that_it_does_not_know(tmp_path: Path) -> None:
    llama = problem_of(model="llama-1b", on="8xa100-80gb")
    asked = question(layout())
    (said,) = says(tmp_path, replace(asked, model=llama.model), body="")
    assert said.reason == "it knows GPT's blocks only, not llama's"
    mixed = problem_of(model="gpt2", on="8xa100-80gb+8xt4", precision="fp16")
    plan = build_plan(mixed.job, layout(dp=16, micro_batch_size=8), (1.0,) * 14)
    both = Question(model=mixed.model, graph=mixed.job.graph, cluster=mixed.job.cluster, plan=plan)
    (said,) = says(tmp_path, both, body="")
    assert said.reason == "it knows equal devices on equal nodes only, not a100-80gb with t4"
    # A plan that leaves the second kind out can be said.
    plan = build_plan(mixed.job, layout(dp=8, micro_batch_size=16), (1.0,) * 14)
    (said,) = says(tmp_path, replace(both, plan=plan), body=writing(ANSWER))
    assert said.step_s == 6.0
    (group,) = asked.cluster.groups
    halves = (replace(group, name="one"), replace(group, name="two", devices=4))
    cluster = replace(asked.cluster, groups=halves, links={})
    plan = asked.plan.model_copy(update={"stages": (stage_of(asked, 9),)})
    (said,) = says(tmp_path, replace(asked, cluster=cluster, plan=plan), body="")
    assert said.reason == "it knows equal devices on equal nodes only, not unlike nodes of a100"
    uneven = replace(asked.cluster, groups=(replace(group, speeds=(1.0,) * 7 + (0.5,)),))
    (said,) = says(tmp_path, replace(asked, cluster=uneven), body="")
    assert said.reason == "it knows equally fast devices only"


def stage_of(asked: Question, replicas: int) -> Any:
    (stage,) = asked.plan.stages
    (copy,) = stage.replicas
    copies = tuple(copy.model_copy(update={"ranks": (rank,)}) for rank in range(replicas))
    return stage.model_copy(update={"replicas": copies})


def test_stages_with_one_block_more_at_the_start_can_be_said(tmp_path: Path) -> None:
    (said,) = says(tmp_path, of_layout(pp=3, layers_per_stage=(3, 3, 2)), body=writing(ANSWER))
    assert said.step_s == 6.0
    (said,) = says(tmp_path, of_layout(pp=3, layers_per_stage=(2, 3, 3)), body=writing(ANSWER))
    assert said.reason == "it deals blocks out equally, not 2+3+3"


APPROXIMATED = [
    ({"pp": 2, "blocking": ()}, {}, ("messages are waited for",)),
    (
        {"pp": 4, "dp": 4},
        {},
        ("all messages go between nodes",),
    ),
    ({"dp": 16}, {}, ("replicas add gradients up between nodes only",)),
    ({"tp": 16}, {}, ("tensor ranks meet between nodes only",)),
    ({"recompute": "selective"}, {}, ("selective makes attention's scores again, and nothing else",)),
    ({}, {"methods": CLIPS}, ("no norm of the gradient",)),
    ({}, {"optimizer": PLAIN_SGD}, ("states and steps of Adam",)),
]


@pytest.mark.parametrize(("choices", "fields", "words"), APPROXIMATED)
def test_what_it_takes_in_place_of_what_it_does_not_know_is_named(
    tmp_path: Path, choices: Any, fields: Any, words: tuple[str, ...]
) -> None:
    asked = question(layout(**choices))
    asked = replace(asked, plan=asked.plan.model_copy(update=fields))
    (said,) = says(tmp_path, asked, body=writing(ANSWER))
    assert said.approximated == words
