"""Segments of a stage's passes: pieces of its layers, with autograd cut at the borders between them.

The outputs of a piece are leaves of the next piece's graph. Backward, a leaf's gradient becomes that of the
output before it, directly or after an exchange between ranks. A value that passes a piece unchanged stays the
same leaf, and gradients of later pieces add up in it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from weft.bundles import runtime_parts
from weft.describe.plan import Recompute
from weft.errors import InputError, Violation
from weft.program.rank_program import RankProgram
from weft.program.segments import StageSegments, cutter_of, segments_of
from weft.run.stage.layers import run_of
from weft.run.stage.pieces import CutOf, Ran, StageCut, StagePiece, State, Tape
from weft.run.stage.roots import Growth
from weft.run.stage.stage_pass import draws_numbers
from weft.sync.base import Group

if TYPE_CHECKING:
    from weft.run.resources import Resources
    from weft.run.stage.split_backward import WeightPart


# From the output of the last stage to the loss; None elsewhere.
Finish = Callable[[torch.Tensor], torch.Tensor] | None
# The gradient of a value that crossed a border, and the weight parts of the segment behind it.
Crossed = tuple[torch.Tensor | None, list["WeightPart"]]


class StageRun:
    """The run of one stage in segments on this rank.

    Args:
        stage: its number.
        cut: the way in which its pieces are made.
        segments: the borders at which the program has collectives.
        recompute: the values that a piece keeps for backward; with `full`, its inputs alone.

    Raises:
        InputError: when the stage's borders differ from the program's.
    """

    def __init__(
        self, stage: int, cut: StageCut, segments: StageSegments, recompute: Recompute = "none"
    ) -> None:
        self._cut, self._count, self._run = cut, len(cut.borders), run_of(recompute)
        self._forward, self._backward = (
            tuple(number for number, one in enumerate(cut.borders) if one[way]) for way in (False, True)
        )
        if (len(self._forward), len(self._backward)) != (len(segments.forward), len(segments.backward)):
            has = f"it has {len(self._forward)} borders forward and {len(self._backward)} backward"
            told = f"{len(segments.forward)} and {len(segments.backward)}"
            raise _refusal(stage, f"{has}, the program {told}")
        self.last_forward, self.last_backward = len(self._forward), len(self._backward)

    def begin(self, tape: Tape, inputs: torch.Tensor, growth: Growth | None = None) -> None:
        """Begin a micro-batch's way, with the stage's input."""
        tape.pieces, tape.growth = self._cut.pieces(inputs), growth

    def run(self, tape: Tape, segment: int, entered: torch.Tensor, finish: Finish = None) -> torch.Tensor:
        """Run a segment forward, and return the value that crosses the border behind it.

        Args:
            entered: the value that has crossed the border before it, or the stage's input; a leaf.
            finish: makes a loss from the output of the last segment.
        """
        for number in self._pieces(self._forward, segment):
            inputs = _leaves(tape.ran[-1], entered) if tape.ran else (entered,)
            ends = number == len(tape.pieces) - 1
            with torch.enable_grad():
                if tape.growth is not None:
                    tape.growth.forget()
                outputs = self._outputs(tape.pieces[number], inputs, finish if ends else None)
                roots = {} if tape.growth is None else tape.growth.ready(outputs[0])
            tape.ran.append(Ran(inputs, outputs, roots))
            left = outputs[0].detach()
            if not ends:
                _let_go(outputs[0], (*inputs, *outputs[1:]))
            entered = left.detach().requires_grad_()
        return left

    def _outputs(self, piece: StagePiece, inputs: State, finish: Finish) -> State:
        def run(*state: torch.Tensor) -> State:
            with self._cut.exchanging_elsewhere():
                outputs = piece(state)
            return outputs if finish is None else (finish(outputs[0]),)

        # Whatever crosses a border is an input, so that no rank exchanges again.
        return run(*inputs) if self._run is None else self._run(run, *inputs, draws=False)

    def go_back(
        self, tape: Tape, segment: int, gradient: torch.Tensor | None, *, splits: bool = False
    ) -> Crossed:
        """Run a segment backward, and return the gradient for the border before it.

        `splits`: run its input part, and also return its weight parts for later.
        """
        left: list[WeightPart] = []
        for _ in self._pieces(self._backward, segment):
            ran = tape.ran.pop()
            starts, gradients = _starts(ran, gradient, tape)
            # Nothing before the first trained parameter of a model has a gradient.
            pairs = [pair for pair in zip(starts, gradients, strict=True) if pair[0].requires_grad]
            if pairs and splits:
                left.append(_input_part(ran, *zip(*pairs, strict=True)))
            elif pairs:
                torch.autograd.backward([start for start, _ in pairs], [given for _, given in pairs])
            tape.behind, gradient = ran.inputs, ran.inputs[0].grad
        return gradient, left

    def cross(
        self, tape: Tape, part: int, value: torch.Tensor, group: Group, *, backward: bool
    ) -> torch.Tensor:
        """Return a value that crosses a border of a pass, exchanged by a group's ranks."""
        crossing = tape.pieces[(self._backward if backward else self._forward)[part]].crossing
        assert crossing is not None, "every border has an exchange"
        return crossing(value, group, backward=backward)

    def _pieces(self, borders: Sequence[int], segment: int) -> range:
        """Return the pieces of a segment; each border lies behind the piece of its number."""
        ends = [-1, *borders, self._count]
        return range(ends[segment] + 1, ends[segment + 1] + 1)


