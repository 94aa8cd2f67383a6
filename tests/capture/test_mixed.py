"""What is made of a mixed cluster's measurements."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from lab.clusters import device, group, mixed
from predict.cost.machines import MODEL

from weft.capture.mixed import by_kind, link_of, measure_mixed, with_links
from weft.capture.mixed_worker import pairs_of_groups
from weft.describe.cluster import Cluster, Link
from weft.describe.cluster_file import load_cluster, parse_cluster
from weft.describe.families import layer_graph
from weft.describe.job import Job
from weft.errors import InputError
from weft.predict.cost.calibration import load_profiles, save_cluster, save_profile
from weft.predict.measurements import UNMEASURED, Measurements, load_devices
from weft.predict.profile import LayerProfile, LayerTiming


def profile(kind: str, seconds: float, spread: float = 0.1, tp: int = 1) -> LayerProfile:
    timing = LayerTiming(
        device=kind,
        layer="block",
        tp=tp,
        micro_batch_size=1,
        forward_s=seconds,
        backward_s=2 * seconds,
        update_s=seconds / 2,
        activation_bytes=8,
    )
    return LayerProfile(model_fingerprint="m", sequence=4, precision="fp32", timings=(timing,), spread=spread)


def test_a_kinds_times_are_those_of_its_slowest_rank_at_the_devices_own_speed() -> None:
    uneven = group("new", device("fast", 4e10), devices=2, speeds=(1.0, 0.5))
    slow = group("old", device("slow", 1e10), nodes=2)
    links = {("new", "old"): Link(1e8, 0.0), ("old", "old"): Link(1e8, 0.0)}
    cluster = Cluster(name="c", groups=(uneven, slow), links=links)
    ranks = [profile("fast", 1.0), profile("fast", 2.2), profile("slow", 4.0, 0.3), profile("slow", 3.0)]
    fast, slow_one = by_kind(cluster, ranks)
    assert fast.timings == profile("fast", 1.1).timings
    assert slow_one == profile("slow", 4.0, 0.3)
    assert by_kind(cluster, []) == ()


def test_tensor_ranks_count_as_the_slowest_of_them() -> None:
    uneven = group("new", device("fast", 4e10), devices=4, speeds=(1.0, 0.5, 1.0, 1.0))
    cluster = Cluster(name="c", groups=(uneven,), links={})
    ranks = [profile("fast", seconds, tp=2) for seconds in (2.0, 2.2, 1.2, 1.0)]
    (fast,) = by_kind(cluster, ranks)
    assert fast.timings == profile("fast", 1.2, tp=2).timings


def test_the_bandwidth_of_a_link_is_what_a_large_message_takes_beyond_an_empty_one() -> None:
    assert link_of([(0, 0.01), (100, 0.02), (1000, 0.51)]) == Link(2000.0, 0.01)


def test_each_pair_of_groups_is_measured_once_between_two_nodes() -> None:
    fast = group("new", device("fast", 4e10), devices=2)
    slow = group("old", device("slow", 1e10), nodes=2)
    links = {("new", "old"): Link(1e8, 0.0), ("old", "old"): Link(1e8, 0.0)}
    cluster = Cluster(name="c", groups=(fast, slow), links=links)
    assert pairs_of_groups(cluster) == {("new", "old"): (0, 2), ("old", "old"): (2, 3)}


def test_measured_links_are_kept_as_a_cluster_that_can_be_planned_for(tmp_path: Path) -> None:
    measured = with_links(mixed(), {("g0", "g1"): Link(1.9e7, 6e-5)})
    path = save_cluster(measured, tmp_path)
    assert path == tmp_path / "measurements" / "cluster-mixed.toml"
    assert load_cluster(path) == measured


def test_a_mixed_cluster_is_planned_with_the_profiles_of_its_kinds(tmp_path: Path) -> None:
    graph = layer_graph(MODEL)
    job = Job(graph=graph, cluster=mixed(), global_batch=8, sequence=4)
    rows = (profile("d1", 2.0, 0.2), profile("d0", 1.0))
    old, new = (replace(one, model_fingerprint=graph.fingerprint) for one in rows)
    assert load_devices(job, tmp_path) == UNMEASURED
    save_profile(old, tmp_path)
    assert load_devices(job, tmp_path) == Measurements(profile=old)
    save_profile(new, tmp_path)
    both = replace(new, spread=0.2, timings=new.timings + old.timings)
    assert load_devices(job, tmp_path) == Measurements(profile=both)
    assert load_devices(replace(job, sequence=5), tmp_path) == UNMEASURED


@pytest.mark.parametrize("kind", ["d0", "d1"])
def test_every_kind_has_the_rows_of_its_own(tmp_path: Path, kind: str) -> None:
    for name, seconds in (("d0", 1.0), ("d1", 2.0)):
        save_profile(profile(name, seconds), tmp_path)
    found = load_profiles("m", ["d0", "d1"], 4, "fp32", tmp_path)
    assert found is not None
    assert [row.device for row in found.rows[kind, "block", 1]] == [kind]


def test_a_devices_name_of_the_catalogue_is_not_measured_in_a_lab(tmp_path: Path) -> None:
    cluster = parse_cluster("1xa100-40gb+1xv100-32gb")
    with pytest.raises(InputError, match="lab: a100-40gb, v100-32gb: what a lab measures is not what such"):
        measure_mixed(cluster, None, precision=None, micro_batch_sizes=(1,), home=tmp_path)
