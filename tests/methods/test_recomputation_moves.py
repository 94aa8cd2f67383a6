"""Recomputing edits every stage, once, and nothing else."""

from dataclasses import replace

from moves.contexts import context

from weft.moves.move import Context
from weft.moves.registry import get_move


def test_every_stage_recomputes_and_only_that_changes():
    before = context()
    move = get_move("recompute activations")
    assert move.applies(before) is None
    plan = move.apply(before)
    assert {stage.recompute for stage in plan.stages} == {"full"}
    kept = tuple(stage.model_copy(update={"recompute": "none"}) for stage in plan.stages)
    assert kept == before.plan.stages
    again = Context(plan=plan, graph=before.graph, cluster=before.cluster)
    assert "already" in (move.applies(again) or "")


def test_what_is_recomputed_selectively_can_be_recomputed_fully_and_not_back():
    before = context()
    selectively, fully = get_move("recompute selectively"), get_move("recompute activations")
    assert selectively.applies(before) is None
    plan = selectively.apply(before)
    assert {stage.recompute for stage in plan.stages} == {"selective"}
    some = Context(plan=plan, graph=before.graph, cluster=before.cluster)
    assert "already" in (selectively.applies(some) or "")
    assert {stage.recompute for stage in fully.apply(some).stages} == {"full"}


def test_a_model_that_does_not_know_its_products_keeps_or_recomputes_fully():
    before = context()
    layers = tuple(replace(layer, products=None) for layer in before.graph.layers)
    unknown = Context(plan=before.plan, graph=replace(before.graph, layers=layers), cluster=before.cluster)
    assert (
        get_move("recompute selectively").applies(unknown) == "the model does not say what its products leave"
    )
    assert get_move("recompute activations").applies(unknown) is None