def _let_go(output: torch.Tensor, others: State) -> None:
    """Free the content of a tensor that autograd starts from: it reads the shape alone.

    Megatron-LM does so with what a stage sends (`deallocate_output_tensor`).
    """
    if all(one is not output for one in others):
        output.data = output.new_empty(()).expand(output.shape)


def _leaves(before: Ran, entered: torch.Tensor) -> State:
    """Return a piece's inputs: the value across the border, and the values that stayed on the rank."""
    given = {id(one) for one in before.inputs}
    kept = (
        one if id(one) in given else one.detach().requires_grad_(one.requires_grad)
        for one in before.outputs[1:]
    )
    return (entered, *kept)


def _starts(
    ran: Ran, gradient: torch.Tensor | None, tape: Tape
) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
    """Return a piece's outputs and roots with their gradients.

    Values that passed unchanged have their gradient in the leaf.
    """
    given = {id(one) for one in ran.inputs}
    starts, gradients = [ran.outputs[0]], [gradient]
    for output, leaf in zip(ran.outputs[1:], tape.behind[1:], strict=True):
        if id(output) not in given:
            starts.append(output)
            gradients.append(leaf.grad)
    if tape.of_root is not None:
        starts += ran.roots.values()
        gradients += [tape.of_root(place, root) for place, root in ran.roots.items()]
    return starts, gradients


def _input_part(
    ran: Ran, starts: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]
) -> WeightPart:
    # The part of torch that splits autograd takes seconds to import; whole passes do not need it.
    from weft.run.stage.split_backward import input_part, leaves_of

    leaves, given = leaves_of(starts), {id(one) for one in ran.inputs}
    inputs = [one for one in leaves if id(one) in given]
    weights = [one for one in leaves if isinstance(one, nn.Parameter) and id(one) not in given]
    earlier = [one.grad for one in inputs]
    for one in inputs:
        one.grad = None
    # torch detaches what it starts from in place. Others may have saved all but what has crossed a border.
    crossed, *others = starts
    part = input_part(weights, inputs, [crossed, *(one.clone() for one in others)], gradients)
    for one, before in zip(inputs, earlier, strict=True):
        if before is not None:
            # Not in place: the weight part goes on from the same tensors.
            one.grad = before if one.grad is None else one.grad + before
    return part


def _refusal(stage: int, problem: str) -> InputError:
    return InputError(Violation(f"stage {stage}", f"{problem}, so that it cannot run in segments"))


def _cut(stage: int, module: nn.Module, cut: StageCut | None) -> StageCut:
    if cut is None:
        raise _refusal(stage, f"{type(module).__name__} does not say what its pieces are")
    if draws_numbers(module):
        raise _refusal(stage, "layers that drop out numbers do not run in pieces yet")
    return cut


def stage_runs(program: RankProgram, resources: Resources) -> Mapping[int, StageRun]:
    """Return the runs of the rank's stages that the program cuts in segments.

    Raises:
        InputError: for a stage that cannot be cut so, that has roots of whole layers, or with layers that
            taps see.
    """
    methods = program.obligations.methods
    owed = segments_of(methods)
    found: dict[int, StageRun] = {}
    if owed is None:
        return found
    cut_of = next(one.cut for one in runtime_parts(CutOf) if one.method == cutter_of(methods))
    for stage, module in resources.stages.items():
        segments = owed.segments[stage]
        if not segments.forward and not segments.backward:
            continue
        taps = resources.taps.get(stage)
        if taps is not None and taps.sees_layers:
            raise _refusal(stage, "a method looks at its layers")
        roots = resources.roots.get(stage)
        if roots is not None and not roots.of_parts:
            raise _refusal(stage, "its backward passes start from outputs of layers")
        recompute = resources.recompute[stage]
        found[stage] = StageRun(stage, _cut(stage, module, cut_of(module)), segments, recompute)
    return found
