"""A Timeline as one small SVG: for files, for web pages and for notebooks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np
import numpy.typing as npt

from weft.describe.units import counted
from weft.program.arrays import Ints
from weft.program.kinds import CODEC, FROM_SERVERS, KINDS, TO_SERVERS, is_compute
from weft.program.program import NONE
from weft.timeline.folded import folded_ranks
from weft.timeline.timeline import Timeline, label, stream_names
from weft.web.charts.axes import time_ticks
from weft.web.charts.picture import WIDTH, kind_colour, picture_svg, shaded
from weft.web.rows.plan import ranks_text


@dataclass(frozen=True, slots=True, order=True)
class Lane:
    """One rank's work on one stream; `order` is the stream's place in `stream_names()`."""

    rank: int
    order: int
    stream: str


def lane_table(timelines: Iterable[Timeline]) -> tuple[Lane, ...]:
    """Return the lanes of all the timelines together, sorted by rank and stream."""
    names = stream_names()
    position = {name: order for order, name in enumerate(names)}
    found: set[tuple[int, int]] = set()
    for timeline in timelines:
        pairs = np.unique(np.stack([timeline.rank, timeline.kind]), axis=1).T
        found |= {(int(rank), position[KINDS[int(kind)].stream]) for rank, kind in pairs}
    return tuple(Lane(rank, order, names[order]) for rank, order in sorted(found))


def lane_of_rows(timeline: Timeline, lanes: tuple[Lane, ...]) -> Ints:
    """Return the index in `lanes` of each row's lane, -1 for rows without one; shape (rows,)."""
    names = stream_names()
    order_of_kind = np.array([names.index(kind.stream) for kind in KINDS], dtype=np.int64)
    key = timeline.rank * len(names) + order_of_kind[timeline.kind]
    wanted = np.array([lane.rank * len(names) + lane.order for lane in lanes], dtype=np.int64)
    index = np.minimum(np.searchsorted(wanted, key), max(len(wanted) - 1, 0))
    return np.where(wanted[index] == key, index, NONE) if len(wanted) else np.full(len(key), NONE)


def shade_of_rows(timeline: Timeline) -> npt.NDArray[np.float64]:
    """Return the darkness of each row, 0 to 1; later stages of a rank are darker, to show loops."""
    shades = np.zeros(len(timeline))
    compute = is_compute(timeline.kind)
    for rank in np.unique(timeline.rank):
        mine = compute & (timeline.rank == rank)
        stages = np.unique(timeline.stage[mine & (timeline.stage != NONE)])
        if len(stages) > 1:
            shades[mine] = np.searchsorted(stages, timeline.stage[mine]) / (len(stages) - 1)
    return shades


# Of larger timelines the first ranks are drawn: at most so many rows, with so many blocks together.
MAXIMUM_ROWS = 64
MAXIMUM_BLOCKS = 2_500
_STREAMS = ("compute", CODEC, "collective", TO_SERVERS, FROM_SERVERS)
_GUTTER = 150
_RIGHT = WIDTH - 12
_LENGTH = _RIGHT - _GUTTER
_LANE = 26
_THIN_LANE = 12
_GAP = 4
_TOP = 40
_LINE = 20
_LETTER = 6.6
# A block that is this narrow has no border: next to one of its colour, both are one block.
_BORDERED = 3.0


@dataclass(slots=True)
class _DrawnBlock:
    """A drawn block of a lane, in pixels; `text` is empty without room for it."""

    left: float
    right: float
    colour: str
    text: str


