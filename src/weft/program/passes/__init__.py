"""Passes: the additions of methods to a lowered pipeline, and a program's obligations to the methods.

A pass works on one lowered pipeline, with devices in place of ranks, and does not change the computations. It
first works on the pipeline of one step, then on the pipeline of a cycle of repeated steps. A method
contributes its pass (`weft.bundles`). The pass has the groups of its collectives, the program's obligations
to the method, and the check that proves them. The compiler and the verifier know passes and no method.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from graphlib import CycleError, TopologicalSorter
from math import lcm
from typing import Any, Generic, TypeVar

import numpy as np

from weft.bundles import parts
from weft.describe.layer_graph import LayerGraph
from weft.describe.plan import Plan
from weft.describe.plan_file import unknown_methods
from weft.errors import InputError, Violation, nearest
from weft.program.arrays import Ints
from weft.program.kinds import is_any_of
from weft.program.layout import PipelineLayout
from weft.program.lower import LoweredPipeline, renumber
from weft.program.program import NONE, Columns, Edges, GroupKin, Groups, Owed, Program


def repeated(pipeline: LoweredPipeline, steps: int) -> LoweredPipeline:
    """Return the pipeline of one step as a cycle of `steps`, sorted by device, then by step.

    An edge of distance d leads from step i of the cycle to step `(i + d) mod steps`, `(i + d) div steps`
    cycles later.
    """
    if steps == 1:
        return pipeline
    columns, edges = pipeline.columns, pipeline.edges
    rows = len(columns)
    iteration = np.repeat(np.arange(steps, dtype=np.int64), rows)
    copies = replace(Columns.join([columns] * steps), iteration=iteration)
    # A stable sort: rows of one device and step keep their order.
    order = np.lexsort((copies.iteration, copies.rank))
    source, target, distance = (np.tile(one, steps) for one in (edges.source, edges.target, edges.distance))
    step = np.repeat(np.arange(steps, dtype=np.int64), len(edges))
    later = step + distance
    reaching = Edges.of(source + step * rows, target + later % steps * rows, later // steps)
    return LoweredPipeline(copies.take(order), renumber(reaching, order))


Options = TypeVar("Options")
# From a plan to its program and the Simulation of a cycle, typed Any: its room is above this one.
PredictStep = Callable[[Plan], tuple[Program, Any]]

# The most steps of a cycle. Its instructions are all in memory, and a simulation runs whole cycles.
MOST_STEPS = 4096


@dataclass(frozen=True, kw_only=True)
class GroupTable:
    """Groups of ranks for the collectives of some kinds.

    Attributes:
        kinds: codes of the kinds.
        groups: the ranks of each group.
        by: the columns that select the group of an instruction; `iteration` counts in the method's own cycle.
        table: index of the group, -1 for none; shape (sizes of `by` in their order, lanes).
    """

    kinds: tuple[int, ...]
    groups: Groups
    by: tuple[str, ...]
    table: Ints

    def numbered_from(self, first: int) -> GroupTable:
        """Return the table whose group 0 has the number `first`."""
        return replace(self, table=np.where(self.table == NONE, NONE, self.table + first))


@dataclass(frozen=True, kw_only=True)
class Pass(Generic[Options]):
    """A method's changes of programs; `Options` is the type of its options.

    Attributes:
        name: name of the method.
        options: returns a plan's options for the method; None: the pass does not run.
        apply: returns the pipeline of one step with the method's rows and edges.
        cycle: returns the steps in a cycle of the method; a program's cycle is their least common multiple.
        apply_to_cycle: returns the pipeline of a whole cycle with the method's rows and edges.
        taken: returns, by replica, the steps of the method's cycle that it takes; None: all of them.
        default: the options of programs that are built without a plan.
        after: methods with passes that come before this one.
        last: True: the pass comes after all passes that are not last.
        evaluates: True: the pass runs in forward-only programs, too.
        deals: True: the pass runs where stages have unlike numbers of replicas.
        mixes_lanes: True: the pass runs where stages have unlike numbers of ranks in each replica.
        mixes_replicas: True: the pass runs where replicas of one stage have.
        refuse: returns the violations of a layout, given the options of all methods by name.
        beside: returns the rows of ranks that hold no stage, for one step of a pipeline with all passes, and
            their edges among themselves; `rank` is the rank itself.
        groups: returns the groups of its collectives; groups of a program are numbered in this order.
        owes: returns the program's obligations to the method. None: there are none, and the method has no
            state at run time.
        check: returns the violations in a program, given its obligations to the method or None.
        decide: returns the plan with the method's decisions in its options. It may predict the step of any
            plan; None: the method decides nothing. See `weft.planning.planned`.
    """

    name: str
    options: Callable[[Plan, LayerGraph], Options | None]
    apply: Callable[[LoweredPipeline, PipelineLayout, Options], LoweredPipeline] = (
        lambda pipeline, layout, options: pipeline
    )
    cycle: Callable[[Options], int] = lambda options: 1
    apply_to_cycle: Callable[[LoweredPipeline, PipelineLayout, Options], LoweredPipeline] = (
        lambda pipeline, layout, options: pipeline
    )
    taken: Callable[[Options], Sequence[Sequence[int]] | None] = lambda options: None
    default: Options | None = None
    after: tuple[str, ...] = ()
    last: bool = False
    evaluates: bool = False
    deals: bool = False
    mixes_lanes: bool = False
    mixes_replicas: bool = False
    refuse: Callable[[PipelineLayout, Options, Mapping[str, Any]], Sequence[Violation]] = (
        lambda layout, options, others: ()
    )
    beside: Callable[[LoweredPipeline, PipelineLayout, Options], LoweredPipeline] | None = None
    groups: Callable[[PipelineLayout, Options], Sequence[GroupTable]] = lambda *_: ()
    owes: Callable[[PipelineLayout, Options], Owed | None] = lambda *_: Owed()
    check: Callable[[Program, Any], Sequence[Violation]] = lambda *_: ()
    decide: Callable[[Plan, LayerGraph, PredictStep], Plan] | None = None


@cache
def ordered_passes() -> tuple[Pass[Any], ...]:
    """Return all passes in the order that they declare, otherwise by name.

    Raises:
        InputError: when passes wait for each other.
    """
    known = {one.name: one for one in sorted(parts(Pass), key=lambda one: one.name)}
    early = [name for name, one in known.items() if not one.last]
    sorter = TopologicalSorter(
        {
            name: [*(n for n in one.after if n in known), *(early if one.last else ())]
            for name, one in known.items()
        }
    )
    try:
        return tuple(known[name] for name in sorter.static_order())
    except CycleError as error:
        names = " and ".join(sorted(set(error.args[1])))
        raise InputError(Violation("methods", f"the passes of {names} wait for each other")) from None


def options_of(plan: Plan, graph: LayerGraph) -> dict[str, Any]:
    """Return a plan's options for each method, by name; methods that do not run are left out.

    Raises:
        InputError: when the plan names a method that this installation lacks.
    """
    if unknown := list(unknown_methods(plan)):
        raise InputError(unknown)
    found = {one.name: one.options(plan, graph) for one in parts(Pass)}
    return {name: options for name, options in found.items() if options is not None}


@dataclass(frozen=True)
class PassList:
    """The passes of one program, in order, each with its options."""

    passes: tuple[tuple[Pass[Any], Any], ...]

    @classmethod
    def of(cls, methods: Mapping[str, Any], layout: PipelineLayout, *, trains: bool) -> PassList:
        """Choose the passes for the options of methods, given by name.

        Raises:
            InputError: for a method that nobody contributes, and for options that do not fit the layout.
        """
        ordered = ordered_passes()
        names = [one.name for one in ordered]
        problems = [
            Violation("methods", f"{name!r} is not one of {', '.join(names)}", nearest(name, names))
            for name in methods
            if name not in names
        ]
        defaults = {one.name: one.default for one in ordered if one.default is not None}
        options = {**defaults, **methods}
        chosen = tuple(
            (one, options[one.name]) for one in ordered if one.name in options and (trains or one.evaluates)
        )
        unfit = [
            Violation(one.name, f"does not run where stages have unlike numbers of {named}", nearby)
            for one, _ in chosen
            for uneven, named, nearby in (
                (layout.deals and not one.deals, "replicas", "equally many replicas of every stage"),
                (layout.mixes_lanes and not one.mixes_lanes, "ranks", "one tensor degree"),
                (
                    layout.mixes_replicas and one.mixes_lanes and not one.mixes_replicas,
                    "ranks in their replicas",
                    "replicas of one tensor degree",
                ),
            )
            if uneven
        ]
        problems += unfit
        if not unfit:
            problems += [problem for one, what in chosen for problem in one.refuse(layout, what, options)]
        if problems:
            raise InputError(problems)
        return cls(chosen)

    @property
    def steps_per_cycle(self) -> int:
        """The fewest steps after which the cycles of all methods end.

        Raises:
            InputError: if they are more than `MOST_STEPS`.
        """
        steps = lcm(*(one.cycle(options) for one, options in self.passes))
        if steps > MOST_STEPS:
            problem = f"the cycles of all methods end after {steps} steps; a program has at most {MOST_STEPS}"
            raise InputError(Violation("methods", problem, str(MOST_STEPS)))
        return steps

    def taken(self, layout: PipelineLayout) -> tuple[tuple[int, ...], ...]:
        """Return, by pipeline, the steps of a cycle that it takes."""
        steps = [tuple(range(self.steps_per_cycle))] * layout.pipelines
        for method, options in self.passes:
            by_replica, cycle = method.taken(options), method.cycle(options)
            if by_replica is not None:
                of_pipeline = map(frozenset, by_replica[:: layout.paths])
                steps = [
                    tuple(step for step in mine if step % cycle in own)
                    for mine, own in zip(steps, of_pipeline, strict=True)
                ]
        return tuple(steps)

    def apply(
        self, pipeline: LoweredPipeline, layout: PipelineLayout, taken: Sequence[int]
    ) -> LoweredPipeline:
        """Apply all passes to the pipeline of one step and return its pipeline of a cycle.

        It has the steps in `taken` only, and each of them follows the one before in `taken`.
        """
        for one, options in self.passes:
            pipeline = one.apply(pipeline, layout, options)
        columns, edges = repeated(pipeline, len(taken))
        number = np.array(taken, dtype=np.int64)[columns.iteration]
        pipeline = LoweredPipeline(replace(columns, iteration=number), edges)
        for one, options in self.passes:
            pipeline = one.apply_to_cycle(pipeline, layout, options)
        return pipeline

    def beside(self, pipeline: LoweredPipeline, layout: PipelineLayout) -> LoweredPipeline:
        """Return the rows of ranks that hold no stage in a cycle, sorted by rank.

        `pipeline` is any with all passes; `rank` is the rank itself, in place of a device.
        """
        passes = self.passes if layout.servers else ()
        each = (one.beside(pipeline, layout, options) for one, options in passes if one.beside)
        none = LoweredPipeline(Columns.of(0), Edges.of([], []))
        return repeated(next(each, none), self.steps_per_cycle)

    def owed(self, layout: PipelineLayout) -> dict[str, Owed]:
        """Return a program's obligations to each method, by name."""
        found = {one.name: one.owes(layout, options) for one, options in self.passes}
        return {name: owed for name, owed in found.items() if owed is not None}

    def groups(self, layout: PipelineLayout) -> ProgramGroups:
        """Return the groups of all passes, numbered in the order of the passes."""
        tables: list[GroupTable] = []
        first = 0
        for method, options in self.passes:
            for one in method.groups(layout, options):
                tables.append(one.numbered_from(first))
                first += len(one.groups)
        return ProgramGroups(tuple(tables))


