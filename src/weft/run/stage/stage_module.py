"""`StageModule`: a run of a model's layers as one module, with initial values independent of the cut."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

import torch
from torch import nn

from weft.describe.model import ModelConfig
from weft.describe.plan import Choice
from weft.randomness import counter_seed
from weft.run.parallel.context.divided_tokens import DividedTokens
from weft.run.parallel.context.ranks import ContextRanks
from weft.run.parallel.divided_logits import DividedLogits
from weft.run.parallel.expert_ranks import ExpertRanks
from weft.run.parallel.tensor_layers import (
    DividedTable,
    Division,
    HeldByTensorRanks,
    Share,
    end_regions,
    enter_before,
)
from weft.run.parallel.tensor_parallel import TensorRanks
from weft.run.parallel.token_grid import TokenGrid
from weft.run.parallel.token_ranks import TokenRanks
from weft.run.parallel.unmade_logits import LossKernel, UnmadeLogits
from weft.run.stage.documents import Documents
from weft.run.stage.layers import LayerFunction
from weft.run.stage.pieces import Branch
from weft.run.state.precision import at_least_fp32, lower_precision


class RunnableStage(Protocol):
    """The runtime's interface to a stage; it can run any `nn.Module` with these methods.

    A call takes the micro-batch's inputs (first stage) or the previous stage's output. It returns the next
    stage's input (last stage: the loss function's input). A stage may also name its layers
    (`weft.run.stage.layers.Layered`) and the weights it shares with other stages
    (`weft.methods.tying.runtime.Tied`).
    """

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor: ...

    def input_shape(self, micro_batch_size: int, sequence: int) -> tuple[int, ...]:
        """Return the shape of one micro-batch's input."""
        ...

    def output_shape(self, micro_batch_size: int, sequence: int) -> tuple[int, ...]:
        """Return the shape of one micro-batch's output."""
        ...


@dataclass(frozen=True, slots=True)
class Initial:
    """Initial values of a parameter: `mean` plus normal noise of standard deviation `deviation`.

    `made_of_uniform` makes the values of uniform numbers from 0 to 1 instead.
    """

    mean: float = 0.0
    deviation: float = 0.0
    made_of_uniform: Callable[[torch.Tensor], torch.Tensor] | None = None


class AddedModule(nn.Module, ABC):
    """A module that a method adds to a stage; its parameters are drawn, stepped and kept like all others."""

    @abstractmethod
    def initial(self, name: str) -> Initial:
        """Return the rule for its parameter of that name."""


@dataclass(frozen=True, kw_only=True)
class ChangedStageOf:
    """A method's change to a stage on the meta device, divided already; the method contributes it.

    `change` gets the stage, the positions of its layers and the job's choice of the method. It adds modules
    (`StageModule.add`), and may freeze parameters.
    """

    method: str
    change: Callable[[StageModule, Sequence[int], Choice], None]