def timeline_svg(timeline: Timeline, *, title: str, headed: bool = True) -> str:
    """Draw computations, codecs and collectives of each rank as coloured blocks on a common time axis.

    Ranks with equal blocks share a row, with the micro-batches of the first one. Blocks show their
    micro-batch if there is room; later stages of a rank are darker. Times count from the first start. A
    picture has at most about `MAXIMUM_BLOCKS` blocks; it says which ranks it leaves out.
    """
    streams = np.array([kind.stream in _STREAMS for kind in KINDS])
    seen = timeline.take(streams[timeline.kind])
    timed = seen.take(seen.end_ns > seen.start_ns)
    folded = folded_ranks(timed if len(timed) else seen)
    seen = seen.take(np.isin(seen.rank, [group[0] for group in folded[:MAXIMUM_ROWS]]))
    origin = int(timeline.start_ns.min()) if len(timeline) else 0
    span = max(1, int(timeline.end_ns.max()) - origin) if len(timeline) else 1
    lanes = _lanes_in_use(seen)
    blocks = _blocks(seen, lanes, origin, _LENGTH / span)
    shown = folded[: _rows_within(lanes, blocks)]
    leaders = {group[0]: group for group in shown}
    lanes = tuple(lane for lane in lanes if lane.rank in leaders)
    seen = seen.take(np.isin(seen.rank, list(leaders)))
    tops = _lane_tops(lanes)
    notes = _notes(seen, folded, shown)
    parts = [
        _lanes(lanes, tops, leaders),
        _axis(span, tops),
        _drawn(blocks, lanes, tops),
        _legend(seen, notes, tops[-1] + 36),
    ]
    ranks = sum(len(group) for group in folded)
    description = f"{title}: {counted(len(timeline), 'instruction')} on {counted(ranks, 'rank')}"
    height = tops[-1] + 44 + _LINE * bool(notes)
    return picture_svg(parts, height, title=title, description=description, headed=headed)


def _rows_within(lanes: tuple[Lane, ...], blocks: Sequence[Sequence[_DrawnBlock]]) -> int:
    """Return the number of first ranks with at most `MAXIMUM_BLOCKS` blocks together, at least one."""
    by_rank: dict[int, int] = defaultdict(int)
    for lane, drawn in zip(lanes, blocks, strict=True):
        by_rank[lane.rank] += len(drawn)
    total = np.cumsum([by_rank[rank] for rank in sorted(by_rank)])
    return max(1, int(np.searchsorted(total, MAXIMUM_BLOCKS, side="right")))


def _notes(seen: Timeline, folded: list[tuple[int, ...]], shown: list[tuple[int, ...]]) -> str:
    notes = []
    if len(shown) < len(folded):
        notes.append(f"the first {len(shown)} of {len(folded)} rows of different ranks")
    if any(len(group) > 1 for group in shown):
        notes.append("of equal ranks, the micro-batches of the first one")
    if (shade_of_rows(seen) > 0).any():
        notes.append("darker: later stages of a rank")
    return "; ".join(notes)


def _lanes_in_use(timeline: Timeline) -> tuple[Lane, ...]:
    """Return the lanes with an instruction that takes time, and every rank's compute lane."""
    lanes = lane_table([timeline])
    timed = np.unique(lane_of_rows(timeline, lanes)[timeline.end_ns > timeline.start_ns])
    return tuple(lane for index, lane in enumerate(lanes) if index in timed or lane.stream == "compute")


def _lane_height(lane: Lane) -> int:
    return _LANE if lane.stream == "compute" else _THIN_LANE


def _lane_tops(lanes: tuple[Lane, ...]) -> list[int]:
    """Return the top of each lane and the bottom of the last one, in pixels."""
    tops, top = [], _TOP
    for index, lane in enumerate(lanes):
        if index and lanes[index - 1].rank != lane.rank:
            top += _GAP
        tops.append(top)
        top += _lane_height(lane) + 1
    return [*tops, top]


def _lanes(lanes: tuple[Lane, ...], tops: list[int], leaders: Mapping[int, tuple[int, ...]]) -> str:
    parts = []
    for lane, top in zip(lanes, tops, strict=False):
        height = _lane_height(lane)
        compute = lane.stream == "compute"
        name, style = (ranks_text(leaders[lane.rank]), "weft-ink") if compute else (lane.stream, "weft-soft")
        parts.append(
            f'<rect class="weft-lane" x="{_GUTTER}" y="{top}" width="{_LENGTH}" height="{height}"/>'
            f'<text class="{style} weft-end" x="{_GUTTER - 10}" y="{top + height / 2 + 4:g}">{name}</text>'
        )
    return "".join(parts)


