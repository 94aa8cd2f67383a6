"""The `annealing` planner: simulated annealing of AMP's closed form over degrees and places.

The code published with AMP (Li et al., arXiv 2210.07297) anneals over tilings of the device grid. Here a
state is the degrees, the order of the nodes, and the neighbours, which are replicas or stages. A move changes
one degree, the micro-batch size, the places of two nodes, or the axes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate
from math import exp
from typing import ClassVar, NamedTuple

import numpy as np

from weft.describe.layout import Layout, rank_order_of
from weft.moves.layout import refuse
from weft.planning.planners.amp.planner import AmpStrategy, amp_strategy, degrees_of_layout, profiled
from weft.planning.planners.base import Candidate, Ranking, Verdict
from weft.planning.planners.bounds import Bounds
from weft.planning.planners.simulated import empty_stage, estimated, rank_by_estimate
from weft.planning.planners.space import degree_layouts, require_closed_form, with_layers
from weft.planning.problem import Problem

# At the start, a step longer by this fraction is accepted with probability 1/e.
FIRST_TEMPERATURE = 0.1
# Most draws of a move until its state is new.
_DRAWS = 16


class _State(NamedTuple):
    """The number of a runnable layout, and the group of each node in turn. The neighbouring ranks are the
    replicas of a stage, or the stages of a pipeline."""

    number: int
    groups: tuple[int, ...]
    stages_neighbour: bool = False


@dataclass(frozen=True, slots=True)
class AnnealingPlanner:
    """Two chains of `trials` moves each, one from most tensor ranks and one from most replicas.

    `seed` decides the drawn moves; `finalists` is the least number of fitting states to simulate.
    """

    name: ClassVar[str] = "annealing"
    seed: int = 0
    trials: int = 50
    finalists: int = 8

    def space(self, problem: Problem) -> Iterator[Layout]:
        """Return the degrees, each with all nodes in order; see `degree_layouts`."""
        return degree_layouts(problem)

    def search(self, problem: Problem) -> Ranking:
        """Anneal, then simulate the states with the lowest estimates.

        Raises:
            InputError: for pins that AMP does not know.
        """
        require_closed_form(problem, self.name)
        walk = _Walk(problem, list(self.space(problem)))
        for chain, start in enumerate(walk.starts()):
            self._anneal(walk, start, chain)
        return rank_by_estimate(problem, walk.candidates(), Bounds(problem), self.finalists)

    def _anneal(self, walk: _Walk, current: _State, chain: int) -> None:
        now_s = walk.seconds(current)
        for trial in range(self.trials):
            # Every trial has its own stream: (seed, chain, trial).
            random = np.random.Generator(np.random.Philox(key=self.seed, counter=[0, 0, chain, trial]))
            following = walk.neighbour(current, random)
            if following is None:
                return
            then_s = walk.seconds(following)
            temperature = FIRST_TEMPERATURE * now_s * (1.0 - trial / self.trials)
            if random.random() < exp(min((now_s - then_s) / temperature, 0.0)):
                current, now_s = following, then_s


class _Walk:
    """States of one problem and their estimates."""

    def __init__(self, problem: Problem, layouts: list[Layout]) -> None:
        self._problem = problem
        degrees = sorted({layout.tp for layout in layouts})
        self._inputs = {one: profiled(problem, one) for one in degrees}
        self._in_order = tuple(
            index for index, group in enumerate(problem.job.cluster.groups) for _ in range(group.count)
        )
        self._found: dict[_State, AmpStrategy] = {}
        self._refused: list[Candidate] = []
        self._layouts: list[Layout] = []
        for layout in layouts:
            reason = self._refuse(layout)
            if reason is None:
                self._layouts.append(layout)
            else:
                self._refused.append(Candidate(layout=layout, verdict=Verdict.REFUSED, reason=reason))

    def _refuse(self, layout: Layout) -> str | None:
        reason, inputs = refuse(self._problem.job, layout), self._inputs[layout.tp]
        if reason is not None or isinstance(inputs, str):
            return reason or str(inputs)
        if amp_strategy(inputs, degrees_of_layout(self._problem, layout)) is None:
            return empty_stage(layout).reason
        return None

    def starts(self) -> list[_State]:
        """Return the states with most tensor ranks and with most replicas, nodes in order."""
        if not self._layouts:
            return []
        numbers = range(len(self._layouts))
        degrees = [(one.tp, one.dp) for one in self._layouts]
        most_tensor = max(numbers, key=lambda number: (degrees[number][0], -degrees[number][1]))
        most_replicas = max(numbers, key=lambda number: (degrees[number][1], -degrees[number][0]))
        return [_State(number, self._in_order) for number in (most_tensor, most_replicas)]

    def seconds(self, state: _State) -> float:
        """Return AMP's estimate."""
        if state not in self._found:
            layout = self._layouts[state.number]
            inputs = self._inputs[layout.tp]
            assert not isinstance(inputs, str), "degrees without a profile were left out"
            nodes = inputs.node_of_rank[list(self._order(state))]
            strategy = amp_strategy(inputs, degrees_of_layout(self._problem, layout), nodes)
            assert strategy is not None, "degrees that leave a stage empty were left out"
            self._found[state] = strategy
        return self._found[state].seconds

    def _order(self, state: _State) -> tuple[int, ...]:
        """Return the device of every rank."""
        layout, groups = self._layouts[state.number], self._problem.job.cluster.groups
        sizes = [group.count * group.devices for group in groups]
        following = list(accumulate(sizes, initial=0))
        devices: list[int] = []
        for group in state.groups:
            devices += range(following[group], following[group] + groups[group].devices)
            following[group] += groups[group].devices
        used = np.array(devices[: layout.ranks])
        if state.stages_neighbour:
            shape = layout.dp, layout.pp, layout.width
            used = used.reshape(shape).transpose(1, 0, 2).ravel()
        return tuple(used.tolist())

    def neighbour(self, state: _State, random: np.random.Generator) -> _State | None:
        """Return a new state one move away; None when no draw gives one."""
        for _ in range(_DRAWS):
            # Where some devices stay unused, the ranks are the first devices.
            moves = (
                (_other_degrees, _other_nodes, _other_axes) if self._uses_all(state) else (_other_degrees,)
            )
            following = moves[int(random.integers(len(moves)))](self._layouts, state, random)
            if following not in self._found and self._uses_all(following) >= self._uses_all(state):
                return following
        return None

    def _uses_all(self, state: _State) -> bool:
        return self._layouts[state.number].ranks == self._problem.job.cluster.ranks

    def candidates(self) -> list[Candidate]:
        """Return all states with an estimate, each place once, then the refused degrees."""
        placed = {(state.number, self._order(state)): one for state, one in self._found.items()}
        return [*(self._candidate(*place, one) for place, one in placed.items()), *self._refused]

    def _candidate(self, number: int, order: tuple[int, ...], strategy: AmpStrategy) -> Candidate:
        layout = replace(self._layouts[number], rank_order=rank_order_of(order))
        return estimated(with_layers(layout, strategy.layers_per_stage), strategy.seconds)


def _other_degrees(layouts: list[Layout], state: _State, random: np.random.Generator) -> _State:
    """Change the tensor degree, the data degree or the micro-batch size, and the number of stages with it."""

    def degrees(layout: Layout) -> tuple[int, int, int]:
        return layout.tp, layout.dp, layout.micro_batch_size

    here = degrees(layouts[state.number])
    near = [
        number
        for number, layout in enumerate(layouts)
        if sum(one != other for one, other in zip(degrees(layout), here, strict=True)) == 1
    ]
    return state._replace(number=near[int(random.integers(len(near)))]) if near else state


def _other_nodes(layouts: list[Layout], state: _State, random: np.random.Generator) -> _State:
    """Exchange two nodes."""
    one, other = random.integers(len(state.groups), size=2).tolist()
    groups = list(state.groups)
    groups[one], groups[other] = groups[other], groups[one]
    return state._replace(groups=tuple(groups))


def _other_axes(layouts: list[Layout], state: _State, random: np.random.Generator) -> _State:
    """Make stages neighbours in place of replicas, or the other way round."""
    return state._replace(stages_neighbour=not state.stages_neighbour)
