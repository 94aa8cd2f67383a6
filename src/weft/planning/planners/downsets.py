"""Stages in a row from any graph of layers: a dynamic program over its downsets.

A downset has with a layer all layers that read it. Taking its stages off a downset one by one, the first
stage first, leaves smaller downsets. PipeDream and Piper search these rows with costs of their own.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from weft.describe.layer_graph import chain_edges
from weft.describe.plan import Recompute
from weft.planning.planners.graph_costs import Edge, GraphCosts
from weft.planning.planners.graphpipe.part_plans import StageGraph, StageOfLayers
from weft.program.arrays import Floats

Bools = npt.NDArray[np.bool_]


class Question(NamedTuple):
    """One search, with samples of a micro-batch and the number of devices.

    A stage may choose any of `words`, fastest first, and any of the `degrees` of replicas.
    """

    size: int
    words: tuple[Recompute, ...]
    degrees: tuple[int, ...]
    devices: int


class Sums(NamedTuple):
    """Costs of candidate stages, each of shape (stages,), for one micro-batch.

    `crossing_bytes` go over every edge between a stage and the rest. `border_bytes` is the output that layers
    before the downset send into it, once for each layer that sends.
    """

    computed_s: Floats
    crossing_bytes: Floats
    reduced_bytes: Floats
    border_bytes: float


class Price(Protocol):
    """The cost model of a planner."""

    def __call__(self, sums: Sums, replicas: int, micro_batches: float) -> Floats:
        """Return seconds per micro-batch of the batch, shape (stages,), with `micro_batches` in a step."""
        ...


class Row(NamedTuple):
    """Stages in a row, and the seconds per sample of the slowest one by the planner's own model."""

    sample_s: float
    graph: StageGraph


def downsets(layers: int, edges: Collection[Edge], most: int) -> Bools | None:
    """Return all downsets, the empty one first and the whole graph last, shape (downsets, layers).

    None if there are more than `most`.
    """
    consumers = [0] * layers
    for producer, consumer in edges:
        consumers[producer] |= 1 << consumer
    known, latest = [0], [0]
    while latest:
        grown = {
            one | 1 << layer
            for one in latest
            for layer in range(layers)
            if not one >> layer & 1 and not consumers[layer] & ~one
        }
        latest = sorted(grown)
        known += latest
        if len(known) > most:
            return None
    return np.array([[one >> layer & 1 for layer in range(layers)] for one in known], dtype=bool)


