"""`MicroBatchNorms`: the squares of a rank's gradients, and the norms from the squares of all ranks.

A norm is of the gradient of one micro-batch's own mean loss, as in a training on it alone. One rank counts
each element of it. Ranks that divide a replica's tokens have parts of a gradient, and add them up first. They
do so for every micro-batch, not only at the end of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

import torch
from torch import nn

from weft.methods.micro_batch_norms.program import NAME
from weft.program.program import NONE, Instruction
from weft.program.segments import segments_of
from weft.run.handlers.base import GRADIENT, Issue
from weft.run.methods import HandlerOf, Making, MethodState, StateOf
from weft.run.parallel.tensor_stage import (
    TensorParallel,
    counted_once,
    summed_gradients,
    tensor_ranks,
    token_ranks,
)
from weft.run.resources import Resources
from weft.run.stage.stage_module import StageModule
from weft.run.stage.taps import Passing, Tap
from weft.run.state.bucket import FlatLayout
from weft.run.streams import Completion, Stream, Value
from weft.run.workspace import Workspace
from weft.sync.base import Group

# The norms of all micro-batches of the global batch, shape (micro-batches,).
NORMS = "micro_batch_norms"


class MicroBatchNorms(MethodState):
    """The squares on one rank.

    Args:
        micro_batches: the number of micro-batches in the global batch.
        cut: the stages with passes in segments.
    """

    def __init__(self, micro_batches: int, cut: Collection[int], device: torch.device) -> None:
        # One row by parity of the step: the next step computes while this step's meeting may still run.
        self._squares = torch.zeros(2, micro_batches, dtype=torch.float64, device=device)
        self._cut = cut
        self._stages: dict[int, Callable[[], StageSquares]] = {}

    @classmethod
    def of(cls, making: Making) -> MicroBatchNorms:
        owed = segments_of(making.program.obligations.methods)
        cut = () if owed is None else [index for index, one in enumerate(owed.segments) if one.backward]
        return cls(making.program.micro_batches, cut, making.device)

    def begin(self, resources: Resources) -> None:
        self._stages = {
            stage: partial(StageSquares, module, resources.buckets[stage].flat.dtype, stage in self._cut)
            for stage, module in resources.stages.items()
        }

    def taps(self, stage: int) -> Sequence[Tap]:
        # Passes in segments may take turns, so each micro-batch under way has its own squares.
        make = self._stages[stage]
        spare, under_way = [make()], dict[int, StageSquares]()

        def begun(micro_batch: int) -> StageSquares:
            squares = under_way[micro_batch] = spare.pop() if spare else make()
            return squares

        def see(now: Passing, name: str, gradient: torch.Tensor) -> None:
            squares = under_way.get(now.micro_batch) or begun(now.micro_batch)
            squares.see(name, gradient)

        def ended(now: Passing) -> None:
            squares = under_way.get(now.micro_batch) or begun(now.micro_batch)
            self._squares[now.step % 2, now.micro_batch] += squares.take()
            spare.append(under_way.pop(now.micro_batch))

        return (Tap(gradient=see, parameters=spare[0].seen, ended=ended),)

    def series(self, workspace: Workspace) -> Mapping[str, Value[torch.Tensor]]:
        norms = workspace.values.get((NORMS, NONE, NONE))
        return {} if norms is None else {NORMS: norms}

    def take(self, step: int, group: Group) -> torch.Tensor:
        """Return the norms of a step, shape (micro-batches,), in fp64; every rank of the group calls it."""
        own = self._squares[step % 2]
        squares = own.clone()
        own.zero_()
        if group.size > 1:
            group.all_reduce(squares)
        # Each loss has the weight 1 / micro-batches.
        return squares.sqrt_().mul_(len(squares))


class StageSquares:
    """The sum of squares of this rank's part of one micro-batch's gradient in a stage.

    Args:
        cut: True if the stage's passes run in segments.

    Attributes:
        seen: the names of parameters; `see` takes their gradients.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype, cut: bool) -> None:
        trained = {name: one for name, one in module.named_parameters() if one.requires_grad}
        parts = _in_parts(module, trained, cut)
        divided = module.divisions if isinstance(module, TensorParallel) else {}
        own = {name for name in trained if tensor_ranks(module).place == 0 or name in divided}
        self.seen = frozenset(own | parts)
        self._squares: list[torch.Tensor] = []
        self._vectors: list[torch.Tensor] = []
        apart = [one for name, one in trained.items() if name not in parts]
        layout = FlatLayout.of(module, apart=apart)
        flat = self._flat = layout.zeros(layout.length, dtype)
        names = {id(one): name for name, one in trained.items()}
        views = zip(layout.parameters, layout.views(flat), strict=True)
        self._parts = {names[id(parameter)]: view for parameter, view in views}
        self._sums = summed_gradients({0: module}, {0: layout}, {0: flat})[0] if parts else ()
        self._counted = counted_once(module, layout, flat, 0) if parts else ()

    def see(self, name: str, gradient: torch.Tensor) -> None:
        if name in self._parts:
            self._parts[name].add_(gradient)
        elif gradient.ndim == 1:
            # Most parameters are short vectors: all of them are multiplied at once.
            self._vectors.append(gradient)
        else:
            self._squares.append(square(gradient.flatten()))

    def take(self) -> torch.Tensor | float:
        """Return the sum since the last call, and begin a new one."""
        for one in self._sums:
            one.add_up()
        squares = [*self._squares, *map(square, self._counted)]
        if self._vectors:
            squares.append(square(torch.cat(self._vectors)))
        self._squares.clear()
        self._vectors.clear()
        # The next micro-batch may not use all parameters.
        self._flat.zero_()
        return torch.stack(squares).sum(dtype=torch.float64) if squares else 0.0


def square(gradient: torch.Tensor) -> torch.Tensor:
    """Return the sum of squares of a vector, in its precision: fp32 or wider, as autograd has cast it."""
    return torch.dot(gradient, gradient)


def _in_parts(module: nn.Module, trained: Mapping[str, nn.Parameter], cut: bool) -> set[str]:
    """Return the names of parameters with gradients in parts: by tokens of each rank, or by segments."""
    if token_ranks(module).size > 1:
        return set(trained)
    summed = module.summed_parameters() if isinstance(module, TensorParallel) else ()
    shared = module.shared_parameters() if cut and isinstance(module, StageModule) else ()
    wanted = {id(parameter) for parameter in (*summed, *shared)}
    return {name for name, parameter in trained.items() if id(parameter) in wanted}


def micro_batch_norms(workspace: Workspace, instruction: Instruction) -> Issue:
    """Combine all ranks' squares into the norms of all micro-batches."""
    label, resources = str(instruction), workspace.resources
    state, group = resources.methods[NAME], resources.groups.collective[instruction.group]
    assert isinstance(state, MicroBatchNorms)

    def issue(stream: Stream) -> Completion:
        step = workspace.step
        value: Value[torch.Tensor] = Value()
        workspace.values[NORMS, NONE, NONE] = value

        def work() -> None:
            value.content = state.take(step, group)

        gradients = (workspace.latest(GRADIENT, stage) for stage in resources.stages)
        value.completion = stream.run(label, work, *gradients)
        return value.completion

    return issue


PARTS = (
    HandlerOf(kind="micro_batch_norms", handler=micro_batch_norms),
    StateOf(method=NAME, make=MicroBatchNorms.of),
)
