"""Neighbours from the cards: what each purpose is given, and how neighbours lead back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from moves.contexts import context

from weft.describe.contract import Contract
from weft.describe.layout import Layout
from weft.moves.layout import build_plan, flops_per_layer, refuse
from weft.moves.layout_of_plan import layout_of
from weft.moves.move import Purpose
from weft.moves.registry import all_moves
from weft.planning.neighbours import Neighbour, neighbours
from weft.planning.problem import Problem, problem_of

PROBLEM = problem_of(model="gpt2", on="8xa100-80gb", global_batch=32, precision="bf16")


def around(layout: Layout, purpose: Purpose, problem: Problem = PROBLEM) -> list[Neighbour]:
    return list(neighbours(problem, layout, purpose, lambda _: flops_per_layer(problem.job)))


@st.composite
def legal_layouts(draw: st.DrawFn) -> Layout:
    pp, dp = draw(st.sampled_from([(1, 8), (2, 4), (4, 2), (8, 1), (2, 2)]))
    layout = Layout(
        pp=pp,
        dp=dp,
        loops=1,
        micro_batch_size=draw(st.sampled_from([1, 2, 4])),
        schedule=draw(st.sampled_from(["1f1b", "gpipe"])),
        sharding=draw(st.sampled_from(["zero-0", "zero-1", "zero-2", "zero-3"])) if dp > 1 else "zero-0",
    )
    words = st.sampled_from(["none", "selective", "full"])
    layout = layout.recomputing(draw(st.tuples(*[words] * layout.stages)))
    if pp > 1 and draw(st.booleans()):
        layers = len(PROBLEM.job.graph.layers)
        cuts = sorted(draw(st.sets(st.integers(1, layers - 1), min_size=pp - 1, max_size=pp - 1)))
        counts = tuple(last - first for first, last in zip([0, *cuts], [*cuts, layers], strict=True))
        layout = replace(layout, layers_per_stage=counts)
    return layout


@given(layout=legal_layouts(), purpose=st.sampled_from(list(Purpose)))
def test_neighbours_differ_keep_the_devices_and_have_words(layout: Layout, purpose: Purpose) -> None:
    assert refuse(PROBLEM.job, layout) is None
    for one in around(layout, purpose):
        assert one.layout != layout, one.words
        assert one.layout.ranks == layout.ranks
        assert one.words
        assert purpose in one.move.purposes


@given(layout=legal_layouts())
def test_what_spends_memory_is_undone_by_what_saves_it(layout: Layout) -> None:
    for one in around(layout, Purpose.LARGER):
        if one.layout == replace(layout, recompute="none") or layout.recompute_per_stage is None:
            assert layout in [back.layout for back in around(one.layout, Purpose.SMALLER)], one.words


@given(layout=legal_layouts())
def test_a_layer_that_moves_can_move_back(layout: Layout) -> None:
    moved = [one for one in around(layout, Purpose.FASTER) if one.move.name == "move a layer"]
    counts = layout.layers_per_stage
    assert bool(moved) == (counts is not None and len(counts) > 1 and max(counts) > 1)
    for one in moved:
        assert layout in [back.layout for back in around(one.layout, Purpose.FASTER)]


@pytest.mark.parametrize("name", [name for name, move in all_moves().items() if move.edits is not None])
def test_a_card_makes_of_a_plan_the_first_legal_layout_that_it_makes_of_its_layout(name: str) -> None:
    move = all_moves()[name]
    assert move.edits is not None
    before = context(schedule="breadth-first", loops=2)
    job = before.job
    legal = [
        edit.layout for edit in move.edits(job, layout_of(before.plan)) if refuse(job, edit.layout) is None
    ]
    assert (move.applies(before) is None) == bool(legal)
    if legal:
        assert move.apply(before) == build_plan(job, legal[0], flops_per_layer(job))


def test_the_contract_of_the_goal_admits_moves(weft_example: Path) -> None:
    layout = Layout(pp=1, dp=8, loops=1, micro_batch_size=1, schedule="1f1b")
    names = {
        contract: {
            one.move.name for one in around(layout, Purpose.FASTER, replace(PROBLEM, contract=contract))
        }
        for contract in Contract
    }
    assert names[Contract.EXACT] == {"three times the micro-batch"}
    assert names[Contract.UNBIASED] - names[Contract.EXACT] == {"five times the micro-batch"}


def test_what_no_layout_says_of_a_plan_is_said_with_the_reason(weft_example: Path) -> None:
    layout = Layout(pp=1, dp=8, loops=1, micro_batch_size=1, schedule="1f1b")
    found = around(layout, Purpose.FASTER, replace(PROBLEM, contract=Contract.EMPIRICAL))
    unsaid = {one.move.name: one.unsaid for one in found if one.unsaid is not None}
    assert unsaid == {
        "sync rounded-to": "move 'sync rounded-to': it changes what no layout says",
    }
