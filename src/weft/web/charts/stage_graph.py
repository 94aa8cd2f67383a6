"""The picture of a stage graph: branches side by side, from the first stages to the last one."""

from __future__ import annotations

from collections import defaultdict
from html import escape

from weft.web.charts.cluster import MEMORY_COLOURS
from weft.web.charts.picture import WIDTH, picture_svg, shaded
from weft.web.rows.plan import memory_colour
from weft.web.rows.stage_graph import StageDiagram, StageNode

_COLOUR = "#2b6cd4"
_LEFT, _TOP = 12, 44
_HEIGHT, _ROW = 62, 76
# Between two columns, as a share of a column's width; edges run there.
_GAP = 0.28
_MOST_WIDE = 170.0
# Narrower boxes have the number of the stage alone, or nothing.
_ROOM_FOR_LINES, _ROOM_FOR_NUMBER = 84, 20
_LETTER = 6.4


def stage_graph_svg(graph: StageDiagram, *, title: str, headed: bool = True) -> str:
    """Draw stages as boxes and edges between them; a stage under the pointer shows its reasons.

    Stages of a column are equally far from the end. The slowest stage is the darkest. The bar at the foot of
    a box is the share of the device's memory.
    """
    places, rows = _places(graph)
    columns = 1 + max(column for column, _ in places)
    step = min(_MOST_WIDE / (1 - _GAP), (WIDTH - 2 * _LEFT) / (columns - _GAP))
    width = step * (1 - _GAP)
    corners = [(_LEFT + column * step, _TOP + row * _ROW) for column, row in places]
    parts = [_edge((corners[one][0] + width, corners[one][1]), corners[other]) for one, other in graph.edges]
    parts += [_box(node, corner, width) for node, corner in zip(graph.nodes, corners, strict=True)]
    return picture_svg(parts, _TOP + rows * _ROW + 2, title=title, headed=headed)


def _places(graph: StageDiagram) -> tuple[list[tuple[int, float]], int]:
    """Return the column and row of each stage, and the number of rows; short columns are centred.

    In a column, stages stand in the order of the stages that read them.
    """
    to_end = graph.to_end
    columns: dict[int, list[int]] = defaultdict(list)
    for stage, distance in enumerate(to_end):
        columns[max(to_end) - distance].append(stage)
    rows = max(map(len, columns.values()))
    found = [(0, 0.0)] * len(to_end)
    for column in sorted(columns, reverse=True):
        mine = sorted(columns[column], key=lambda stage: (_row_of_readers(graph, stage, found), stage))
        first = (rows - len(mine)) / 2
        for row, stage in enumerate(mine):
            found[stage] = (column, first + row)
    return found, rows


def _row_of_readers(graph: StageDiagram, stage: int, found: list[tuple[int, float]]) -> float:
    readers = [found[consumer][1] for producer, consumer in graph.edges if producer == stage]
    return sum(readers) / max(1, len(readers))


def _edge(start: tuple[float, float], end: tuple[float, float]) -> str:
    (x, y), (to_x, to_y) = start, end
    y, to_y, middle = y + _HEIGHT / 2, to_y + _HEIGHT / 2, (x + to_x) / 2
    path = f"M{x:.1f} {y:.1f}C{middle:.1f} {y:.1f} {middle:.1f} {to_y:.1f} {to_x:.1f} {to_y:.1f}"
    return f'<path class="weft-mark" style="stroke-opacity:.45" d="{path}"/>'


def _box(node: StageNode, corner: tuple[float, float], width: float) -> str:
    x, y = corner
    foot = y + _HEIGHT - 7
    words = escape("\n".join([", ".join(node.lines), *node.reasons]))
    return (
        f"<g><title>{words}</title>"
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{_HEIGHT}" rx="4" '
        f'fill="{shaded(_COLOUR, node.work)}"/>{_texts(node, x + width / 2, y, width)}'
        f'<rect class="weft-lane" x="{x + 4:.1f}" y="{foot:.1f}" width="{width - 8:.1f}" height="4"/>'
        f'<rect x="{x + 4:.1f}" y="{foot:.1f}" width="{min(1.0, node.memory) * (width - 8):.1f}" height="4" '
        f'fill="{MEMORY_COLOURS[memory_colour(node.memory)]}"/></g>'
    )


def _texts(node: StageNode, middle: float, top: float, width: float) -> str:
    if width < _ROOM_FOR_NUMBER:
        return ""
    lines = node.lines if width >= _ROOM_FOR_LINES else (node.lines[0].split()[-1],)
    letters = int((width - 8) / _LETTER)
    return "".join(
        f'<text class="weft-block" x="{middle:.1f}" y="{top + 16 + 15 * place:.1f}">'
        f"{escape(line if len(line) <= letters else line[: letters - 3] + '...')}</text>"
        for place, line in enumerate(lines)
    )
