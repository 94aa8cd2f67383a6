"""One reason to refuse a synchronisation method is told alike of layouts, of plans and by its move."""

from __future__ import annotations

from dataclasses import replace

from small_plans import make_plan, tiny

from weft.describe.cluster_file import parse_cluster
from weft.describe.contract import Contract
from weft.describe.families import layer_graph
from weft.describe.job import Job
from weft.describe.layout import Layout
from weft.describe.plan import Choice, Plan
from weft.errors import Violation
from weft.methods.sdp4bit.options import Sdp4BitOptions
from weft.moves.move import Context
from weft.moves.synchronisation import Replication, SyncChoice, SyncRefusal

GRAPH, CLUSTER = layer_graph(tiny()), parse_cluster("4xa100-80gb")


def refuse(options: Sdp4BitOptions, of: Replication) -> SyncRefusal | None:
    if of.replicas == 1:
        return SyncRefusal("nobody")
    return SyncRefusal("few bits", "sync.weight_bits", "4") if options.weight_bits < 4 else None


CHOICE = SyncChoice(
    method="sdp4bit",
    table=Sdp4BitOptions,
    refuse=refuse,
    also=lambda plan, options: [Violation("plan: sync", "also", "4")] if options.slices > 1 else [],
    moved_options={"slices": 2},
)
COMPOSITION, RULE = CHOICE.rules(other="others", reason="reasons")
MOVE = CHOICE.move(
    name="move", contract=Contract.EXACT, summary="Go.", source="nobody", verify="nothing",
    otherwise=lambda context: "too many" if context.plan.ranks > 2 else None,
)  # fmt: skip


def plan_of(dp: int, **options: int) -> Plan:
    return make_plan(tiny(), pp=1, dp=dp).model_copy(update={"sync": Choice(name="sdp4bit", options=options)})


def test_plans_name_the_key_and_its_nearest_value() -> None:
    assert list(RULE.refuse(plan_of(2), GRAPH)) == []
    assert [str(one) for one in RULE.refuse(plan_of(1), GRAPH)] == [
        "plan: sync: sdp4bit: nobody (nearest valid: dense)"
    ]
    assert [str(one) for one in RULE.refuse(plan_of(2, weight_bits=2, slices=2), GRAPH)] == [
        "plan: sync.weight_bits: sdp4bit: few bits (nearest valid: 4)",
        "plan: sync: also (nearest valid: 4)",
    ]
    [wrong] = RULE.refuse(plan_of(2, weight_bits=1), GRAPH)
    assert str(wrong).startswith("plan: sync.options: weight_bits: 1")
    dense = plan_of(1).model_copy(update={"sync": Choice(name="dense")})
    assert list(RULE.refuse(dense, GRAPH)) == []


def test_layouts_are_refused_in_the_same_words() -> None:
    job = Job(graph=GRAPH, cluster=CLUSTER, global_batch=4, sequence=8, sync_options={"weight_bits": 2})
    layout = Layout(
        pp=1, dp=2, tp=1, loops=1, micro_batch_size=1, schedule="gpipe", sync="sdp4bit"
    )  # fmt: skip
    assert COMPOSITION.refuse(job, layout) == "sdp4bit: few bits; nearest sync.weight_bits: 4"
    assert COMPOSITION.refuse(job, replace(layout, sync="dense")) is None
    assert COMPOSITION.refuse(job, replace(layout, dp=1)) == "sdp4bit: nobody; nearest sync.method: dense"


def test_the_move_has_its_options_and_those_of_the_places() -> None:
    dense = {"sync": Choice(name="dense")}
    context = Context(plan=plan_of(2).model_copy(update=dense), graph=GRAPH, cluster=CLUSTER)
    assert MOVE.applies(context) is None
    assert MOVE.apply(context).sync.options == {"slices": 2, "replicas_per_node": 2}
    reasons = [
        MOVE.applies(Context(plan=plan, graph=GRAPH, cluster=CLUSTER))
        for plan in (plan_of(2), plan_of(1).model_copy(update=dense), plan_of(3).model_copy(update=dense))
    ]
    assert reasons == ["the plan already has sync sdp4bit", "nobody", "too many"]