@dataclass(frozen=True)
class ProgramGroups:
    """The groups of a program, and the tables that assign them to instructions."""

    tables: tuple[GroupTable, ...] = field(default=())

    @property
    def groups(self) -> Groups:
        return tuple(group for one in self.tables for group in one.groups)

    def members(self, numbers: Ints) -> dict[int, tuple[int, ...]]:
        """Return the ranks of the groups with these numbers; -1 is left out."""
        groups = self.groups
        return {number: groups[number] for number in numbers.tolist() if number != NONE}

    def of(self, columns: Columns, lane: Ints) -> Ints:
        """Return the group of each row, -1 for none; `lane` is by row, shape (rows,)."""
        group = np.full(len(columns), NONE, dtype=np.int64)
        for one in self.tables:
            rows = np.flatnonzero(is_any_of(columns.kind, one.kinds))
            places = {name: getattr(columns, name)[rows] for name in one.by}
            if "iteration" in places:
                places["iteration"] %= one.table.shape[one.by.index("iteration")]
            group[rows] = one.table[(*places.values(), lane[rows])]
        return group

    @property
    def kin(self) -> GroupKin:
        """The corresponding groups of replicas and lanes."""
        by_replica = tuple(
            np.moveaxis(one.table, one.by.index("replica"), -1) for one in self.tables if "replica" in one.by
        )
        return GroupKin(len(self.groups), by_replica, tuple(one.table for one in self.tables))


