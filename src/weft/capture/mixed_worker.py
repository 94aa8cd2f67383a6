"""The worker that measures a cluster of several kinds of devices: each rank for itself, all at once.

The agent calls `main` on every rank; `DIRECTORY/measure.json` is the request.
Every rank writes `layers-RANK.json`, rank 0 the links between the nodes to `links.json`.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import torch

from weft.capture.machine import ON_CPU, messages_between
from weft.capture.worker import requested_profile
from weft.describe.cluster import Cluster
from weft.describe.cluster_file import cluster_of
from weft.describe.reading import parse_toml
from weft.progress import CountedWork, progress_file, unwatched
from weft.run.launch.worker_start import start_worker


def main(directory: Path) -> None:
    """Run the measurements that `measure.json` requests."""
    request = json.loads((directory / "measure.json").read_text())
    cluster = cluster_of(parse_toml(request["cluster"], "cluster"), "cluster")
    context = start_worker()
    host = torch.device("cpu")
    report = progress_file(directory).write if context.rank == 0 else unwatched
    pairs = pairs_of_groups(cluster)
    counted = CountedWork(report, "links", len(pairs), "links")
    links = {key: messages_between(pairs[key], host, ON_CPU.message) for key in counted.each(pairs)}
    if context.rank == 0:
        (directory / "links.json").write_text(json.dumps([[*key, table] for key, table in links.items()]))
    if request["model"] is not None:
        name, device = cluster.device_of(context.rank).name, torch.device(context.device)
        profile = requested_profile(request, name, device, report, throttled=True)
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
