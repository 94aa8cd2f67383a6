"""The cluster that a lab emulates around this process, if any."""

from __future__ import annotations

from weft.describe.cluster import Cluster
from weft.describe.cluster_file import cluster_of
from weft.describe.reading import parse_toml
from weft.errors import InputError, Violation
from weft.lab.place import VARIABLE, LabPlaces, current_lab


def lab_cluster() -> Cluster | None:
    """Return the cluster of the lab around this process, or None outside of labs.

    Raises:
        InputError: when a lab has not set the variable.
    """
    lab = current_lab()
    return None if lab is None else _cluster_of(lab)


def require_lab_devices(cluster: Cluster) -> None:
    """Inside a lab, refuse a job planned for other devices; its links may have measured values.

    Raises:
        InputError: with the name of the lab's cluster, and its path or expression.
    """
    lab = current_lab()
    if lab is not None and _devices(cluster) != _devices(emulated := _cluster_of(lab)):
        problem = f"{cluster.name!r} has other devices than the lab, which emulates {emulated.name!r}"
        raise InputError(Violation("cluster.use", problem, lab.named))


def _cluster_of(lab: LabPlaces) -> Cluster:
    return cluster_of(parse_toml(lab.cluster, VARIABLE), VARIABLE)


def _devices(cluster: Cluster) -> list[tuple[str, float, tuple[int, int]]]:
    return [
        (cluster.device_of(rank).name, cluster.speed_of(rank), cluster.node_of(rank))
        for rank in range(cluster.ranks)
    ]
