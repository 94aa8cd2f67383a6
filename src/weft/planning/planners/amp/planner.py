"""The `amp` planner: AMP's strategies in AMP's order, with the simulator's predictions.

The estimate of a strategy and its search are those of Li et al., arXiv 2210.07297. The backward pass takes
twice the forward pass; both are linear in the size of the micro-batch. Every cut is crossed once per step. A
ring reduces gradients after everything else. Memory does not count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import ClassVar

import numpy as np

from weft.describe.layout import Layout
from weft.errors import InputError
from weft.moves.layout import pipeline_of, refuse
from weft.moves.partition import uniform_partition
from weft.moves.pipeline_partition import pipeline_partition
from weft.planning.planners.amp.inputs import AmpInputs, Degrees, amp_inputs, degrees_of
from weft.planning.planners.base import Candidate, Ranking, Verdict
from weft.planning.planners.bounds import Bounds
from weft.planning.planners.simulated import empty_stage, estimated, rank_by_estimate
from weft.planning.planners.space import degree_layouts, require_closed_form, with_layers
from weft.planning.problem import Problem
from weft.program.arrays import Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class AmpStrategy:
    """One strategy with the stages that AMP gives it.

    `pipeline_s` is its estimate of the pipeline, `reduction_s` the estimate of the gradients' all-reduce.
    """

    degrees: Degrees
    layers_per_stage: tuple[int, ...]
    pipeline_s: float
    reduction_s: float

    @property
    def seconds(self) -> float:
        """AMP's estimate of the step."""
        return self.pipeline_s + self.reduction_s


def amp_search(inputs: AmpInputs, degrees: Iterable[Degrees] | None = None) -> list[AmpStrategy]:
    """Return every runnable strategy, best first; equal ones stay in the order of `degrees`.

    Args:
        inputs: the layers and the cluster.
        degrees: the strategies to consider; default: all of `degrees_of`.
    """
    considered = degrees_of(inputs) if degrees is None else degrees
    found = (amp_strategy(inputs, one) for one in considered)
    return sorted((one for one in found if one is not None), key=lambda one: one.seconds)


def amp_strategy(
    inputs: AmpInputs,
    degrees: Degrees,
    node_of_rank: Ints | None = None,
    layers_per_stage: tuple[int, ...] | None = None,
) -> AmpStrategy | None:
    """Return the strategy with the best stages; None when some stage would have nothing to compute.

    Args:
        inputs: the layers and the cluster.
        degrees: the degrees of the strategy.
        node_of_rank: node of every rank, shape (ranks,); tensor ranks count fastest, then replicas, then
            stages. Default: ranks number the devices node by node.
        layers_per_stage: stages to estimate in place of the best.
    """
    tensor_parallel, data_parallel, pipeline_parallel, size, micro_batches = degrees
    forward_s = np.array(inputs.forward_s[tensor_parallel])
    if pipeline_parallel > np.count_nonzero(forward_s):
        return None
    nodes = inputs.node_of_rank if node_of_rank is None else node_of_rank
    used = nodes[: pipeline_parallel * data_parallel * tensor_parallel]
    grid = used.reshape(pipeline_parallel, data_parallel, tensor_parallel)
    layer_s = 3.0 * size * forward_s
    # From each stage to the next: the slowest lane, averaged over replicas.
    per_byte_s = (1.0 / inputs.bandwidth[grid[:-1], grid[1:]].min(axis=2)).mean(axis=1)
    cut_s = np.outer(per_byte_s, size * np.array(inputs.sent_bytes[tensor_parallel]))
    counts: tuple[int, ...] | None
    if layers_per_stage is not None:
        counts = layers_per_stage
    elif micro_batches == 1:
        counts = uniform_partition(len(layer_s), pipeline_parallel, inputs.leading, inputs.trailing)
    else:
        work_s = np.broadcast_to(layer_s, (pipeline_parallel, len(layer_s)))
        counts = pipeline_partition(work_s, cut_s, micro_batches).layers_per_stage
    if counts is None:
        return None
    ends: Ints = np.cumsum(np.array(counts))
    longest_s = np.add.reduceat(layer_s, ends - counts).max()
    crossed_s = cut_s[np.arange(len(counts) - 1), ends[:-1] - 1].sum()
    return AmpStrategy(
        degrees=degrees,
        layers_per_stage=counts,
        pipeline_s=float(layer_s.sum() + crossed_s + (micro_batches - 1) * longest_s),
        reduction_s=reduction_s(inputs, grid, counts),
    )


