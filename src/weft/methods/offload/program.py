"""The copies to and from host memory of a device, and the places where memory is freed and taken.

Activations of a micro-batch are stored after its forward pass and loaded before its backward pass. The copy
back overlaps the computation before that pass: the prefetch distance is one. The device frees the memory one
computation after the forward pass, and waits for a late copy. So a device holds the activations of few
micro-batches over a link of any speed. Micro-batches with an early backward pass stay.

States are loaded during the device's last computation of a step, and stored after the stage's step. Ren et
al. (ZeRO-Offload, arXiv 2101.06840) move them, too, but compute on the host. A device with several stages has
the states of two of them at a time. The last two are freed after the first computation of the next step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from weft.describe.layer_graph import LayerGraph
from weft.describe.plan import Plan
from weft.errors import InputError, Violation
from weft.methods.offload.kinds import (
    LOAD_ACTIVATIONS,
    LOAD_STATES,
    RELEASE,
    ROOM,
    STORE_ACTIVATIONS,
    STORE_STATES,
    Offloads,
)
from weft.methods.offload.options import NAME, Offloaded, offloaded, problems_of
from weft.methods.offload.sizes import activation_bytes, state_bytes
from weft.methods.offload.verify import RESIDENT_STATES, check_offload, leave
from weft.program.arrays import Ints
from weft.program.kinds import STEP, is_any_of, is_compute
from weft.program.layout import PipelineLayout
from weft.program.lower import LoweredPipeline
from weft.program.passes import Pass
from weft.program.passes.cutting import refuse_cut
from weft.program.passes.insert import after_sends, insert
from weft.program.program import NONE, Columns, Edges

# The order of rows at one place.
_RELEASE, _ROOM, _LOAD, _STORE = range(1, 5)


@dataclass(frozen=True, slots=True)
class OffloadOptions:
    """The offloaded stages, and each stage's bytes of states, and of activations of one micro-batch."""

    stages: Offloaded
    state_bytes: tuple[int, ...]
    activation_bytes: tuple[int, ...]


def options(plan: Plan, graph: LayerGraph) -> OffloadOptions | None:
    if plan.method(NAME) is None:
        return None
    recomputes = [stage.recompute for stage in plan.stages]
    if problems := list(problems_of(plan.methods, recomputes, plan.optimizer)):
        raise InputError(problems)
    stages = range(len(plan.stages))
    return OffloadOptions(
        offloaded(plan.methods, len(stages)),
        tuple(state_bytes(plan, graph, stage) for stage in stages),
        tuple(activation_bytes(plan, graph, stage) for stage in stages),
    )


def refuse(layout: PipelineLayout, options: OffloadOptions, others: Mapping[str, Any]) -> list[Violation]:
    if not options.stages.activations:
        return []
    return refuse_cut(f"{NAME}.activations", "hand their graphs on, which stay on the device", others)


def owes(layout: PipelineLayout, options: OffloadOptions) -> Offloads:
    return Offloads(states=options.stages.states, activations=options.stages.activations)


@dataclass(slots=True)
class _AddedCopies:
    """New rows (kind, stage, replica, micro-batch, anchor, turn) and edges (source, target, distance).

    In edges, new row i is -1 - i until the rows are inserted.
    """

    rows: list[tuple[int, int, int, int, int, int]] = field(default_factory=list)
    edges: list[tuple[int, int, int]] = field(default_factory=list)

    def row(self, kind: int, of: tuple[int, int, int], anchor: int, turn: int) -> int:
        self.rows.append((kind, *of, anchor, turn))
        return -len(self.rows)

    def edge(self, source: int, target: int, distance: int = 0) -> None:
        self.edges.append((source, target, distance))