@dataclass(kw_only=True)
class RowSearch:
    """Searches over the same downsets.

    Attributes:
        costs: the layers and their devices.
        sets: their `downsets`, or those of the layers as a chain.
        price: the seconds of a stage, no less than a share of computing for each replica.
        budget: how many more stages may be priced, at each degree; later questions have the chain's answer.
    """

    costs: GraphCosts
    sets: Bools
    price: Price
    budget: int = 20_000_000
    _table: Floats = field(default_factory=lambda: np.empty((0, 0)), init=False)
    _reached: Bools = field(default_factory=lambda: np.empty(0, dtype=bool), init=False)

    def rows(self, questions: Iterable[Question]) -> list[Row]:
        """Return, for each question that has one, the row with the least seconds of the slowest stage.

        A row uses all devices of its question. The best row of the layers as a chain bounds the others.
        """
        found: list[Row] = []
        chain = self if len(self.sets) == self.costs.layers + 1 else self._chain
        bounded = [(chain.row(one), one) for one in questions if self._may_fit(one)]
        if chain is self:
            return [row for row, _ in bounded if row is not None]
        # Without a bound a search takes long, and hardly ever finds a row that fits. With several degrees
        # one takes the longest, and its bound is a row already.
        bounded.sort(key=lambda both: (len(both[1].degrees) > 1, both[0] is None))
        for bound, one in bounded:
            best = self.row(one, float("inf") if bound is None else bound.sample_s * one.size)
            found += [row for row in (best or bound,) if row is not None]
        return found

    @cached_property
    def _chain(self) -> RowSearch:
        sets = downsets(self.costs.layers, chain_edges(self.costs.layers), self.costs.layers + 1)
        assert sets is not None, "a chain has one downset more than layers"
        return RowSearch(costs=self.costs, sets=sets, price=self.price)

    def row(self, one: Question, most_s: float = float("inf")) -> Row | None:
        """Return the best row whose stages take at most `most_s` a micro-batch; None without one."""
        unit = _unit(one)
        self._table = table = np.full((len(self.sets), one.devices // unit + 1), np.inf)
        table[0, 0] = 0.0
        self._reached = np.arange(len(self.sets)) == 0
        most_s *= 1 + 1e-9
        work_s = self._sums[:, self._columns[0][one.size, one.words[0]]]
        for index in self._possible(one, work_s, most_s):
            inside = self._inside(index, work_s >= work_s[index] - most_s * max(one.degrees))
            self.budget -= len(inside) * len(one.degrees)
            if self.budget < 0:
                return None
            stages = self._stages(index, inside)
            for degree in one.degrees:
                step = degree // unit
                least = self._choices(one, stages, degree).min(axis=0, initial=np.inf)
                np.minimum(table[index, step:], least, out=table[index, step:])
            table[index, table[index] > most_s] = np.inf
            self._reached[index] = np.isfinite(table[index]).any()
        return self._row(one) if np.isfinite(table[-1, -1]) else None

    def _possible(self, one: Question, work_s: Floats, most_s: float) -> list[int]:
        """Return the downsets before and behind which whole stages can keep a limit."""
        unit, every = _unit(one), range(1, len(self.sets))
        if not np.isfinite(most_s) or not most_s:
            return list(every)
        each_s = most_s * unit
        before, behind = (np.ceil(part / each_s - 1e-9) for part in (work_s[-1] - work_s, work_s))
        return [index for index in every if before[index] + behind[index] <= one.devices // unit]

    def _may_fit(self, one: Question) -> bool:
        """Return True if all devices together have room for all states and one micro-batch."""
        costs = self.costs
        if min(one.degrees) > one.devices:
            return False
        kept = min(float(costs.passes[one.size, word].kept_bytes.sum()) for word in one.words)
        room = one.devices // min(one.degrees) * costs.memory_bytes
        return float(costs.state_bytes.sum()) + kept <= room

    def _inside(self, index: int, near: Bools) -> npt.NDArray[np.int64]:
        """Return the proper subsets of a downset that are near enough, and that some row divides."""
        known = np.flatnonzero(near[:index] & self._reached[:index])
        outside = self._packed[known] & ~self._packed[index]
        inside: npt.NDArray[np.int64] = known[~outside.any(axis=1)]
        return inside

    @cached_property
    def _packed(self) -> npt.NDArray[np.uint64]:
        room = -self.sets.shape[1] % 64
        return np.packbits(np.pad(self.sets, ((0, 0), (0, room))), axis=1).view(np.uint64)

    @cached_property
    def _columns(self) -> tuple[dict[tuple[int, Recompute], int], Floats]:
        """Columns of every choice's computed seconds and kept bytes, then states, buffers, gradients."""
        costs = self.costs
        places = {key: 2 * index for index, key in enumerate(costs.passes)}
        columns = [column for one in costs.passes.values() for column in (one.computed_s, one.kept_bytes)]
        return places, np.stack(
            [*columns, costs.state_bytes, costs.buffer_bytes, costs.reduced_bytes], axis=1
        )

    @cached_property
    def _sums(self) -> Floats:
        """The sums of all columns over each downset."""
        sums: Floats = self.sets.astype(np.float64) @ self._columns[1]
        return sums

    @cached_property
    def _ends(self) -> npt.NDArray[np.int64]:
        return np.array(self.costs.edges, dtype=np.int64).reshape(-1, 2)

    def _stages(self, index: int, inside: npt.NDArray[np.int64]) -> _Stages:
        """Return the stages that lead from a downset to those inside it."""
        members = self.sets[index] & ~self.sets[inside]
        producers, consumers = self._ends.T
        crossing = (members[:, producers] ^ members[:, consumers]).astype(np.float64)
        whole = self.sets[index]
        senders = np.unique(producers[~whole[producers] & whole[consumers]])
        return _Stages(inside, members, self._sums[index] - self._sums[inside], crossing, senders)

    def _choices(self, one: Question, stages: _Stages, degree: int) -> Floats:
        """Return the seconds of the slowest stage by subset and devices, shape (subsets, devices + 1 - step).

        Devices count in units, and from the stage's own on.
        """
        costs, unit, (places, _) = self.costs, _unit(one), self._columns
        rest = self._table[stages.inside]
        rest = rest[:, : rest.shape[1] - degree // unit]
        # By the devices from the stage to the end: one micro-batch in flight for each of as many replicas.
        devices = degree + unit * np.arange(rest.shape[1])
        micro_batches = costs.global_batch / one.size
        in_flight = np.minimum(np.ceil(devices / degree), np.ceil(micro_batches / degree))
        states, buffers, reduced = stages.sums[:, -3:].T
        resident = states + buffers * (degree > 1)
        seconds = np.full(rest.shape, np.inf)
        for word in reversed(one.words):
            passes, place = costs.passes[one.size, word], places[one.size, word]
            computed, kept = stages.sums[:, place : place + 2].T
            held = resident[:, None] + np.outer(kept, in_flight)
            fits = held <= costs.memory_bytes - _largest(passes.taken_bytes, stages.members)[:, None]
            sums = Sums(
                computed,
                stages.crossing @ passes.sent_bytes[self._ends[:, 0]],
                reduced,
                float(passes.sent_bytes[stages.senders].sum()),
            )
            seconds = np.where(fits, self.price(sums, degree, micro_batches)[:, None], seconds)
        slowest: Floats = np.maximum(rest, seconds)
        return slowest

    def _row(self, one: Question) -> Row:
        """Return the best row of a question, from its first stage to its last."""
        index, left, found = len(self.sets) - 1, one.devices, list[StageOfLayers]()
        slowest_s = float(self._table[-1, -1])
        everything = np.ones(len(self.sets), dtype=bool)
        while index:
            stages = self._stages(index, self._inside(index, everything))
            options = []
            for degree in one.degrees:
                if degree <= left:
                    after = self._choices(one, stages, degree)[:, (left - degree) // _unit(one)]
                    options.append((float(after.min()), degree, int(after.argmin())))
            _, degree, place = min(options)
            layers = tuple(np.flatnonzero(stages.members[place]).tolist())
            depth = -(-left // degree)
            word = self._word(one, layers, degree, depth)
            found.append(StageOfLayers(layers, degree, word, depth * degree * one.size))
            index, left = int(stages.inside[place]), left - degree
        sample_s = slowest_s / one.size
        in_flight = max(stage.in_flight for stage in found)
        graph = StageGraph(
            stages=tuple(found), micro_batch_size=one.size, sample_s=sample_s, in_flight=in_flight
        )
        return Row(sample_s, graph)

    def _word(self, one: Question, layers: Sequence[int], degree: int, depth: int) -> Recompute:
        """Return the fastest recomputation that fits."""
        in_flight = min(depth, -(-self.costs.global_batch // (one.size * degree)))
        for word in one.words[:-1]:
            stage = self.costs.stage(layers, one.size, degree, word)
            if stage.peak_bytes(in_flight) <= self.costs.memory_bytes:
                return word
        return one.words[-1]


class _Stages(NamedTuple):
    """Stages from a downset to those `inside` it.

    `members` has shape (stages, layers), `sums` those of all columns. `crossing` marks the edges that leave
    or enter a stage. `senders` are the layers before the downset that it reads.
    """

    inside: npt.NDArray[np.int64]
    members: Bools
    sums: Floats
    crossing: Floats
    senders: npt.NDArray[np.int64]


def _unit(one: Question) -> int:
    """Return the number of devices that all stages have a multiple of."""
    return int(np.gcd.reduce([*one.degrees, one.devices]))


def _largest(values: Floats, members: Bools) -> Floats:
    """Return the largest value of each set's layers; no set is empty."""
    order = np.argsort(-values, kind="stable")
    largest: Floats = values[order][np.argmax(members[:, order], axis=1)]
    return largest
