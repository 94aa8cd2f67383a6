"""Recomputing edits every stage, once, and nothing else."""

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