def offload(pipeline: LoweredPipeline, layout: PipelineLayout, options: OffloadOptions) -> LoweredPipeline:
    """Add the copies of all devices to one pipeline."""
    columns, added = pipeline.columns, _AddedCopies()
    for device in range(int(columns.rank.max(initial=-1)) + 1):
        here = columns.rank == device
        computations = np.flatnonzero(here & is_compute(columns.kind) & (columns.micro_batch != NONE))
        _move_activations(columns, computations, options.stages.activations, added)
        steps = np.flatnonzero(here & (columns.kind == STEP) & np.isin(columns.stage, options.stages.states))
        _move_states(columns, computations, steps.tolist(), added)
    return _put_in(pipeline, options, added)


def _move_activations(columns: Columns, rows: Ints, stages: tuple[int, ...], added: _AddedCopies) -> None:
    """Add the moves of a device's activations; `rows` are its computations."""
    for forward, backward in leave(columns, rows, stages):
        first, last = int(rows[forward]), int(rows[backward])
        of = int(columns.stage[first]), int(columns.replica[first]), int(columns.micro_batch[first])
        store = added.row(STORE_ACTIVATIONS, of, first, _STORE)
        release = added.row(RELEASE, of, int(rows[forward + 1]), _RELEASE)
        room = added.row(ROOM, of, int(rows[backward - 2]), _ROOM)
        load = added.row(LOAD_ACTIVATIONS, of, int(rows[backward - 2]), _LOAD)
        for source, target in (
            (first, store),
            (first, release),
            (store, release),
            (release, load),
            (store, load),
            (room, load),
            (load, last),
        ):
            added.edge(source, target)


def _move_states(columns: Columns, rows: Ints, steps: list[int], added: _AddedCopies) -> None:
    """Add the moves of a device's states; `rows` are its computations, `steps` the steps that need them."""
    for turn, step in enumerate(steps):
        of = int(columns.stage[step]), int(columns.replica[step]), NONE
        # One computation after a device's last but one hides the copies of the first stages.
        before = int(rows[-2]) if turn < RESIDENT_STATES else steps[turn - 1]
        room = added.row(ROOM, of, before, _ROOM)
        load = added.row(LOAD_STATES, of, before, _LOAD)
        store = added.row(STORE_STATES, of, step, _STORE)
        soon = turn < len(steps) - RESIDENT_STATES
        after = steps[turn + RESIDENT_STATES - 1] if soon else int(rows[0])
        release = added.row(RELEASE, of, after, _RELEASE)
        added.edge(store, release, 0 if soon else 1)
        added.edge(release, store, 1 if soon else 0)
        for source, target in ((room, load), (load, step), (step, store), (load, store)):
            added.edge(source, target)
        added.edge(store, load, 1)


def _put_in(pipeline: LoweredPipeline, options: OffloadOptions, added: _AddedCopies) -> LoweredPipeline:
    if not added.rows:
        return pipeline
    columns, present = pipeline.columns, len(pipeline.columns)
    kind, stage, replica, micro_batch, anchor, turn = np.array(added.rows, dtype=np.int64).T
    source, target, distance = np.array(added.edges, dtype=np.int64).T
    copies = is_any_of(kind, (STORE_STATES, LOAD_STATES, STORE_ACTIVATIONS, LOAD_ACTIVATIONS))
    sizes = np.where(
        micro_batch == NONE, np.array(options.state_bytes)[stage], np.array(options.activation_bytes)[stage]
    )
    new = Columns.of(
        len(kind),
        kind=kind,
        stage=stage,
        replica=replica,
        micro_batch=micro_batch,
        rank=columns.rank[anchor],
        bytes=np.where(copies, sizes, 0),
    )
    edges = Edges(
        source=np.where(source < 0, present - 1 - source, source),
        target=np.where(target < 0, present - 1 - target, target),
        distance=distance,
    )
    return insert(pipeline, new, after_sends(columns, anchor), turn, edges)


PASS = Pass(
    name=NAME,
    options=options,
    apply=offload,
    # They change the order of computations, or look at what follows a step.
    after=("auxiliary-head", "micro-batch-norms", "tensor-collectives"),
    last=True,
    refuse=refuse,
    owes=owes,
    check=check_offload,
)
