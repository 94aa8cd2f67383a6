"""The auxiliary head on its block's rank: a module of the stage, and a root of its backward pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from weft.describe.model import ModelConfig
from weft.describe.plan import Choice
from weft.errors import InputError, Violation
from weft.methods.auxiliary_head.kinds import HasHead
from weft.methods.auxiliary_head.options import NAME, options_of, read_options
from weft.methods.auxiliary_head.report import METRIC
from weft.run.methods import Making, MethodState, PartOfSum, StateOf
from weft.run.resources import Resources, gradient_weight
from weft.run.stage.roots import Root
from weft.run.stage.stage_module import AddedModule, ChangedStageOf, Initial, StageModule
from weft.run.stage.taps import Passing
from weft.run.state.precision import at_least_fp32
from weft.run.streams import Value
from weft.run.workspace import Workspace

# The name of the module in its stage, and the prefix of its parameters' names.
MODULE = "auxiliary_head"
# The defaults of GPT-2 and Llama, for configurations without `norm_epsilon`.
_EPSILON = {"gpt": 1e-5, "llama": 1e-6}
_DEVIATION = 0.02


class AuxiliaryHead(AddedModule):
    """A norm of the family's kind and a product with the vocabulary; returns logits (b, s, vocabulary)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        epsilon = _EPSILON[config.family] if config.norm_epsilon is None else config.norm_epsilon
        norm = nn.RMSNorm if config.family == "llama" else nn.LayerNorm
        self.norm = norm(config.hidden, eps=epsilon)
        self.product = nn.Linear(config.hidden, config.vocabulary, bias=False)

    def initial(self, name: str) -> Initial:
        if name.startswith("norm"):
            return Initial(mean=1.0 if name.endswith("weight") else 0.0)
        return Initial(deviation=_DEVIATION)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.product(self.norm(hidden))
        return logits


def add_head(stage: StageModule, layers: Sequence[int], choice: Choice) -> None:
    """Add the head to the stage with its block."""
    if read_options(choice).after_block in layers:
        stage.add(MODULE, AuxiliaryHead(stage.config))


class HeadState(MethodState):
    """The head's losses on one rank.

    Raises:
        InputError: if the head's stage was built without it.
    """

    def __init__(self, making: Making) -> None:
        program, options = making.program, options_of(making.plan)
        owed = program.obligations.methods[NAME]
        assert isinstance(owed, HasHead)
        assert options is not None, "a program owes a head to a plan that asks for one"
        self._stage, self._layer = owed.stage, options.after_block
        self._micro_batches = program.micro_batches_of(owed.stage)
        self._mean = 1.0 / (program.micro_batches * program.obligations.split(owed.stage))
        self._weight = options.weight * self._mean
        self._device = making.device
        self._roots: tuple[Root, ...] = ()
        stage = making.stages.get(owed.stage)
        if stage is not None:
            if not isinstance(getattr(stage, MODULE, None), nn.Module):
                problem = f"has no module {MODULE!r}, which the plan's method {NAME} trains there"
                raise InputError(Violation(f"stage {owed.stage}", problem))
            self._weight *= gradient_weight(making.plan, program, owed.stage)

    def begin(self, resources: Resources) -> None:
        if self._stage not in resources.stages:
            return
        head, loss_function = resources.stages[self._stage].get_submodule(MODULE), resources.loss_function
        weight = Value.of(torch.tensor(self._weight, dtype=torch.float64, device=self._device))

        def loss(now: Passing, hidden: torch.Tensor, targets: torch.Tensor | None) -> torch.Tensor:
            assert targets is not None, "a root that reads targets is given them"
            return loss_function(at_least_fp32(head(hidden)), targets)

        root = Root(
            layer=self._layer,
            make=loss,
            coefficient=lambda workspace, now: weight,
            reads_targets=True,
            left_as=METRIC,
        )
        self._roots = (root,)

    def roots(self, stage: int) -> Sequence[Root]:
        return self._roots if stage == self._stage else ()

    def shares(self, workspace: Workspace) -> Mapping[str, PartOfSum]:
        """Return this rank's part of the head's mean loss over the micro-batches of the global batch."""
        if not workspace.training:
            return {}
        keys = ((METRIC, self._stage, number) for number in self._micro_batches)
        return {METRIC: PartOfSum(tuple(workspace.values.pop(key) for key in keys), self._mean)}


PARTS = (ChangedStageOf(method=NAME, change=add_head), StateOf(method=NAME, make=HeadState))
