"""`AveragedPart`: weights of one stage that a replica steps by itself and averages with others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from weft.methods.local_averaging.runtime.outer_step import Averaging, LocalRound
from weft.run.parallel.tensor_stage import tensor_ranks
from weft.run.resources import Resources
from weft.run.state.bucket import VECTOR_ELEMENTS
from weft.run.state.stepped import SteppedWeights
from weft.sync.base import Group

Tensors = Sequence[torch.Tensor]


class AveragedPart:
    """Tensors that a rank steps of one stage, and averages at once.

    Args:
        name: that of the part.
        module, optimizer: the stage and its optimizer.
        stepped: the masters in place of the stage's parameters, if there are any.
        weights: the stepped tensors by the names of their parameters, in the same order on all replicas.
        share: this replica's share of the batch.
        group: the group of all replicas.

    Attributes:
        present: False while the replica is absent, so that means leave it out.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        stepped: SteppedWeights | None,
        weights: Mapping[str, torch.Tensor],
        share: float,
        group: Group,
    ) -> None:
        self.name, self.share, self.group = name, share, group
        self._ranks, self._optimizer, self._stepped = tensor_ranks(module), optimizer, stepped
        self.weights: Tensors = list(weights.values())
        self.lengths = {parameter: tensor.numel() for parameter, tensor in weights.items()}
        # The sum of the learning rates of this round's steps, and their number.
        self.rates = torch.zeros(2, dtype=torch.float64)
        self.finite = torch.ones((), dtype=torch.bool)
        self.present = True

    def flat(self, tensors: Tensors) -> torch.Tensor:
        """Return a flat copy of tensors of one type, padded with zeros to equal slices of whole vectors."""
        length, unit = sum(tensor.numel() for tensor in tensors), VECTOR_ELEMENTS * self.group.size
        flat = tensors[0].new_zeros(-(-length // unit) * unit)
        for part, tensor in zip(self.parts(flat, tensors), tensors, strict=True):
            part.copy_(tensor.detach())
        return flat

    def parts(self, flat: torch.Tensor, like: Tensors) -> Tensors:
        """Return the beginning of a flat tensor as views in the shapes of `like`."""
        sizes = [tensor.numel() for tensor in like]
        views = flat[: sum(sizes)].split(sizes)
        return [view.view(tensor.shape) for view, tensor in zip(views, like, strict=True)]

    def mean(self, tensors: Tensors) -> Tensors:
        """Return the mean over present replicas of tensors of one type, in new tensors.

        Every rank of the group calls it.
        """
        flat, done = self.flat(tensors), self._round(self.all_finite(tensors) & self.present)
        Averaging().average(flat, done, self.group)
        return self.parts(flat, tensors)

    def all_finite(self, tensors: Tensors) -> torch.Tensor:
        """Return True if the tensors are finite on all tensor ranks, shape (); all of them call it."""
        finite = torch.stack([tensor.detach().isfinite().all() for tensor in tensors]).all()
        return self._ranks.gather(finite.float()).bool().all() if self._ranks.size > 1 else finite

    def note_rate(self) -> None:
        """Add the learning rate of a step to the round; it is that of the first group of parameters."""
        self.rates += torch.tensor([self._optimizer.param_groups[0]["lr"], 1.0], dtype=torch.float64)

    def end_round(self, number: int, seed: int) -> LocalRound:
        """Return the round with this number, and begin the next one."""
        total, steps = self.rates.tolist()
        self.rates.zero_()
        rate = total / max(steps, 1.0)
        return self._round(self.finite, rate, number, seed)

    def _round(
        self, finite: torch.Tensor, learning_rate: float = 0.0, number: int = 0, seed: int = 0
    ) -> LocalRound:
        return LocalRound(
            name=self.name,
            share=self.share,
            finite=finite,
            learning_rate=learning_rate,
            number=number,
            seed=seed,
        )

    def give(self, weights: Tensors) -> None:
        """Set the stepped weights to these values, in their shapes."""
        for mine, value in zip(self.weights, weights, strict=True):
            mine.detach().copy_(value)
        self.publish()

    def publish(self) -> None:
        """Round masters that were changed to the weights of the stage."""
        if self._stepped is not None:
            self._stepped.publish()

    def clear_states(self, lost: torch.Tensor) -> None:
        """Set the optimizer's states to zero if `lost`, shape (), is True; the host does not read it."""
        for weights in self.weights:
            for state in self._optimizer.state.get(weights, {}).values():
                if isinstance(state, torch.Tensor) and state.ndim and state.is_floating_point():
                    state.masked_fill_(lost.to(state.device), 0.0)


def averaged_parts(resources: Resources, stage: int, share: float, group: Group) -> tuple[AveragedPart, ...]:
    """Return the parts of a stage: its own weights, and its copies of weights that other stages have, too.

    Copies are averaged apart. Then they decide alike in all stages, and stay equal bit by bit.
    """
    module, stepped = resources.stages[stage], resources.stepped.get(stage)
    apart = {id(copy) for one in resources.methods.values() for copy in one.apart(stage)}
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    pairs = (
        [(one, one) for one in module.parameters() if one.requires_grad]
        if stepped is None
        else [(piece.parameter, piece.stepped) for piece in stepped.pieces]
    )
    found = []
    for name, copies in ((f"{stage}", False), (f"{stage}/copies", True)):
        weights = {names[id(one)]: tensor for one, tensor in pairs if (id(one) in apart) == copies}
        if weights:
            optimizer = resources.optimizers[stage]
            found.append(AveragedPart(name, module, optimizer, stepped, weights, share, group))
    return tuple(found)