def stage_groups(kinds: tuple[int, ...], layout: PipelineLayout, *, apart: bool = False) -> GroupTable:
    """Build a group of all ranks of each stage; `apart`: of the ranks of each of its replicas.

    Stages on the same ranks share groups. All replicas have equally many ranks.
    """
    numbers: dict[tuple[int, ...], int] = {}
    lanes = len(layout.stages[0].replicas[0])
    table = np.zeros((len(layout.stages), layout.replicas, lanes), dtype=np.int64)
    for index, stage in enumerate(layout.stages):
        everyone = tuple(sorted(rank for ranks in stage.replicas for rank in ranks))
        for replica, ranks in enumerate(stage.replicas):
            table[index, replica] = numbers.setdefault(ranks if apart else everyone, len(numbers))
    return GroupTable(kinds=kinds, groups=tuple(numbers), by=("stage", "replica"), table=table)


def replica_groups(
    kinds: tuple[int, ...], layout: PipelineLayout, parts: Sequence[Sequence[Sequence[int]]]
) -> GroupTable:
    """Build a group for each lane of each part of a stage's replicas; `parts` lists these replicas by stage.

    Stages on the same ranks share groups; a replica in no part has no group. Of unlike replicas, the lanes
    are those of the widest. A narrower replica has the rank there that holds this lane's shard.
    """
    numbers: dict[bytes, int] = {}
    first_on: dict[tuple[tuple[int, ...], ...], int] = {}
    groups: list[tuple[int, ...]] = []
    size = len(layout.stages), layout.most_replicas, layout.most_lanes
    table = np.full(size, NONE, dtype=np.int64)
    for index, ranks in enumerate(layout.rank_tables):
        first = first_on.setdefault(layout.stages[index].replicas, index)
        if first < index and parts[first] == parts[index]:
            table[index] = table[first]
            continue
        for replicas in map(list, parts[index]):
            for lane in range(layout.lanes[index]):
                own = lane * layout.stages[index].widths[replicas] // layout.lanes[index]
                group = ranks[replicas, own]
                number = numbers.setdefault(np.sort(group).tobytes(), len(groups))
                if number == len(groups):
                    groups.append(tuple(group.tolist()))
                table[index, replicas, lane] = number
    return GroupTable(kinds=kinds, groups=tuple(groups), by=("stage", "replica"), table=table)
