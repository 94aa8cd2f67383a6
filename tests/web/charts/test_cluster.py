"""The picture of a cluster: every device with what it holds."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from web.plans import two_stages
from web.samples import HOSTILE

from weft.describe.cluster_file import parse_cluster
from weft.web.charts.cluster import MAXIMUM_NODES, cluster_svg
from weft.web.rows.plan import spans, stages_by_rank

SVG = "{http://www.w3.org/2000/svg}"


def devices_of(svg: str) -> dict[int, str]:
    """What is said of each drawn device."""
    titles = [one.text or "" for one in ElementTree.fromstring(svg).iter(f"{SVG}title")]
    return {int(found[1]): found[2] for one in titles if (found := re.match(r"rank (\d+): (.*)", one))}


def test_every_device_is_drawn_with_its_stages_or_as_left_out() -> None:
    job = two_stages()
    cluster, held = job.problem.job.cluster, stages_by_rank(job.plan)
    assert set(held) == set(range(job.plan.ranks))
    drawn = devices_of(cluster_svg(cluster, job.plan, title=HOSTILE))
    assert set(drawn) == set(range(cluster.ranks))
    for rank, words in drawn.items():
        assert words == (
            f"stage{'s' * (len(held[rank]) > 1)} {spans(held[rank])}" if rank in held else "left out"
        )


def test_of_many_nodes_the_first_are_drawn() -> None:
    cluster = parse_cluster("256xa100-80gb")
    svg = cluster_svg(cluster, two_stages().plan, title="many")
    assert len(devices_of(svg)) == MAXIMUM_NODES * 8
    assert f"and {32 - MAXIMUM_NODES} more nodes" in svg
