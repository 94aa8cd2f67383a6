"""Plans of any layout on any cluster, and their predicted steps, for laws of the whole cost model."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st
from predict.cost.machines import BETWEEN, GPU, INSIDE, MODEL
from predict.plans import plan_of

from weft.describe.cluster import Cluster, Link, NodeGroup
from weft.describe.device import Device
from weft.describe.families import layer_graph
from weft.describe.layer_graph import LayerGraph
from weft.describe.plan import Plan
from weft.planning.compile import compile_plan
from weft.predict.cost.placed_plan import CostModel
from weft.predict.predict import PredictedStep, predict

GRAPH = layer_graph(MODEL)


def machine(
    *,
    device: Device = GPU,
    inside: Link = INSIDE,
    between: Link = BETWEEN,
    nodes: int = 3,
    devices: int = 4,
) -> Cluster:
    """Equal nodes of equal devices."""
    group = NodeGroup(name="node", count=nodes, device=device, devices=devices, link=inside)
    links = {("node", "node"): between} if nodes > 1 else {}
    return Cluster(name="cluster", groups=(group,), links=links)


def faster(cluster: Cluster, factor: float) -> Cluster:
    """Every peak and bandwidth times `factor`, every latency and launch divided by it."""

    def link(one: Link) -> Link:
        return Link(one.bytes_per_s * factor, one.latency_s / factor)

    (group,) = cluster.groups
    device = replace(
        group.device,
        memory_bytes_per_s=group.device.memory_bytes_per_s * factor,
        flops_per_s={name: peak * factor for name, peak in group.device.flops_per_s.items()},
        launch_s=group.device.launch_s / factor,
    )
    return replace(
        cluster,
        groups=(replace(group, device=device, link=link(group.link)),),
        links={pair: link(one) for pair, one in cluster.links.items()},
    )


# Ticks are nanoseconds: on devices this slow they are too short to be seen.
SLOW = faster(machine(), 1e-4)


@st.composite
def plans(
    draw: st.DrawFn,
    cluster: Cluster = SLOW,
    graph: LayerGraph = GRAPH,
    recompute: tuple[str, ...] = ("none", "selective", "full"),
) -> Plan:
    """Any degrees, order, sharding and recomputation on up to twelve ranks."""
    dp = draw(st.integers(1, 2))
    schedule = draw(st.sampled_from(["gpipe", "1f1b", "breadth-first", "zb-h1"]))
    plan = plan_of(
        graph,
        cluster,
        pp=draw(st.integers(1, 3)),
        dp=dp,
        tp=draw(st.sampled_from([1, 2])),
        loops=draw(st.integers(1, 2)) if schedule == "breadth-first" else 1,
        schedule=schedule,
        micro_batches=draw(st.integers(1, 4)),
        micro_batch_size=draw(st.integers(1, 3)),
    )
    again = draw(st.sampled_from(recompute))
    stages = tuple(stage.model_copy(update={"recompute": again}) for stage in plan.stages)
    sharding = draw(st.sampled_from(["zero-0", "zero-1", "zero-2", "zero-3"])) if dp > 1 else "zero-0"
    return plan.model_copy(update={"stages": stages, "sharding": sharding})


def step_of(plan: Plan, cluster: Cluster, graph: LayerGraph = GRAPH) -> PredictedStep:
    return predict(CostModel(graph=graph, cluster=cluster), plan, compile_plan(plan, graph))
