"""Cutting the passes of a lowered pipeline into segments, with the collectives between them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from weft.program.arrays import Ints
from weft.program.kinds import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    KINDS,
    is_any_of,
    kinds_reading,
)
from weft.program.lower import LoweredPipeline
from weft.program.passes.insert import insert
from weft.program.program import Columns, Edges
from weft.program.segments import (
    ADDS_GRADIENTS,
    BACKWARD_SEGMENT,
    FORWARD_SEGMENT,
    INPUT_SEGMENT,
    SEGMENTS,
    WEIGHT_SEGMENT,
    Border,
    StageSegments,
)
from weft.program.values import VALUES


class _Link(NamedTuple):
    """A row before a pass's own row; `after` is the index of the earlier link it follows, -1 for none."""

    kind: int
    part: int
    after: int
    bytes: int = 0
    most_bytes: int = 0


def cut(pipeline: LoweredPipeline, segments: Sequence[StageSegments]) -> LoweredPipeline:
    """Return the pipeline with segments and collectives before each pass of a stage that has borders.

    The first segment of a pass waits for everything that the pass waits for. Readers of a gradient wait for
    all segments that add to it. Run it after all method passes that read forwards and backwards.
    An input part is cut like a whole backward pass. The weight part stays whole, and follows its segments.
    """
    columns = pipeline.columns
    added: list[Columns] = []
    anchors: list[Ints] = []
    turns: list[Ints] = []
    edges: list[Edges] = []
    present = len(columns)
    for stage, one in enumerate(segments):
        inputs = _backward(one, inputs=True)
        for kind, links in ((FORWARD, _forward(one)), (BACKWARD, _backward(one)), (BACKWARD_INPUT, inputs)):
            rows = np.flatnonzero((columns.kind == kind) & (columns.stage == stage))
            if not links or not len(rows):
                continue
            first = present + sum(map(len, added))
            chain = first + np.arange(len(links) * len(rows), dtype=np.int64).reshape(len(links), -1)
            added += [_rows(columns, rows, link) for link in links]
            anchors += [rows] * len(links)
            turns += [np.full(len(rows), turn - len(links), dtype=np.int64) for turn in range(len(links))]
            edges += _edges(pipeline, rows, chain, links)
    if not added:
        return pipeline
    joined = Columns.join(added)
    return insert(pipeline, joined, np.concatenate(anchors), np.concatenate(turns), Edges.join(edges))


def _forward(segments: StageSegments) -> list[_Link]:
    links: list[_Link] = []
    for part, border in enumerate(segments.forward):
        links.append(_Link(FORWARD_SEGMENT, part, len(links) - 1))
        links.append(_collective(border, part, len(links) - 1))
    return links


def _backward(segments: StageSegments, *, inputs: bool = False) -> list[_Link]:
    """Return links from the last segment to the second; a weight part follows its overlapping collective.

    `inputs`: the pass is the input part alone.
    """
    links: list[_Link] = []
    crossed = -1
    for part in range(len(segments.backward), 0, -1):
        apart = segments.split[part]
        links.append(_Link(INPUT_SEGMENT if apart or inputs else BACKWARD_SEGMENT, part, crossed))
        segment = len(links) - 1
        links.append(_collective(segments.backward[part - 1], part - 1, segment))
        crossed = len(links) - 1
        if apart and not inputs:
            links.append(_Link(WEIGHT_SEGMENT, part, segment))
    return links


def _collective(border: Border, part: int, after: int) -> _Link:
    return _Link(border.kind, part, after, border.bytes, border.most_bytes)


def _rows(columns: Columns, rows: Ints, link: _Link) -> Columns:
    return Columns.of(
        len(rows),
        kind=link.kind,
        stage=columns.stage[rows],
        micro_batch=columns.micro_batch[rows],
        iteration=columns.iteration[rows],
        rank=columns.rank[rows],
        replica=columns.replica[rows],
        part=link.part,
        bytes=link.bytes,
        most_bytes=link.most_bytes,
    )


def _edges(pipeline: LoweredPipeline, rows: Ints, chain: Ints, links: Sequence[_Link]) -> Iterator[Edges]:
    """Yield the edges of the chains before `rows`; `chain` has the chains' rows, shape (links, rows)."""
    for number, link in enumerate(links):
        if link.after >= 0:
            yield Edges.of(chain[link.after], chain[number])
    last = max(number for number, link in enumerate(links) if link.kind not in SEGMENTS)
    yield Edges.of(chain[last], rows)
    edges = pipeline.edges
    row_of = np.full(len(pipeline.columns), -1, dtype=np.int64)
    row_of[rows] = chain[0]
    into = row_of[edges.target] >= 0
    yield Edges.of(edges.source[into], row_of[edges.target[into]], edges.distance[into])
    # They read the gradient that segments add up, or have taken the one before out of its place.
    reads = is_any_of(pipeline.columns.kind, [one for name in _added_up() for one in kinds_reading(name)])
    weights = pipeline.columns.kind[edges.target] == BACKWARD_WEIGHT
    for number, link in enumerate(links):
        if link.kind == INPUT_SEGMENT:
            row_of[rows] = chain[number]
            parts = (row_of[edges.source] >= 0) & weights
            yield Edges.of(row_of[edges.source[parts]], edges.target[parts], edges.distance[parts])
        if link.kind in ADDS_GRADIENTS:
            row_of[rows] = chain[number]
            behind = (row_of[edges.source] >= 0) & reads[edges.target]
            yield Edges.of(row_of[edges.source[behind]], edges.target[behind], edges.distance[behind])
            before = (row_of[edges.target] >= 0) & reads[edges.source] & (number > 0)
            yield Edges.of(edges.source[before], row_of[edges.target[before]], edges.distance[before])


def _added_up() -> list[str]:
    """Return the values to which backward passes add."""
    return [use.value for use in KINDS[BACKWARD].all_writes if VALUES[use.value].accumulates]
