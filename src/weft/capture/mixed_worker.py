"""The worker that measures a cluster of several kinds of devices: each rank for itself, all at once.

The agent calls `main` on every rank; `DIRECTORY/measure.json` is the request.
Every rank writes `layers-RANK.json`, rank 0 the links between the nodes to `links.json`.
"""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist

from weft.capture.layers import profile_layers
from weft.capture.machine import ON_CPU, message_seconds, ways_between
from weft.capture.message_line import open_exchange
from weft.describe.cluster import Cluster
from weft.describe.cluster_file import cluster_of
from weft.describe.families import layer_graph
from weft.describe.model import model_from
from weft.describe.reading import parse_toml
from weft.run.launch.worker_start import start_worker


def main(directory: Path) -> None:
    """Run the measurements that `measure.json` requests."""
    request = json.loads((directory / "measure.json").read_text())
    cluster = cluster_of(parse_toml(request["cluster"], "cluster"), "cluster")
    context = start_worker()
    links = {key: _messages(*pair) for key, pair in pairs_of_groups(cluster).items()}
    if context.rank == 0:
        (directory / "links.json").write_text(json.dumps([[*key, table] for key, table in links.items()]))
    if request["model"] is not None:
        config = model_from(request["model"])
        profile = profile_layers(
            config,
            layer_graph(config),
            cluster.device_of(context.rank).name,
            torch.device(context.device),
            precision=request["precision"],
            micro_batch_sizes=request["micro_batch_sizes"],
            tensor_degrees=request["tensor_degrees"],
            throttled=True,
        )
        (directory / f"layers-{context.rank}.json").write_text(json.dumps(asdict(profile)))
    context.close()


def pairs_of_groups(cluster: Cluster) -> dict[tuple[str, str], tuple[int, int]]:
    """Return, for each pair of groups, the first two ranks (rank, peer) on different nodes of the groups."""
    pairs: dict[tuple[str, str], tuple[int, int]] = {}
    for rank in range(cluster.ranks):
        for peer in range(rank + 1, cluster.ranks):
            if cluster.node_of(rank) != cluster.node_of(peer):
                one, other = sorted((cluster.group_of(rank).name, cluster.group_of(peer).name))
                pairs.setdefault((one, other), (rank, peer))
    return pairs


def _messages(rank: int, peer: int) -> list[tuple[int, float]]:
    """Return (bytes, seconds) of messages between two ranks; all ranks call it and get the result."""
    own = dist.get_rank()
    host, pair = torch.device("cpu"), (rank, peer)
    with closing(open_exchange(ways_between(own, pair), host, f"messages {pair}")) as exchange:
        return [(size, message_seconds(exchange, size, host, pair)) for size in ON_CPU.message]