def _axis(span: int, tops: list[int]) -> str:
    parts = []
    for at, text in time_ticks(span, most=9):
        x = _GUTTER + at * _LENGTH / span
        # Half of a text on the last tick would lie outside the picture.
        anchor = "weft-end" if x + len(text) * _LETTER / 2 > WIDTH else "weft-middle"
        parts.append(
            f'<path class="weft-grid" d="M{x:.1f} {_TOP}V{tops[-1]}"/>'
            f'<text class="weft-soft {anchor}" x="{x:.1f}" y="{tops[-1] + 14}">{escape(text)}</text>'
        )
    return "".join(parts)


def _blocks(
    timeline: Timeline, lanes: tuple[Lane, ...], origin: int, scale: float
) -> list[list[_DrawnBlock]]:
    """Return the blocks of each lane; those too narrow for a border are one with equal neighbours."""
    placed, shades = lane_of_rows(timeline, lanes), shade_of_rows(timeline)
    rows = np.flatnonzero((placed >= 0) & (timeline.end_ns > timeline.start_ns))
    blocks: list[list[_DrawnBlock]] = [[] for _ in lanes]
    for row in rows[np.argsort(timeline.start_ns[rows], kind="stable")].tolist():
        lane, kind = int(placed[row]), int(timeline.kind[row])
        left = _GUTTER + (int(timeline.start_ns[row]) - origin) * scale
        width = int(timeline.end_ns[row] - timeline.start_ns[row]) * scale
        right = left + max(width - 0.8 if width > _BORDERED else width, 0.5)
        colour = shaded(kind_colour(KINDS[kind].name), float(shades[row]))
        last = blocks[lane][-1] if blocks[lane] else None
        if last is not None and width <= _BORDERED and not last.text:
            if last.colour == colour and left - last.right < 1.0:
                last.right = max(last.right, right)
                continue
            if width < 1.0 and left < last.right:
                continue
        text = _fitting(kind, int(timeline.stage[row]), int(timeline.micro_batch[row]), width)
        blocks[lane].append(_DrawnBlock(left, right, colour, text))
    return blocks


def _drawn(blocks: Sequence[Sequence[_DrawnBlock]], lanes: tuple[Lane, ...], tops: list[int]) -> str:
    """Draw the blocks, those of one lane and colour as one path, and the texts on them."""
    paths: dict[tuple[int, str], list[str]] = defaultdict(list)
    texts = []
    for place, (lane, top) in enumerate(zip(lanes, tops, strict=False)):
        height = _lane_height(lane)
        for one in blocks[place]:
            width = one.right - one.left
            paths[place, one.colour].append(f"M{one.left:.1f} {top}h{width:.1f}v{height}h-{width:.1f}z")
            if one.text and height == _LANE:
                texts.append(f'<text x="{one.left + width / 2:.1f}" y="{top + 17}">{one.text}</text>')
    drawn = (f'<path fill="{colour}" d="{"".join(some)}"/>' for (_, colour), some in paths.items())
    return f'{"".join(drawn)}<g class="weft-blocks">{"".join(texts)}</g>'


def _fitting(kind: int, stage: int, micro_batch: int, width: float) -> str:
    """Return the micro-batch, or the label of an instruction without one; empty without room for it."""
    text = str(micro_batch) if micro_batch >= 0 else label(kind, stage, micro_batch)
    return text if len(text) * _LETTER + 3 <= width else ""


def _legend(timeline: Timeline, notes: str, y: int) -> str:
    x = float(_GUTTER)
    parts = []
    for code in np.unique(timeline.kind[timeline.end_ns > timeline.start_ns]).tolist():
        name, colour = KINDS[code].words, kind_colour(KINDS[code].name)
        parts.append(
            f'<rect x="{x:.0f}" y="{y - 10}" width="11" height="11" rx="2" fill="{colour}"/>'
            f'<text class="weft-soft" x="{x + 16:.0f}" y="{y}">{escape(name)}</text>'
        )
        x += 34 + len(name) * _LETTER
    if notes:
        parts.append(f'<text class="weft-soft" x="{_GUTTER}" y="{y + _LINE}">{escape(notes)}</text>')
    return "".join(parts)
