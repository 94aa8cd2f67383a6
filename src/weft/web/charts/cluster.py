"""Pictures of a cluster: the stages of a plan on its devices, and the peak memory of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from weft.describe.cluster import Cluster, NodeGroup
from weft.describe.plan import Plan
from weft.describe.units import counted
from weft.web.charts.picture import WIDTH, picture_svg, shaded
from weft.web.rows.plan import equal_ranks, inside_text, link_rows, nodes_text, spans, stages_by_rank

# The most nodes drawn of one group: the first ones.
MAXIMUM_NODES = 16
_STAGE_COLOUR, _SERVER_COLOUR, _UNUSED_COLOUR = "#2b6cd4", "#1a7f55", "#6c7179"
_DEVICE, _STEP, _PADDING, _GAP = 30, 34, 6, 8
# What has room in the box of a device.
_LETTERS = 4
_TOP, _HEADING, _LINE = 40, 26, 18
_INDENT = 12


@dataclass(frozen=True, slots=True)
class _Node:
    """A drawn node: its first rank, and the left and top of its box in the picture, in pixels."""

    first_rank: int
    x: int
    y: int


def cluster_svg(cluster: Cluster, plan: Plan, *, title: str, headed: bool = True) -> str:
    """Draw nodes as boxes of devices, each device with its stages; later stages are darker.

    Servers are green, and unused devices grey. Of a larger group the first `MAXIMUM_NODES` nodes are drawn.
    """
    held = stages_by_rank(plan)
    parts, top, first = [], _TOP, 0
    for group in cluster.groups:
        heading = f"{group.name}: {nodes_text(group)}, {inside_text(group)}"
        parts.append(f'<text class="weft-ink" x="{_INDENT}" y="{top + 14}">{escape(heading)}</text>')
        nodes = _placed(group, first, top + _HEADING)
        for node in nodes:
            parts.append(_node(node, group, held, plan))
        top = nodes[-1].y + _DEVICE + 2 * _PADDING + _GAP
        if group.count > MAXIMUM_NODES:
            more = f"and {counted(group.count - MAXIMUM_NODES, 'more node')}"
            parts.append(f'<text class="weft-soft" x="{_INDENT}" y="{top + 6}">{more}</text>')
            top += _LINE
        top += _GAP
        first += group.count * group.devices
    for name, where, words in link_rows(cluster):
        text = f"{name}: {words}, {where}"
        parts.append(f'<text class="weft-soft" x="{_INDENT}" y="{top + 8}">{escape(text)}</text>')
        top += _LINE
    return picture_svg(parts, top + 6, title=title, headed=headed)


def _placed(group: NodeGroup, first_rank: int, top: int) -> list[_Node]:
    """Place the boxes of a group side by side, in several lines if necessary."""
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


def _node(node: _Node, group: NodeGroup, held: Mapping[int, tuple[int, ...]], plan: Plan) -> str:
    width = group.devices * _STEP - (_STEP - _DEVICE) + 2 * _PADDING
    height = _DEVICE + 2 * _PADDING
    parts = [f'<rect class="weft-lane" x="{node.x}" y="{node.y}" width="{width}" height="{height}" rx="4"/>']
    for place in range(group.devices):
        rank = node.first_rank + place
        x, y = node.x + _PADDING + place * _STEP, node.y + _PADDING
        on_it = held.get(rank, ())
        if on_it:
            words, shown = f"stage{'s' * (len(on_it) > 1)} {spans(on_it)}", _fitting(on_it)
            colour = shaded(_STAGE_COLOUR, on_it[0] / max(1, len(plan.stages) - 1))
        elif rank in plan.servers:
            words, shown, colour = f"server {plan.servers.index(rank)}", "S", _SERVER_COLOUR
        else:
            words, shown, colour = "left out", "-", _UNUSED_COLOUR
        parts.append(
            f'<g><title>rank {rank}: {words}</title><rect x="{x}" y="{y}" width="{_DEVICE}" '
            f'height="{_DEVICE}" rx="3" fill="{colour}"/><text class="weft-block" x="{x + _DEVICE / 2:g}" '
            f'y="{y + 19}">{shown}</text></g>'
        )
    return "".join(parts)


def _fitting(stages: tuple[int, ...]) -> str:
    """Return the stages on a device, or the first of too many for its box."""
    text = spans(stages)
    return text if len(text) <= _LETTERS else f"{stages[0]}+"


_GUTTER, _BAR_WIDTH, _BAR_LINE, _FIRST_BAR = 150, 560, 24, 40
MEMORY_COLOURS = {"green": "#1a7f55", "yellow": "#a85a14", "red": "#b8473d"}


def memory_svg(
    peak_bytes: Sequence[int], memory_bytes: Sequence[int], *, title: str, headed: bool = True
) -> str:
    """Draw the predicted peak of each rank against its memory; neighbours with equal figures share a bar."""
    lines = equal_ranks(peak_bytes, memory_bytes)
    height = _FIRST_BAR + _BAR_LINE * len(lines) + 12
    parts = []
    for place, ranks in enumerate(lines):
        top = _FIRST_BAR + _BAR_LINE * place
        width = min(1.0, ranks.share) * _BAR_WIDTH
        parts.append(
            f'<text class="weft-ink weft-end" x="{_GUTTER - 10}" y="{top + 13}">{ranks.name}</text>'
            f'<rect class="weft-lane" x="{_GUTTER}" y="{top}" width="{_BAR_WIDTH}" height="18"/>'
            f'<rect x="{_GUTTER}" y="{top}" width="{max(1.0, width):.1f}" height="18" '
            f'fill="{MEMORY_COLOURS[ranks.colour]}"/>'
            f'<text class="weft-ink" x="{_GUTTER + _BAR_WIDTH + 10}" y="{top + 13}">{ranks.words}</text>'
        )
    return picture_svg(parts, height, title=title, headed=headed)
