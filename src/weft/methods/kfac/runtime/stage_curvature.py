"""`StageCurvature`: what passes have left on one rank, and the factors of a stage's layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from weft.methods.kfac.linears import Treated
from weft.methods.kfac.options import KfacOptions
from weft.methods.kfac.runtime.factors import FORMS, Factor
from weft.methods.kfac.runtime.linear_parts import with_all_features
from weft.methods.kfac.runtime.treated_linears import TreatedLinear, TreatedOperand, treated_operands
from weft.run.stage.taps import Passing, Tap
from weft.run.state.bucket import GradientBucket
from weft.run.state.stepped import Piece
from weft.run.state.whole_pieces import complete_pieces
from weft.sync.base import Group

# The step of an inverse that is not there yet.
NEVER = -1
SIDES = ("inputs", "outputs")


class LayerCurvature:
    """The factors of one layer.

    Attributes:
        captured: by side, inputs and outputs, the step whose tensors are in the sums, (2,).
        used: the step of the inverses that steps use, (); `NEVER` before there are any.

    Args:
        pieces: the micro-batches of a step on this rank.
    """

    def __init__(self, operands: Sequence[TreatedOperand], pieces: int, damping: float) -> None:
        self._pieces, self._damping = pieces, damping
        self.operands = tuple(operands)
        self.linears = tuple(linear for one in operands for linear in one.linears)
        self.inputs = tuple(one.factor for one in operands)
        self.outputs = tuple(one.factor for one in self.linears)
        self.captured = torch.full((2,), NEVER, dtype=torch.int64)
        self.used = torch.full((), NEVER, dtype=torch.int64)
        self._added = torch.zeros(2, dtype=torch.int64)
        self._made = torch.zeros((), dtype=torch.int64)

    @property
    def shown(self) -> list[tuple[int, TreatedLinear]]:
        """The sides and linear layers whose tensors the layer needs, in the order of its factors."""
        return [
            *((0, one.linears[0]) for one in self.operands),
            *((1, linear) for linear in self.linears),
        ]

    def factor_of(self, side: int, linear: TreatedLinear) -> Factor:
        """Return the factor of one side of a linear layer."""
        if side == 1:
            return linear.factor
        return next(one.factor for one in self.operands if linear in one.linears)

    def factors(self, side: int) -> tuple[Factor, ...]:
        """Return the factors of inputs (0) or outputs (1)."""
        return (self.inputs, self.outputs)[side]

    def add(self, side: int, rows: Sequence[torch.Tensor], step: int, counts: Sequence[int]) -> None:
        """Add what a micro-batch left, one tensor for each factor of a side; a step has `counts` rows."""
        for factor, one, count in zip(self.factors(side), rows, counts, strict=True):
            factor.add(one, count if side else 1.0 / count)
        self.captured[side] = step
        self._added[side] += 1
        if self._added[side] == self._pieces:
            self._added[side] = 0
            self.complete(side)

    def complete(self, side: int) -> None:
        """Take the means of a side's sums, which have all rows of the rank, or of all ranks."""
        for factor in self.factors(side):
            factor.complete()

    def invert(self, side: int, number: int) -> None:
        """Invert one factor; when all of the layer are inverted, steps use these inverses."""
        if side == 0:
            one = self.operands[number]
            real = one.factor.invert(self._damping, one.mean_output)
        else:
            linear = self.linears[number]
            real = linear.factor.invert(self._damping, self.factor_of(0, linear).mean)
        # The first window has nothing yet for what stands before its passes.
        self._made += real
        if self._made < len(self.inputs) + len(self.outputs):
            return
        self._made.zero_()
        for factor in (*self.inputs, *self.outputs):
            factor.take()
        # The sums of one side may be of the next window already.
        self.used.copy_(self.captured.min())

    def age(self, step: int) -> torch.Tensor:
        """Return the steps since that of the inverses, (); without any, since before the first one."""
        return step - self.used

    def precondition(self) -> None:
        """Multiply the gradients of all linear layers by their inverses."""
        for linear in self.linears:
            for gradient in linear.gradients:
                self.precondition_one(linear, gradient)

    def precondition_one(self, linear: TreatedLinear, gradient: torch.Tensor) -> None:
        """Multiply one gradient of a linear layer by its inverses, if there are any yet."""
        if self.used != NEVER:
            linear.precondition(gradient, self.factor_of(0, linear), self._damping)

    def forget(self) -> None:
        """Begin a window anew; steps go on with the inverses that they use."""
        self._added.zero_()
        self._made.zero_()
        for one in (*self.inputs, *self.outputs):
            one.forget()

    @property
    def used_tensors(self) -> dict[str, torch.Tensor]:
        """The tensors that steps use, by name; all replicas have the same."""
        return {"used": self.used} | self._of_factors(
            lambda one: {"mean": one.mean, **dict(zip(one.names, one.used, strict=True))}
        )

    @property
    def own_tensors(self) -> dict[str, torch.Tensor]:
        """The tensors of a window under way, by name; each rank has its own."""
        counts = {"captured": self.captured, "added": self._added, "made": self._made}
        return counts | self._of_factors(
            lambda one: {
                "sum": one.sum,
                "begun": one.begun,
                **{f"next_{name}": tensor for name, tensor in zip(one.names, one.next, strict=True)},
            }
        )

    def _of_factors(self, tensors: Callable[[Factor], Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        return {
            f"{SIDES[side]}.{number}.{name}": tensor
            for side in (0, 1)
            for number, one in enumerate(self.factors(side))
            for name, tensor in tensors(one).items()
        }


class StageCurvature:
    """The layers of one stage on one rank, and tensors that wait for their row.

    Args:
        micro_batches: of the global batch, all of one size; `pieces` of them run on this rank.
        every: steps from one that leaves tensors to the next.
        samples, tokens: of a micro-batch.
        options: the plan's.

    Attributes:
        layers: by position in the model.
    """

    def __init__(
        self,
        stage: nn.Module,
        bucket: GradientBucket,
        treated: Treated,
        micro_batches: int,
        pieces: int,
        every: int,
        samples: int,
        tokens: int,
        options: KfacOptions,
    ) -> None:
        self._micro_batches, self._every = micro_batches, every
        self._samples, self._tokens = samples, tokens
        # By side, micro-batch and name of a linear layer: the step, and the tensor, (tokens, features).
        self._left: dict[tuple[int, int, str], tuple[int, torch.Tensor]] = {}
        gradients = dict(
            zip(map(id, bucket.layout.parameters), bucket.layout.views(bucket.flat), strict=True)
        )
        self.layers = {
            position: LayerCurvature(
                list(treated_operands(stage, position, linears, gradients, FORMS[options.form])),
                pieces,
                options.damping,
            )
            for position, linears in treated.items()
        }

        # By the id of a parameter: the layers that multiply its gradient.
        self._owners = {
            id(parameter): (layer, linear)
            for layer in self.layers.values()
            for linear in layer.linears
            for parameter in linear.parameters
        }

    @property
    def tap(self) -> Tap:
        shown = {(side, one.name): one for layer in self.layers.values() for side, one in layer.shown}

        def see(side: int) -> Callable[[Passing, str, torch.Tensor], None]:
            def keep(now: Passing, name: str, tensor: torch.Tensor) -> None:
                linear = shown.get((side, name))
                if now.step % self._every == 0 and linear is not None:
                    rows = linear.parts.kept(side, tensor.flatten(0, -2))
                    self._left[side, now.micro_batch, name] = now.step, rows

            return keep

        names = tuple(one.name for layer in self.layers.values() for one in layer.linears)
        return Tap(modules=names, module_input=see(0), module_gradient=see(1))

    def precondition(self) -> None:
        """Multiply the gradients of a stage, which are whole on this rank."""
        for layer in self.layers.values():
            layer.precondition()

    def precondition_pieces(self, pieces: Sequence[Piece], own: torch.Tensor, group: Group) -> None:
        """Multiply the gradients that begin in this rank's range; see `complete_pieces`."""

        def multiply(piece: Piece, gradient: torch.Tensor) -> None:
            layer, linear = self._owners[id(piece.parameter)]
            layer.precondition_one(linear, gradient)

        mine = [piece for piece in pieces if id(piece.parameter) in self._owners]
        complete_pieces(mine, own, group, multiply)

    @property
    def is_fresh(self) -> bool:
        """True before the first pass."""
        return not self._left and all((one.captured == NEVER).all() for one in self.layers.values())

    @property
    def left(self) -> dict[str, torch.Tensor]:
        """The tensors that passes have left, and their steps, by name."""
        found: dict[str, torch.Tensor] = {}
        for key, (step, tensor) in self._left.items():
            found |= {_left_name(*key): tensor, f"{_left_name(*key)}.step": torch.tensor(step)}
        return found

    def rooms(self, micro_batches: Sequence[int], dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Return room for all that the passes of these micro-batches can leave, by name."""
        found = {}
        for micro_batch in micro_batches:
            for layer in self.layers.values():
                for side, one in layer.shown:
                    name, factor = _left_name(side, micro_batch, one.name), layer.factor_of(side, one)
                    size = one.parts.kept_shape(side, self._rows_of(one), len(factor.sum))
                    found[name] = torch.zeros(size, dtype=dtype, device=factor.sum.device)
                    found[f"{name}.step"] = torch.tensor(NEVER)
        return found

    def take(self, rooms: Mapping[str, torch.Tensor]) -> None:
        """Go on with what was left: the tensors of `rooms` with a step."""
        for name, step in rooms.items():
            if name.endswith(".step") and step != NEVER:
                side, micro_batch, layer = name.removesuffix(".step").split("/", 2)
                key = SIDES.index(side), int(micro_batch), layer
                self._left[key] = int(step), rooms[name.removesuffix(".step")]

    def add(self, side: int, position: int, micro_batch: int) -> None:
        """Add what a micro-batch has left in a layer to its sums, if it has."""
        layer = self.layers[position]
        linears = [one for at, one in layer.shown if at == side]
        keys = [(side, micro_batch, one.name) for one in linears]
        if keys[0] not in self._left:
            # Of the window before the first one.
            return
        found = [self._left.pop(key) for key in keys]
        rows = with_all_features([one.parts for one in linears], side, [tensor for _, tensor in found])
        counts = [self._rows_of(one) * self._micro_batches for one in linears]
        layer.add(side, rows, found[0][0], counts)

    def _rows_of(self, linear: TreatedLinear) -> int:
        """Return the rows of a micro-batch that a linear layer multiplies, on all ranks of the replica."""
        return self._tokens if linear.rows is None else linear.rows * self._samples


def _left_name(side: int, micro_batch: int, layer: str) -> str:
    return f"{SIDES[side]}/{micro_batch}/{layer}"
