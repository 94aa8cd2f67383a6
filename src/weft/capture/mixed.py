"""Measurement of a lab's cluster: layers by kind of device, links by pair of groups. Never imports torch."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from weft.capture.measure import answered, request_of
from weft.describe.catalogue import catalogue
from weft.describe.cluster import Cluster, Link
from weft.describe.cluster_tables import to_toml
from weft.describe.model import ModelConfig
from weft.errors import InputError, Violation
from weft.files import weft_home
from weft.predict.cost.calibration import add_profile, profile_from_record, save_cluster
from weft.predict.profile import LayerProfile, LayerTiming
from weft.progress import ProgressReport, unwatched

WORKER_MODULE = "weft.capture.mixed_worker"
_SECONDS = ("forward_s", "backward_s", "update_s")


@dataclass(frozen=True, slots=True)
class MixedMeasured:
    """The cluster with measured links, a profile of each kind of device, and the files that keep them."""

    cluster: Cluster
    profiles: tuple[LayerProfile, ...]
    files: tuple[Path, ...]


def measure_mixed(
    cluster: Cluster,
    model: ModelConfig | None,
    *,
    precision: str | None,
    micro_batch_sizes: Sequence[int],
    tensor_degrees: Sequence[int] = (1,),
    home: Path | None = None,
    report: ProgressReport = unwatched,
) -> MixedMeasured:
    """Measure the links of a lab's cluster and, with a model, its layers on each kind of device.

    Raises:
        InputError: for a device with a name of the catalogue: its measurements would pass for a real one's;
            for a tensor degree that does not divide the model's layers or the devices of every node.
        RunError: when a measuring worker failed.
    """
    names = sorted({group.device.name for group in cluster.groups} & set(catalogue()))
    if names:
        problem = f"{', '.join(names)}: what a lab measures is not what such a device does"
        raise InputError(Violation("lab", problem, "a [device.NAME] of the file's own"))
    home = home or weft_home()
    request = request_of(cluster, model, precision, micro_batch_sizes, tensor_degrees)
    asked = {**request, "cluster": to_toml(cluster)}
    with answered(WORKER_MODULE, cluster.ranks, asked, report) as directory:
        tables = {
            (one, other): [(int(size), float(seconds)) for size, seconds in table]
            for one, other, table in json.loads((directory / "links.json").read_text())
        }
        by_rank = (
            [
                profile_from_record(json.loads((directory / f"layers-{rank}.json").read_text()))
                for rank in range(cluster.ranks)
            ]
            if model is not None
            else []
        )
    measured = with_links(cluster, {pair: link_of(table) for pair, table in tables.items()})
    profiles = by_kind(cluster, by_rank)
    files = [save_cluster(measured, home), *(add_profile(profile, home) for profile in profiles)]
    return MixedMeasured(measured, profiles, tuple(files))


def with_links(cluster: Cluster, measured: Mapping[tuple[str, str], Link]) -> Cluster:
    """Return the cluster with these links between groups in place of its own links."""
    return replace(cluster, links={**cluster.links, **measured})


def link_of(table: Sequence[tuple[int, float]]) -> Link:
    """Return the latency of an empty message and the rate of the largest, from rising (bytes, seconds)."""
    empty_s = table[0][1]
    largest, largest_s = table[-1]
    return Link(largest / max(largest_s - empty_s, 1e-9), empty_s)


def by_kind(cluster: Cluster, by_rank: Sequence[LayerProfile]) -> tuple[LayerProfile, ...]:
    """Return one profile for each kind of device, from one profile of each rank.

    Times are from the kind's slowest rank. The times of a rank with `speeds` are scaled to its `device`. The
    times of tensor ranks are scaled by the slowest of them.
    """
    kinds: dict[str, list[LayerProfile]] = defaultdict(list)
    for rank, profile in enumerate(by_rank):
        timings = (_at_speed(timing, _group_speed(cluster, rank, timing.tp)) for timing in profile.timings)
        kinds[cluster.device_of(rank).name].append(replace(profile, timings=tuple(timings)))
    return tuple(_slowest(profiles) for profiles in kinds.values())


def _group_speed(cluster: Cluster, rank: int, tensor_parallel: int) -> float:
    """Return the speed of the slowest tensor rank in a rank's measurement."""
    first = rank - rank % tensor_parallel
    return min(cluster.speed_of(one) for one in range(first, first + tensor_parallel))


def _at_speed(timing: LayerTiming, speed: float) -> LayerTiming:
    return replace(timing, **{name: getattr(timing, name) * speed for name in _SECONDS})


def _slowest(profiles: Sequence[LayerProfile]) -> LayerProfile:
    timings = tuple(
        replace(rows[0], **{name: max(getattr(row, name) for row in rows) for name in _SECONDS})
        for rows in zip(*(profile.timings for profile in profiles), strict=True)
    )
    return replace(profiles[0], timings=timings, spread=max(profile.spread for profile in profiles))