class StageModule(nn.Module, ABC):
    """Layers of a known family's model: layer 0 embeds, 1 to n are blocks, n + 1 is norm and head.

    Submodules have their names in the `transformers` model, so that `state_dict` has its names too. With tied
    embeddings the last stage has a copy of the token table, under its name in the first stage. Modules that
    methods add have names that no submodule of the model has. Parameters without `requires_grad` are frozen.
    """

    # Name of the module with the token table, which a tied head multiplies with; empty without a table.
    token_table: str = ""

    # How tensor ranks hold parameters, by the end of their names; others are whole and on the stream.
    held: Mapping[str, HeldByTensorRanks] = MappingProxyType({})
    # In a block: the regions that begin with products divided by columns, and the modules that end them:
    # products divided by rows, or mixtures of experts.
    regions: tuple[str, ...] = ()
    region_ends: tuple[str, ...] = ()

    def __init__(self, config: ModelConfig, layers: Sequence[int]) -> None:
        super().__init__()
        self.config = config
        self.embeds = layers[0] == 0
        self.ends = layers[-1] == config.layers + 1
        self.has_table = self.embeds or (self.ends and config.tied_embeddings)
        self.block_indices = tuple(layer - 1 for layer in layers if 0 < layer <= config.layers)
        self.tensor = TensorRanks()
        self.context = ContextRanks()
        self.expert = ExpertRanks()
        # Of parameters over tensor ranks, and over expert ranks.
        self.divisions: Mapping[str, Division] = {}
        self.expert_divisions: Mapping[str, Division] = {}
        self.added: frozenset[str] = frozenset()
        # Of the micro-batch whose forward pass begins; None if samples are not packed.
        self.documents: Documents | None = None
        # Names of the model's own parameters without gradients; no optimizer changes them.
        self.unlearned: frozenset[str] = frozenset()
        # By the name of a frozen parameter, what packs it; methods add them.
        self.packers: dict[str, Callable[[], None]] = {}
        # Makes the logits with the loss; None for a stage that makes all of them before it.
        self.loss_kernel: LossKernel | None = None

    @classmethod
    def load(cls, family: str) -> None:
        """Import the modules that stages of a family need, beside that of this class."""

    def add(self, name: str, module: AddedModule, held: HeldByTensorRanks | None = None) -> None:
        """Add a submodule that is no part of the model, at the end of a path of names.

        `held`: how tensor ranks hold its parameters, all of them alike; None: whole, and on the stream.
        """
        path, _, leaf = name.rpartition(".")
        self.get_submodule(path).add_module(leaf, module)
        self.added |= {name}
        if held is None:
            return
        self.held = {f"{name}.{own}": held for own, _ in module.named_parameters()} | dict(self.held)
        if held.axis is not None and self.tensor.size > 1:
            self.divisions = dict(self.divisions) | {
                f"{name}.{own}": Division(held.axis, held.blocks, parameter.shape[held.axis])
                for own, parameter in module.named_parameters()
            }

    def pack(self, name: str) -> None:
        """Pack the parameter of that name, which has its value, if a method packs it and has not yet."""
        packer = self.packers.pop(name, None)
        if packer is not None:
            packer()

    def owner(self, name: str) -> str | None:
        """Return the path of the added module that has the tensor of that name; None for the model's own."""
        return next((path for path in self.added if name.startswith(f"{path}.")), None)

    @property
    def token_ranks(self) -> TokenRanks:
        """The ranks that divide the stage's tokens, its samples, or both."""
        if self.context.size > 1 and self.expert.size > 1:
            return TokenGrid(self.expert, self.context)
        return self.context if self.expert.size == 1 else self.expert

    def share(self, name: str) -> Share:
        """Return this rank's share of a parameter by name; of one that no ranks divide, all of it."""
        each = (self.divisions, self.tensor), (self.expert_divisions, self.expert)
        return Share(tuple((divisions[name], ranks) for divisions, ranks in each if name in divisions))

    @property
    def shares(self) -> Mapping[str, Share]:
        """This rank's shares of the parameters that ranks of its replica divide, by name."""
        return {name: self.share(name) for name in (*self.divisions, *self.expert_divisions)}

    @property
    def blocks(self) -> Sequence[nn.Module]:
        """The stage's blocks, in order; empty for a family that tensor ranks cannot divide."""
        return ()

    def block(self, layer: int) -> nn.Module:
        """Return the block at a position in the model; the stage must have it."""
        return self.blocks[self.block_indices.index(layer - 1)]

    @abstractmethod
    def initial(self, name: str) -> Initial:
        """Return the family's rule for the parameter of that name."""

    def initial_of(self, name: str) -> Initial:
        """Return the rule for any parameter, also for added modules."""
        owner = self.owner(name)
        if owner is None:
            return self.initial(name)
        module = self.get_submodule(owner)
        assert isinstance(module, AddedModule)
        return module.initial(name.removeprefix(f"{owner}."))

    @abstractmethod
    def layer_functions(self, inputs: torch.Tensor) -> Sequence[LayerFunction]:
        """Return the stage's layers, each from the layer before it (the first from `inputs`) to the next one.

        A stage that recomputes keeps values for its backward pass only between them.
        """

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        value = inputs
        for function in self.layer_functions(inputs):
            value = function(value)
        return value

    def branches(self, inputs: torch.Tensor) -> Iterable[Branch]:
        """Return the branches of the stage's blocks, in order; empty for a family that cannot be divided."""
        return ()

    def look_up(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the rows of the token table, or this rank's part of them."""
        table: nn.Module = self.get_submodule(self.token_table)
        rows: torch.Tensor = table(self.token_ranks.own_tokens(tokens))
        return rows

    def embed(
        self, rows: torch.Tensor, tokens: torch.Tensor, documents: Documents | None = None
    ) -> torch.Tensor:
        """Return the stream, made from rows of the token table; `documents` give the tokens' positions."""
        return rows

    def last_norm(self, stream: torch.Tensor) -> torch.Tensor:
        """Return the vectors that are multiplied with the vocabulary."""
        return stream

    def multiply_out(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits, or this rank's columns of them."""
        return hidden

    @property
    def head_weights(self) -> tuple[nn.Parameter, ...]:
        """The weights that compute the logits."""
        return ()

    def region_ends_of(self, index: int) -> tuple[str, ...]:
        """Return the names of the modules that end the regions of a block of the model, in order."""
        return self.region_ends

    def narrow(self, block: nn.Module, size: int) -> None:
        """Set the divided sizes of a block's modules; most read them from their weights."""

    def divide(self, ranks: TensorRanks) -> None:
        """Become one tensor rank's share of a stage that lies whole on the meta device.

        `materialise` later gives the parameters their divided shapes with their values.
        """
        self.divisions = self.possible_divisions()
        self.tensor = ranks
        for index, block in zip(self.block_indices, self.blocks, strict=True):
            self.narrow(block, ranks.size)
            end_regions(block, self.region_ends_of(index), ranks)
            for region in self.regions:
                enter_before(block.get_submodule(region), ranks)
        if self.token_table and self.has_table:
            path, _, leaf = self.token_table.rpartition(".")
            parent = self.get_submodule(path)
            setattr(parent, leaf, DividedTable(getattr(parent, leaf), ranks))

    def possible_divisions(self) -> Mapping[str, Division]:
        """Return the divisions of parameters over tensor ranks, also of a stage that none divide."""
        if self.tensor.size > 1:
            return self.divisions
        return {
            name: Division(held.axis, held.blocks, parameter.shape[held.axis])
            for name, parameter in self.named_parameters()
            if (held := self._held(name)).axis is not None
        }

    def spread(self, ranks: ContextRanks) -> None:
        """Compute one context rank's tokens only."""
        # This imports all modelling code of `transformers`, which other stages do not need.
        from weft.run.parallel.context.attention import spread_tokens

        self.context = ranks
        spread_tokens(self, ranks)

    def share_experts(self, ranks: ExpertRanks) -> None:
        """Hold one expert rank's share of the experts, and compute its samples only."""
        self.expert = ranks

    def own_tokens(self, whole: torch.Tensor, dimension: int = 1) -> torch.Tensor:
        """Return this rank's part of a value with all tokens, as its stream begins."""
        return self.tensor.own_tokens(self.context.own_tokens(whole, dimension), dimension)

    def stream_tokens(self, sequence: int) -> int:
        """Return the number of a sample's tokens on this rank between layers."""
        return self.tensor.stream_tokens(sequence // self.context.size)

    def _held(self, name: str) -> HeldByTensorRanks:
        return next((held for end, held in self.held.items() if name.endswith(end)), HeldByTensorRanks())

    def summed_parameters(self) -> tuple[nn.Parameter, ...]:
        """Return parameters with gradients that tensor ranks add up, of their own tokens or heads."""
        if self.tensor.size == 1:
            return ()
        whole = (
            (self._held(name), one) for name, one in self.named_parameters() if name not in self.divisions
        )
        divides = self.tensor.divides_sequence
        return tuple(one for held, one in whole if held.in_region or (divides and held.on_stream))

    def logits(
        self, stream: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Multiply the stream (b, tokens, hidden) by this rank's vocabulary: (b, own s, columns).

        With a loss kernel, return the other factor of the product, (b, own s, hidden).
        """
        hidden = self.tensor.enter(stream)
        if self.loss_kernel is not None:
            return hidden
        return nn.functional.linear(hidden, *self._own_rows(weight, bias))

    def _own_rows(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the rows of this rank's vocabulary; parameters may end with rows that nobody reads."""
        columns = len(self.tensor.share(self.config.vocabulary))
        if columns == len(weight):
            return weight, bias
        return weight[:columns], None if bias is None else bias[:columns]

    def divided(self, output: torch.Tensor) -> DividedLogits | DividedTokens | UnmadeLogits | None:
        """Return the last stage's output as a share of the logits; None if it has all of them.

        The share is in fp32 or wider. With a loss kernel, return unmade logits.
        """
        share: DividedLogits | UnmadeLogits | None = None
        if self.loss_kernel is not None:
            own = self._own_rows(*self.head_weights)
            share = self.loss_kernel(output, *own, self.config.vocabulary, self.tensor)
        elif self.tensor.size > 1 and self.token_table:
            share = DividedLogits(at_least_fp32(output), self.config.vocabulary, self.tensor)
        if self.token_ranks.size == 1:
            return share
        return DividedTokens(at_least_fp32(output) if share is None else share, self.token_ranks)

    def tied_parameters(self) -> tuple[nn.Parameter, ...]:
        """Return the token table if the model's embedding and head share it across two stages."""
        if not self.config.tied_embeddings or self.embeds == self.ends:
            return ()
        return (self.get_parameter(f"{self.token_table}.weight"),)

    def shared_parameters(self) -> tuple[nn.Parameter, ...]:
        """Return the token table if this stage's embedding and head share it."""
        if not self.config.tied_embeddings or not (self.embeds and self.ends):
            return ()
        return (self.get_parameter(f"{self.token_table}.weight"),)

    def input_shape(self, micro_batch_size: int, sequence: int) -> tuple[int, ...]:
        if self.embeds:
            return (micro_batch_size, sequence)
        return (micro_batch_size // self.expert.size, self.stream_tokens(sequence), self.config.hidden)

    def output_shape(self, micro_batch_size: int, sequence: int) -> tuple[int, ...]:
        if self.ends:
            columns = len(self.tensor.share(self.config.vocabulary))
            last = columns if self.loss_kernel is None else self.config.hidden
            return (micro_batch_size // self.expert.size, sequence // self.context.size, last)
        return (micro_batch_size // self.expert.size, self.stream_tokens(sequence), self.config.hidden)


def frozen_names(stage: nn.Module) -> frozenset[str]:
    """Return the names of the parameters that methods have frozen, in a stage of a known family."""
    if not isinstance(stage, StageModule):
        return frozenset()
    named = stage.named_parameters(remove_duplicate=False)
    return frozenset(name for name, parameter in named if not parameter.requires_grad)


def rest(stage: nn.Module, dtype: torch.dtype) -> None:
    """Give frozen parameters the form in which they lie during training: packed, or in `dtype`.

    They must have their values. A second call changes nothing.
    """
    if isinstance(stage, StageModule):
        for name in list(stage.packers):
            stage.pack(name)
    lower_precision((one for one in stage.parameters() if not one.requires_grad), dtype)


@dataclass(frozen=True, slots=True)
class Filling:
    """The parameters of a new stage whose values are read later, so that none are drawn for them.

    Attributes:
        weights: the model's own, from a folder of weights.
        checkpoint: all that are trained, from a checkpoint.
    """

    weights: bool = False
    checkpoint: bool = False

    def reads(self, stage: StageModule, name: str, parameter: nn.Parameter) -> bool:
        own = stage.owner(name) is None
        return (self.weights and own) or (self.checkpoint and parameter.requires_grad)


def materialise(
    stage: StageModule, seed: int, dtype: torch.dtype, frozen_dtype: torch.dtype, filling: Filling
) -> None:
    """Give every parameter of a stage built on the meta device its initial values, in turn.

    A generator keyed by (seed, parameter name) draws the whole parameter in fp32; a tensor rank keeps its
    share. So any cut and any precision starts from the same numbers. Parameters whose values are read later
    have memory alone, which the system hands out when it is written to. Frozen ones lie in `frozen_dtype`,
    except where they will be packed.
    """
    for name, parameter in list(stage.named_parameters()):
        precision = dtype if parameter.requires_grad or name in stage.packers else frozen_dtype
        share = stage.share(name)
        if filling.reads(stage, name, parameter):
            value = torch.empty(share.own_shape(parameter.shape), dtype=precision)
        else:
            whole = _drawn(parameter.shape, stage.initial_of(name), counter_seed(seed, name))
            value = share.own(whole).to(precision)
        path, _, leaf = name.rpartition(".")
        made = nn.Parameter(value, requires_grad=parameter.requires_grad)
        setattr(stage.get_submodule(path), leaf, made)


def _drawn(shape: Sequence[int], initial: Initial, key: int) -> torch.Tensor:
    value = torch.full(tuple(shape), initial.mean, dtype=torch.float32)
    if initial.made_of_uniform is not None:
        return initial.made_of_uniform(value.uniform_(generator=torch.Generator().manual_seed(key)))
    if initial.deviation:
        value.normal_(initial.mean, initial.deviation, generator=torch.Generator().manual_seed(key))
    return value
