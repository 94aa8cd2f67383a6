"""The best placement of few operators, by a mixed-integer program, to compare others with."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

import numpy as np

from weft.describe.one_line import one_line
from weft.errors import InputError, Violation
from weft.planning.placement.board import Placement
from weft.planning.placement.bounds import lower_bound_ticks
from weft.planning.placement.graph import Devices, OperatorGraph, topological_order
from weft.planning.placement.heft import heterogeneous_earliest_finish
from weft.planning.placement.linear_program import LinearProgram
from weft.planning.placement.list_scheduler import earliest_task_first
from weft.planning.placement.verification import scheduled
from weft.program.arrays import Floats, Ints

MOST_OPERATORS = 12


@dataclass(frozen=True, kw_only=True)
class Exact:
    """A placement, and whether it is proved that none has a smaller makespan."""

    placement: Placement
    proved: bool

    def __repr__(self) -> str:
        return one_line(self, f"{self.placement.makespan} ticks")


def exact(graph: OperatorGraph, devices: Devices, *, seconds: float = 60.0) -> Exact:
    """Return the best placement with parallel transfers that is found within some seconds.

    Raises:
        InputError: when there are too many operators, transfers queue, or none is found.
    """
    if graph.operators > MOST_OPERATORS:
        problem = f"exact places up to {MOST_OPERATORS} operators, not {graph.operators}"
        raise InputError(Violation("placer", problem, str(MOST_OPERATORS)))
    if devices.communication != "parallel":
        problem = f"exact places for parallel transfers, not {devices.communication} ones"
        raise InputError(Violation("communication", problem, "parallel"))
    known = _heuristic(graph, devices)
    if known is not None and known.makespan <= lower_bound_ticks(graph):
        return Exact(placement=known, proved=True)
    columns = _Columns(graph, devices)
    horizon = _longest(graph, devices) if known is None else float(known.makespan)
    solution = _program(graph, devices, columns, horizon).minimum(columns.costs, seconds)
    if solution is None and known is None:
        problem = f"exact finds no placement that fits, within {seconds:g} s"
        raise InputError(Violation("placement", problem))
    if solution is not None:
        chosen = solution.columns[columns.places].argmax(axis=1)[columns.group]
        sequence = topological_order(graph.operators, graph.edges, solution.columns[columns.starts])
        solved = scheduled(graph, devices, chosen, sequence)
        if known is None or solved.makespan < known.makespan:
            known = solved
    assert known is not None, "there is one or the other"
    return Exact(placement=known, proved=solution is not None and solution.proved)


def _heuristic(graph: OperatorGraph, devices: Devices) -> Placement | None:
    """Return the better placement of m-ETF and HEFT; None if neither has one."""
    found = []
    for placer in (earliest_task_first, heterogeneous_earliest_finish):
        try:
            found.append(placer(graph, devices))
        except InputError:
            continue
    return min(found, key=lambda one: one.makespan, default=None)


def _longest(graph: OperatorGraph, devices: Devices) -> float:
    """Return the ticks of all work and all transfers one after the other."""
    transfers = devices.latency_ticks.max() + graph.tensor_bytes * devices.ticks_per_byte.max()
    return float(graph.ticks.max(axis=1).sum() + np.ceil(transfers).sum())


class _Columns:
    """The numbers of columns.

    Attributes:
        group: of each operator, from 0, shape (operators,).
        places: 1 if a group is on a device, shape (groups, devices).
        before: 1 if the first of two operators without a path between them runs first, shape (pairs,).
        arrives: 1 if a tensor is sent to a device, shape (tensors, devices).
        starts: shape (operators,), in units of `horizon` ticks.
        taken: the largest temporary bytes of a device, shape (devices,).
        makespan: one column.
    """

    def __init__(self, graph: OperatorGraph, devices: Devices) -> None:
        self.group: Ints = np.unique(graph.groups, return_inverse=True)[1]
        self.pairs = _unordered(graph)
        count = devices.count
        shapes = [
            (int(self.group.max(initial=-1)) + 1, count),
            (len(self.pairs),),
            (len(graph.producer), count),
            (graph.operators,),
            (count,),
            (1,),
        ]
        ends = np.cumsum([0, *(int(np.prod(shape)) for shape in shapes)])
        parts = [
            np.arange(first, first + int(np.prod(shape))).reshape(shape)
            for first, shape in zip(ends[:-1].tolist(), shapes, strict=True)
        ]
        self.places, self.before, self.arrives, self.starts, self.taken, makespan = parts
        self.makespan, self.count = int(makespan[0]), int(ends[-1])

    @property
    def costs(self) -> Floats:
        found = np.zeros(self.count)
        found[self.makespan] = 1.0
        return found


def _unordered(graph: OperatorGraph) -> list[tuple[int, int]]:
    """Return pairs of operators without a path between them."""
    reached = [{one} for one in range(graph.operators)]
    for operator in reversed(range(graph.operators)):
        reached[operator].update(*(reached[one] for one in graph.successors[operator]))
    return [pair for pair in combinations(range(graph.operators), 2) if pair[1] not in reached[pair[0]]]


def _program(graph: OperatorGraph, devices: Devices, columns: _Columns, horizon: float) -> LinearProgram:
    rows = _Rows(columns)
    _add_places(graph, devices, columns, rows)
    _add_times(graph, devices, columns, rows, horizon)
    most = np.ones(columns.count)
    most[columns.taken] = np.inf
    whole = np.concatenate([columns.places.ravel(), columns.before]).astype(np.int32)
    program = LinearProgram(most=most, whole=whole)
    rows.enter(program)
    return program


def _add_places(graph: OperatorGraph, devices: Devices, columns: _Columns, rows: _Rows) -> None:
    """Add rows of devices: each group has one, with the memory for all that stays and arrives there."""
    for places in columns.places:
        rows.add([(column, 1.0) for column in places], 1.0)
        rows.add([(column, -1.0) for column in places], -1.0)
    for device, memory in enumerate(devices.memory_bytes.tolist()):
        scale = 1.0 / max(memory, 1)
        terms = [(columns.taken[device], -1.0)]
        for operator, group in enumerate(columns.group):
            place = columns.places[group, device]
            terms.append((place, -scale * graph.permanent_bytes[operator]))
            rows.add([(columns.taken[device], 1.0), (place, -scale * graph.temporary_bytes[operator])], 0.0)
        sizes = graph.tensor_bytes * scale
        terms += [(columns.arrives[one, device], -size) for one, size in enumerate(sizes)]
        rows.add(terms, -1.0 if memory else 0.0)
        for tensor, reader in graph.reads:
            made = columns.places[columns.group[graph.producer[tensor]], device]
            read = columns.places[columns.group[reader], device]
            if made != read:
                rows.add([(columns.arrives[tensor, device], 1.0), (read, -1.0), (made, 1.0)], 0.0)


def _add_times(
    graph: OperatorGraph, devices: Devices, columns: _Columns, rows: _Rows, horizon: float
) -> None:
    """Add rows of starts: behind what is read and its transfers, and not side by side on a device."""
    ticks = graph.ticks / horizon
    own = [
        [(place, -took) for place, took in zip(columns.places[group], ticks[operator], strict=True)]
        for operator, group in enumerate(columns.group)
    ]
    for device in range(devices.count):
        # Implied by the others; without it, a proof for independent operators takes minutes.
        work = [
            (columns.places[group, device], -ticks[one, device]) for one, group in enumerate(columns.group)
        ]
        rows.add([(columns.makespan, 1.0), *work], 0.0)
    for operator, start in enumerate(columns.starts):
        rows.add([(columns.makespan, 1.0), (start, -1.0), *own[operator]], 0.0)
    for tensor, reader in graph.reads:
        made = graph.producer[tensor]
        behind = [(columns.starts[reader], 1.0), (columns.starts[made], -1.0), *own[made]]
        rows.add(behind, 0.0)
        for source, target in np.argwhere(~np.eye(devices.count, dtype=np.bool_)):
            size, link = graph.tensor_bytes[tensor], (source, target)
            took = round(devices.latency_ticks[link] + size * devices.ticks_per_byte[link]) / horizon
            if columns.group[made] != columns.group[reader]:
                sent = (columns.places[columns.group[made], source], -took)
                read = (columns.places[columns.group[reader], target], -took)
                rows.add([*behind, sent, read], -took)
    for before, (first, second) in zip(columns.before, columns.pairs, strict=True):
        for device in range(devices.count):
            ends = [columns.places[columns.group[one], device] for one in (first, second)]
            for one, other, sign, least in ((first, second, -1.0, -3.0), (second, first, 1.0, -2.0)):
                terms = [(columns.starts[other], 1.0), (columns.starts[one], -1.0), *own[one]]
                rows.add([*terms, (before, sign), *((end, -1.0) for end in ends)], least)


class _Rows:
    """Rows of a program: (column, value) pairs with their least sum; values of a column add up."""

    def __init__(self, columns: _Columns) -> None:
        self._count = columns.count
        self._rows: list[tuple[dict[int, float], float]] = []

    def add(self, terms: list[tuple[int, float]], least: float) -> None:
        row: dict[int, float] = {}
        for column, value in terms:
            row[int(column)] = row.get(int(column), 0.0) + float(value)
        self._rows.append((row, least))

    def enter(self, program: LinearProgram) -> None:
        for row, least in self._rows:
            columns, values = np.array([*row]), np.array([*row.values()])
            program.require(columns[None], values[None], np.array([least]))