def reduction_s(inputs: AmpInputs, grid: Ints, counts: tuple[int, ...]) -> float:
    """Return the seconds of the slowest all-reduce of a stage's gradients, in a ring over its replicas.

    `grid` is the node of each (stage, replica, lane), `counts` the layers of each stage.
    """
    tensor_parallel, replicas = grid.shape[2], grid.shape[1]
    if replicas == 1:
        return 0.0
    slowest = inputs.bandwidth[grid, np.roll(grid, -1, axis=1)].min(axis=(1, 2))
    starts: Ints = np.cumsum(np.array(counts)) - np.array(counts)
    reduced = np.add.reduceat(np.array(inputs.gradient_bytes[tensor_parallel]), starts)
    if inputs.shared_bytes is not None:
        shares = np.unique(np.searchsorted(starts, inputs.shared_layers, side="right") - 1)
        reduced[shares] += inputs.shared_bytes[tensor_parallel]
    return float((2.0 * (replicas - 1) / replicas * reduced / slowest).max())


@dataclass(frozen=True, slots=True)
class AmpPlanner:
    """Search by AMP's closed form; `finalists` is the least number of fitting strategies to simulate.

    The order is AMP's. AMP has no model of memory, so its best may not fit: the verdict is weft's.
    """

    name: ClassVar[str] = "amp"
    finalists: int = 8

    def space(self, problem: Problem) -> Iterator[Layout]:
        """See `degree_layouts`; a layout gets its stages when it is judged."""
        return degree_layouts(problem)

    def search(self, problem: Problem) -> Ranking:
        """Estimate every strategy, and simulate the best.

        Raises:
            InputError: for pins that AMP does not know.
        """
        require_closed_form(problem, self.name)
        tables = cache(partial(profiled, problem))
        judged = [_judged(problem, layout, tables) for layout in self.space(problem)]
        return rank_by_estimate(problem, judged, Bounds(problem), self.finalists)


def profiled(problem: Problem, tp: int) -> AmpInputs | str:
    """Return AMP's inputs at one tensor-parallel degree, or the reason why there are none."""
    for group in problem.job.cluster.groups:
        if group.devices % tp:
            nodes = f"the {group.devices} devices of a node of {group.name}"
            return f"tp {tp} does not divide {nodes}"
    try:
        return amp_inputs(problem, [tp])
    except InputError as error:
        # A profile without this degree refuses to guess.
        return str(error.violations[0])


def degrees_of_layout(problem: Problem, layout: Layout) -> Degrees:
    """Return the degrees of a layout of equal replicas."""
    return Degrees(
        layout.tp,
        layout.dp,
        layout.pp,
        layout.micro_batch_size,
        pipeline_of(problem.job, layout).micro_batches,
    )


def _judged(problem: Problem, layout: Layout, tables: Callable[[int], AmpInputs | str]) -> Candidate:
    refused = Candidate(layout=layout, verdict=Verdict.REFUSED, reason=refuse(problem.job, layout) or "")
    if refused.reason:
        return refused
    inputs = tables(layout.tp)
    if isinstance(inputs, str):
        return replace(refused, reason=inputs)
    strategy = amp_strategy(inputs, degrees_of_layout(problem, layout))
    if strategy is None:
        return empty_stage(layout)
    return estimated(with_layers(layout, strategy.layers_per_stage), strategy.seconds)
