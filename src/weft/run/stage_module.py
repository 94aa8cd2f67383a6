"""A stage: a run of a model's layers as one module, with initial values that do not depend on the cut."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import nn

from weft.describe.model import ModelConfig
from weft.run.randomness import counter_seed
from weft.run.recompute import LayerFunction


class Stage(Protocol):
    """What the runtime asks of a stage; any `nn.Module` with these methods can be run.

    A call takes the micro-batch's inputs (first stage) or the previous stage's output and returns the next
    stage's input (last stage: what the loss function takes). A stage may also say what its layers are
    (`weft.run.recompute.Layered`) and which weights it shares with other stages (`weft.run.tied.Tied`).
    """

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor: ...

    def input_shape(self, micro_batch_size: int, sequence: int) -> tuple[int, ...]:
        """Shape of one micro-batch's input."""
        ...

    def output_shape(self, micro_batch_size: int, sequence: int) -> tuple[int, ...]:
        """Shape of one micro-batch's output."""
        ...


@dataclass(frozen=True, slots=True)
class Initial:
    """Initial values of a parameter: `mean` plus normal noise of standard deviation `deviation`."""

    mean: float = 0.0
    deviation: float = 0.0


class StageModule(nn.Module, ABC):
    """Layers of a decoder of a known family: layer 0 embeds, 1 to n are blocks, n + 1 is norm and head.

    Submodules carry the names they have in the `transformers` model, so that `state_dict` has its names too.
    With tied embeddings the last stage has a copy of the token table, under its name in the first stage.
    """

    # Name of the module with the token table, which a tied head multiplies with.
    token_table: ClassVar[str]

    def __init__(self, config: ModelConfig, layers: Sequence[int]) -> None:
        super().__init__()
        self.config = config
        self.embeds = layers[0] == 0
        self.ends = layers[-1] == config.layers + 1
        self.has_table = self.embeds or (self.ends and config.tied_embeddings)
        self.block_indices = tuple(layer - 1 for layer in layers if 0 < layer <= config.layers)

    @abstractmethod
    def initial(self, name: str) -> Initial:
        """The family's rule for the parameter of that name."""

    @abstractmethod
    def layer_functions(self, inputs: torch.Tensor) -> Sequence[LayerFunction]:
        """The stage's layers, each from the layer before it (the first from `inputs`) to the next one.

        Between them, and nowhere else, a stage that recomputes keeps values for its backward pass.
        """

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        value = inputs
        for function in self.layer_functions(inputs):
            value = function(value)
        return value

    def tied_parameters(self) -> tuple[nn.Parameter, ...]:
        """The token table, where the model's embedding and head share it and lie in two stages."""
        if not self.config.tied_embeddings or self.embeds == self.ends:
            return ()
        return (self.get_parameter(f"{self.token_table}.weight"),)

    def input_shape(self, micro_batch_size: int, sequence: int) -> tuple[int, ...]:
        return (
            (micro_batch_size, sequence) if self.embeds else (micro_batch_size, sequence, self.config.hidden)
        )

    def output_shape(self, micro_batch_size: int, sequence: int) -> tuple[int, ...]:
        width = self.config.vocabulary if self.ends else self.config.hidden
        return (micro_batch_size, sequence, width)


def materialise(stage: StageModule, seed: int, dtype: torch.dtype) -> None:
    """Give every parameter of a stage built on the meta device its initial values, one after the other.

    Values are drawn in fp32 from a generator keyed by (seed, parameter name): any cut and any precision
    starts from the same numbers.
    """
    for name, parameter in list(stage.named_parameters()):
        initial = stage.initial(name)
        value = torch.full(parameter.shape, initial.mean, dtype=torch.float32)
        if initial.deviation:
            generator = torch.Generator().manual_seed(counter_seed(seed, name))
            value.normal_(initial.mean, initial.deviation, generator=generator)
        path, _, leaf = name.rpartition(".")
        setattr(stage.get_submodule(path), leaf, nn.Parameter(value.to(dtype)))
