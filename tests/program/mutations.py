"""Broken copies of programs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from weft.program.program import COLUMN_NAMES, Columns, Edges, Program

Rows = npt.NDArray[np.int64]


def reorder(program: Program, order: Rows) -> Program:
    """The rows in another order; edges follow."""
    position = np.empty(len(program), dtype=np.int64)
    position[order] = np.arange(len(program))
    edges = program.edges
    return replace(
        program,
        columns=program.columns.take(order),
        edges=replace(edges, source=position[edges.source], target=position[edges.target]),
    )


def swap(program: Program, one: int, two: int) -> Program:
    order = np.arange(len(program))
    order[[one, two]] = order[[two, one]]
    return reorder(program, order)


def without_row(program: Program, row: int) -> Program:
    """One instruction less, and its edges."""
    kept = np.delete(np.arange(len(program)), row)
    edges = program.edges
    touched = (edges.source == row) | (edges.target == row)
    return replace(
        program,
        columns=program.columns.take(kept),
        edges=Edges(
            source=edges.source[~touched] - (edges.source[~touched] > row),
            target=edges.target[~touched] - (edges.target[~touched] > row),
            distance=edges.distance[~touched],
        ),
    )


def without_edge(program: Program, edge: int) -> Program:
    edges = program.edges
    return replace(
        program,
        edges=Edges(
            source=np.delete(edges.source, edge),
            target=np.delete(edges.target, edge),
            distance=np.delete(edges.distance, edge),
        ),
    )


def with_edge(program: Program, source: int, target: int) -> Program:
    return replace(program, edges=Edges.join([program.edges, Edges.of([source], [target])]))


def twice(program: Program, row: int) -> Program:
    """One instruction occurs a second time, right after the first, with edges of its own."""
    order = np.insert(np.arange(len(program)), row + 1, row)
    edges = program.edges
    source, target = edges.source + (edges.source > row), edges.target + (edges.target > row)
    out, into = edges.source == row, edges.target == row
    copies = Edges(
        source=np.concatenate([np.full(int(out.sum()), row + 1), source[into]]),
        target=np.concatenate([target[out], np.full(int(into.sum()), row + 1)]),
        distance=np.concatenate([edges.distance[out], edges.distance[into]]),
    )
    first = Edges(source=source, target=target, distance=edges.distance)
    return replace(program, columns=program.columns.take(order), edges=Edges.join([first, copies]))


def with_value(program: Program, column: str, row: int, value: int) -> Program:
    """One cell changed; the rows are sorted by rank again."""
    values = {name: getattr(program.columns, name).copy() for name in COLUMN_NAMES}
    values[column][row] = value
    changed = replace(program, columns=Columns(**values))
    return reorder(changed, np.argsort(values["rank"], kind="stable"))


def moved(program: Program, row: int, place: int) -> Program:
    """One instruction at the place of another one."""
    return reorder(program, np.insert(np.delete(np.arange(len(program)), row), place, row))


def with_row(program: Program, like: int, place: int, **values: int) -> Program:
    """One instruction more at `place`, which has the coordinates of `like` but for `values`, and no edges."""
    order = np.insert(np.arange(len(program)), place, like)
    columns = program.columns.take(order)
    changed = {name: getattr(columns, name).copy() for name in values}
    for name, value in values.items():
        changed[name][place] = value
    edges = program.edges
    return replace(
        program,
        columns=replace(columns, **changed),
        edges=replace(
            edges,
            source=edges.source + (edges.source >= place),
            target=edges.target + (edges.target >= place),
        ),
    )


def missing_and_doubled(program: Program, data: st.DataObject) -> Iterator[Program]:
    """Yield the program without any one of its rows, with this row twice, and without any one edge."""
    row = data.draw(st.integers(0, len(program) - 1))
    yield without_row(program, row)
    yield twice(program, row)
    edges = np.flatnonzero(program.edges.distance == 0)
    yield without_edge(program, int(data.draw(st.sampled_from(edges.tolist()))))
