"""A cluster and what a plan puts on its devices: lines for terminals, and a picture."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from html import escape

from rich.table import Table

from weft.describe.cluster import Cluster, NodeGroup
from weft.describe.plan import Plan
from weft.describe.units import format_bytes, format_seconds
from weft.web.colours import shaded
from weft.web.stages import spans
from weft.web.svg import WIDTH, picture_svg

# Of more nodes of a group the first are drawn.
MAXIMUM_NODES = 16
_STAGE_COLOUR = "#2b6cd4"
_DEVICE, _STEP, _PADDING, _GAP = 30, 34, 6, 8
_TOP, _HEADING, _LINE = 40, 26, 18
_INDENT = 12


@dataclass(frozen=True, slots=True)
class _Node:
    """A drawn node: its first rank, and where its box begins inside the picture of its group."""

    first_rank: int
    x: int
    y: int


def cluster_table(cluster: Cluster, plan: Plan) -> Table:
    """A line for each group of nodes with the stages on it, and one for each link between groups."""
    held = stages_by_rank(plan)
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("group", "nodes", "link", "ranks", "stages"):
        table.add_column(name, overflow="fold")
    first = 0
    for group in cluster.groups:
        ranks = range(first, first + group.count * group.devices)
        stages = sorted({stage for rank in ranks for stage in held.get(rank, ())})
        on_them = spans(stages) or "left out"
        table.add_row(group.name, _nodes(group), _inside(group), spans(ranks), on_them)
        first = ranks.stop
    for line in _links(cluster):
        table.add_row(*line)
    return table


def cluster_svg(cluster: Cluster, plan: Plan, *, title: str) -> str:
    """Nodes as boxes of devices, each with the stages that it holds; later stages are darker.

    Devices that the plan leaves out are grey. Of many nodes of a group the first are drawn.
    """
    held = stages_by_rank(plan)
    parts, top, first = [], _TOP, 0
    for group in cluster.groups:
        heading = f"{group.name}: {_nodes(group)}, {_inside(group)}"
        parts.append(f'<text class="weft-ink" x="{_INDENT}" y="{top + 14}">{escape(heading)}</text>')
        nodes = _placed(group, first, top + _HEADING)
        for node in nodes:
            parts.append(_node(node, group, held, len(plan.stages)))
        top = nodes[-1].y + _DEVICE + 2 * _PADDING + _GAP
        if group.count > MAXIMUM_NODES:
            more = f"and {group.count - MAXIMUM_NODES} more nodes"
            parts.append(f'<text class="weft-soft" x="{_INDENT}" y="{top + 6}">{more}</text>')
            top += _LINE
        top += _GAP
        first += group.count * group.devices
    for name, where, words, *_ in _links(cluster):
        text = f"{name}: {words}, {where}"
        parts.append(f'<text class="weft-soft" x="{_INDENT}" y="{top + 8}">{escape(text)}</text>')
        top += _LINE
    return picture_svg(parts, top + 6, title=title)


def stages_by_rank(plan: Plan) -> dict[int, tuple[int, ...]]:
    """The stages on each rank that the plan uses, rising."""
    held: dict[int, list[int]] = defaultdict(list)
    for index, stage in enumerate(plan.stages):
        for rank in sorted({rank for replica in stage.replicas for rank in replica.ranks}):
            held[rank].append(index)
    return {rank: tuple(stages) for rank, stages in held.items()}


def _nodes(group: NodeGroup) -> str:
    nodes = "1 node" if group.count == 1 else f"{group.count} nodes"
    speeds = f", speeds {', '.join(f'{one:g}' for one in group.speeds)}" if group.speeds else ""
    device = group.device
    return f"{nodes} of {group.devices} {device.name} with {format_bytes(device.memory_bytes)}{speeds}"


def _inside(group: NodeGroup) -> str:
    if group.devices == 1:
        return "one device to a node"
    return f"{format_bytes(round(group.link.bytes_per_s))}/s inside"


def _links(cluster: Cluster) -> Iterator[tuple[str, str, str, str, str]]:
    """The links between nodes that a cluster has, in the columns of `cluster_table`."""
    counts = {group.name: group.count for group in cluster.groups}
    for (one, other), link in sorted(cluster.links.items()):
        if one != other or counts.get(one, 0) > 1:
            speed = f"{format_bytes(round(link.bytes_per_s))}/s, {format_seconds(link.latency_s)}"
            name = one if one == other else f"{one} - {other}"
            yield name, "between nodes", speed, "", ""


def _placed(group: NodeGroup, first_rank: int, top: int) -> list[_Node]:
    """Boxes side by side, in as many lines as they need."""
    width = group.devices * _STEP - (_STEP - _DEVICE) + 2 * _PADDING
    each = max(1, (WIDTH - 2 * _INDENT + _GAP) // (width + _GAP))
    height = _DEVICE + 2 * _PADDING + _GAP
    return [
        _Node(
            first_rank=first_rank + number * group.devices,
            x=_INDENT + number % each * (width + _GAP),
            y=top + number // each * height,
        )
        for number in range(min(group.count, MAXIMUM_NODES))
    ]


def _node(node: _Node, group: NodeGroup, held: Mapping[int, tuple[int, ...]], stages: int) -> str:
    width = group.devices * _STEP - (_STEP - _DEVICE) + 2 * _PADDING
    height = _DEVICE + 2 * _PADDING
    parts = [f'<rect class="weft-lane" x="{node.x}" y="{node.y}" width="{width}" height="{height}" rx="4"/>']
    for place in range(group.devices):
        rank = node.first_rank + place
        x, y = node.x + _PADDING + place * _STEP, node.y + _PADDING
        on_it = held.get(rank, ())
        words = f"stage{'s' * (len(on_it) > 1)} {spans(on_it)}" if on_it else "left out"
        colour = shaded(_STAGE_COLOUR, on_it[0] / max(1, stages - 1)) if on_it else "#8a8f98"
        shown = f"{on_it[0]}" + "+" * (len(on_it) > 1) if on_it else "-"
        parts.append(
            f'<g><title>rank {rank}: {words}</title><rect x="{x}" y="{y}" width="{_DEVICE}" '
            f'height="{_DEVICE}" rx="3" fill="{colour}"/><text class="weft-block" x="{x + _DEVICE / 2:g}" '
            f'y="{y + 19}">{shown}</text></g>'
        )
    return "".join(parts)
