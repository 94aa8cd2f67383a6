"""Recomputing edits every stage, once, and nothing else."""

from dataclasses import replace

from moves.contexts import context

from weft.moves.layout import build_plan, flops_per_layer
from weft.moves.layout_of_plan import layout_of
from weft.moves.move import Context
from weft.moves.registry import all_moves


def test_every_stage_recomputes_and_only_that_changes():
    before = context()
    move = all_moves()["recompute activations"]
    assert move.applies(before) is None
    plan = move.apply(before)
    assert {stage.recompute for stage in plan.stages} == {"full"}
    kept = tuple(stage.model_copy(update={"recompute": "none"}) for stage in plan.stages)
    assert kept == before.plan.stages
    again = Context(plan=plan, graph=before.graph, cluster=before.cluster)
    assert "already" in (move.applies(again) or "")


def test_what_is_recomputed_selectively_can_be_recomputed_fully_and_not_back():
    before = context()
    selectively, fully = all_moves()["recompute selectively"], all_moves()["recompute activations"]
    assert selectively.applies(before) is None
    plan = selectively.apply(before)
    assert {stage.recompute for stage in plan.stages} == {"selective"}
    some = Context(plan=plan, graph=before.graph, cluster=before.cluster)
    assert "already" in (selectively.applies(some) or "")
    assert {stage.recompute for stage in fully.apply(some).stages} == {"full"}


def test_a_model_that_does_not_know_its_products_keeps_or_recomputes_fully():
    known = context()
    layers = tuple(replace(layer, products=None) for layer in known.graph.layers)
    job = replace(known.job, graph=replace(known.graph, layers=layers))
    plan = build_plan(job, layout_of(known.plan), flops_per_layer(job))
    before = Context(plan=plan, graph=job.graph, cluster=known.cluster)
    reason = all_moves()["recompute selectively"].applies(before)
    assert "the model does not say what its products leave" in (reason or "")
    assert all_moves()["recompute activations"].applies(before) is None
