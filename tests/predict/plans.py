"""Plans of the small model for tests of prices and predictions.

Its layers are so small that devices would wait for hosts. So hosts launch captured graphs.
"""

from __future__ import annotations

from weft.describe.cluster import Cluster
from weft.describe.layer_graph import LayerGraph
from weft.describe.plan import Choice, Plan, Replica, Stage


def plan_of(
    graph: LayerGraph,
    cluster: Cluster,
    *,
    pp: int = 2,
    dp: int = 1,
    tp: int = 1,
    loops: int = 1,
    schedule: str = "1f1b",
    micro_batches: int = 4,
    micro_batch_size: int = 2,
    precision: str = "fp32",
) -> Plan:
    """Rank = (replica * pp + device) * tp + lane; stage s on device s mod pp; layers cut evenly."""
    stages = pp * loops
    cuts = [len(graph.layers) * stage // stages for stage in range(stages + 1)]

    def ranks(replica: int, stage: int) -> tuple[int, ...]:
        first = (replica * pp + stage % pp) * tp
        return tuple(range(first, first + tp))

    return Plan(
        model=graph.name,
        model_fingerprint=graph.fingerprint,
        cluster=cluster.name,
        cluster_fingerprint=cluster.fingerprint,
        sequence=graph.sequence,
        global_batch=dp * micro_batches * micro_batch_size,
        micro_batch_size=micro_batch_size,
        precision=precision,
        mesh={"pp": pp, "dp": dp, "tp": tp},
        stages=tuple(
            Stage(
                layers=tuple(range(cuts[stage], cuts[stage + 1])),
                replicas=tuple(
                    Replica(ranks=ranks(replica, stage), micro_batches=micro_batches) for replica in range(dp)
                ),
            )
            for stage in range(stages)
        ),
        schedule=Choice(name=schedule),
        launch="captured",
    )
