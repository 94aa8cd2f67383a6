"""The option of hierarchical sums: a key of `[sync]`, which follows from the places of replicas."""

from __future__ import annotations

from pydantic import Field

from weft.describe.synchronisation import SyncMethod
from weft.describe.toml_table import Count, TomlTable
from weft.methods.sharding.neighbours import replicas_per_node

NAME = "hierarchical"


class HierarchicalOptions(TomlTable):
    """The further keys of `[sync]` under `method = "hierarchical"`."""

    replicas_per_node: Count = Field(
        default=1, description="replicas that add up gradients inside their node first; of the cluster"
    )


# A collective is priced as the faster of a flat one and a hierarchical one.
SYNC = SyncMethod(name=NAME, table=HierarchicalOptions, derived={"replicas_per_node": replicas_per_node})
