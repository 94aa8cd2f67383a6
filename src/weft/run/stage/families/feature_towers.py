"""Stages of DLRM and of Uno of CANDLE: rectified linear layers, and tables with sums of looked-up rows."""

from __future__ import annotations

import torch
from torch import nn

from weft.describe.families.multimodal import towers_of
from weft.describe.model import ModelConfig
from weft.run.stage.families.convolution import HEAD_DEVIATION, as_computed
from weft.run.stage.families.graph_family import GraphFamilyStage
from weft.run.stage.stage_module import Initial


class JoinedLinear(nn.Module):
    """A product of the concatenation of vectors, and a rectifier unless it is the last one."""

    def __init__(self, inner: int, columns: int, *, rectified: bool) -> None:
        super().__init__()
        self.product = nn.Linear(inner, columns)
        self._rectified = rectified

    def forward(self, *vectors: torch.Tensor) -> torch.Tensor:
        """Return (b, columns) of vectors (b, ...) that together have the inner size."""
        joined = vectors[0] if len(vectors) == 1 else torch.cat(vectors, 1)
        result: torch.Tensor = self.product(as_computed(joined, self))
        return torch.relu(result) if self._rectified else result


class FeatureTowerStage(GraphFamilyStage):
    """Dense towers read vectors (b, features), tables row numbers (b, rows); the output is (b, 1).

    Initial weights follow He et al. (arXiv 1502.01852), the last layer's are small. Biases begin at 0.
    """

    @staticmethod
    def sample_shape(config: ModelConfig, layer: str) -> tuple[int, ...]:
        if layer == "head":
            return (config.vocabulary,)
        return (config.hidden if layer.startswith("table") else config.feed_forward,)

    def make(self, layer: str, number: int, inner: int) -> nn.Module:
        towers = towers_of(self.config)
        if layer.startswith("table"):
            rows = towers.tables[number - len(towers.features)]
            return nn.EmbeddingBag(rows, self.config.hidden, mode="sum")
        if layer == "head":
            return JoinedLinear(inner, self.config.vocabulary, rectified=False)
        return JoinedLinear(inner or towers.features[number], self.config.feed_forward, rectified=True)

    def initial(self, name: str) -> Initial:
        weight = self.get_parameter(name)
        if weight.dim() == 1:
            return Initial()
        if name.startswith("head"):
            return Initial(deviation=HEAD_DEVIATION)
        if name.startswith("table"):
            return Initial(deviation=weight.shape[0] ** -0.5)
        return Initial(deviation=(2.0 / weight.shape[1]) ** 0.5)
