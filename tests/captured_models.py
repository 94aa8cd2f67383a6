"""Models that are captured in tests: the published shapes of Inception-V3, GNMT and Transformer, any width.

Each function returns a module, in the state in which it is captured, and an example of its inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import transformers
from torch import nn

Captured = tuple[nn.Module, torch.Tensor | tuple[torch.Tensor, ...]]


class NormedConvolution(nn.Module):
    """A convolution, a batch norm that rests, and a rectifier that works in place."""

    def __init__(self, read: int, given: int, **options: object) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(read, given, bias=False, **options)
        self.norm = nn.BatchNorm2d(given, eps=0.001)
        self.rectifier = nn.ReLU(inplace=True)

    def forward(self, maps: torch.Tensor) -> torch.Tensor:
        return self.rectifier(self.norm(self.convolution(maps)))


class Side(nn.Module):
    """Branches side by side, whose maps are joined."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, maps: torch.Tensor) -> torch.Tensor:
        return torch.cat([branch(maps) for branch in self.branches], 1)


class Sides(Side):
    """One branch, with two ends side by side."""

    def __init__(self, first: nn.Module, *ends: nn.Module) -> None:
        super().__init__(*ends)
        self.first = first

    def forward(self, maps: torch.Tensor) -> torch.Tensor:
        return super().forward(self.first(maps))


def inception(divisor: int = 1, size: int = 299, classes: int = 1000) -> Captured:
    """Inception-V3 (Szegedy et al., arXiv 1512.00567) without its auxiliary head, all widths divided."""

    def one(read: int, given: int, kernel: int | tuple[int, int] = 1, **options: object) -> nn.Module:
        return NormedConvolution(read // divisor, given // divisor, kernel_size=kernel, **options)

    def padded(read: int, given: int, kernel: tuple[int, int]) -> nn.Module:
        return one(read, given, kernel, padding=(kernel[0] // 2, kernel[1] // 2))

    def pooled(read: int, given: int) -> nn.Module:
        return nn.Sequential(nn.AvgPool2d(3, stride=1, padding=1), one(read, given))

    def small(read: int, given: int) -> nn.Module:
        return Side(
            one(read, 64),
            nn.Sequential(one(read, 48), padded(48, 64, (5, 5))),
            nn.Sequential(one(read, 64), padded(64, 96, (3, 3)), padded(96, 96, (3, 3))),
            pooled(read, given),
        )

    def long(inner: int) -> nn.Module:
        across, down = (1, 7), (7, 1)
        return Side(
            one(768, 192),
            nn.Sequential(one(768, inner), padded(inner, inner, across), padded(inner, 192, down)),
            nn.Sequential(
                one(768, inner),
                padded(inner, inner, down),
                padded(inner, inner, across),
                padded(inner, inner, down),
                padded(inner, 192, across),
            ),
            pooled(768, 192),
        )

    def wide(read: int) -> nn.Module:
        ends = partial(Sides)
        return Side(
            one(read, 320),
            ends(one(read, 384), padded(384, 384, (1, 3)), padded(384, 384, (3, 1))),
            ends(
                nn.Sequential(one(read, 448), padded(448, 384, (3, 3))),
                padded(384, 384, (1, 3)),
                padded(384, 384, (3, 1)),
            ),
            pooled(read, 192),
        )

    blocks = nn.Sequential(
        NormedConvolution(3, 32 // divisor, kernel_size=3, stride=2),
        one(32, 32, 3),
        one(32, 64, 3, padding=1),
        nn.MaxPool2d(3, stride=2),
        one(64, 80),
        one(80, 192, 3),
        nn.MaxPool2d(3, stride=2),
        small(192, 32),
        small(256, 64),
        small(288, 64),
        Side(
            one(288, 384, 3, stride=2),
            nn.Sequential(one(288, 64), one(64, 96, 3, padding=1), one(96, 96, 3, stride=2)),
            nn.MaxPool2d(3, stride=2),
        ),
        long(128),
        long(160),
        long(160),
        long(192),
        Side(
            nn.Sequential(one(768, 192), one(192, 320, 3, stride=2)),
            nn.Sequential(
                one(768, 192),
                padded(192, 192, (1, 7)),
                padded(192, 192, (7, 1)),
                one(192, 192, 3, stride=2),
            ),
            nn.MaxPool2d(3, stride=2),
        ),
        wide(1280),
        wide(2048),
    )
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048 // divisor, classes))
    return nn.Sequential(blocks, head).eval(), torch.zeros(1, 3, size, size)


class Translator(nn.Module):
    """GNMT (Wu et al., arXiv 1609.08144): LSTMs, the encoder's first of them both ways, and attention."""

    def __init__(self, layers: int, width: int, vocabulary: int) -> None:
        super().__init__()
        self.source = nn.Embedding(vocabulary, width)
        self.target = nn.Embedding(vocabulary, width)
        both = nn.LSTM(width, width, batch_first=True, bidirectional=True)
        later = [nn.LSTM((1 + (one == 0)) * width, width, batch_first=True) for one in range(layers - 1)]
        self.encoder = nn.ModuleList([both, *later])
        first = nn.LSTM(width, width, batch_first=True)
        self.decoder = nn.ModuleList(
            [first, *(nn.LSTM(2 * width, width, batch_first=True) for _ in range(layers - 1))]
        )
        self.query = nn.Linear(width, width, bias=False)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        value = self.source(source)
        for number, layer in enumerate(self.encoder):
            given, _ = layer(value)
            value = given + value if number > 1 else given
        first, (state, _) = self.decoder[0](self.target(target))
        scores = torch.softmax(self.query(first) @ value.transpose(1, 2), -1)
        context = scores @ value + state[-1][:, None]
        given = first
        for number, layer in enumerate(self.decoder[1:]):
            result, _ = layer(torch.cat([given, context], -1))
            given = result + given if number else result
        return self.head(given)


def gnmt(layers: int = 4, width: int = 512, vocabulary: int = 30000, length: int = 40) -> Captured:
    tokens = torch.zeros(1, length, dtype=torch.long)
    return Translator(layers, width, vocabulary), (tokens, tokens.clone())


class Transformer(nn.Module):
    """torch's transformer (Vaswani et al., arXiv 1706.03762) with tables of tokens, and a causal decoder."""

    def __init__(self, layers: int, width: int, heads: int, vocabulary: int) -> None:
        super().__init__()
        self.table = nn.Embedding(vocabulary, width)
        self.body = nn.Transformer(width, heads, layers, layers, 4 * width, dropout=0.0, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        mask = torch.triu(torch.ones(target.shape[1], target.shape[1], dtype=torch.bool), 1)
        return self.head(self.body(self.table(source), self.table(target), tgt_mask=mask, tgt_is_causal=True))


def transformer(
    layers: int = 6, width: int = 512, heads: int = 8, vocabulary: int = 32000, length: int = 40
) -> Captured:
    tokens = torch.zeros(1, length, dtype=torch.long)
    return Transformer(layers, width, heads, vocabulary), (tokens, tokens.clone())


TEXT = {
    "hidden_size": 16,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "intermediate_size": 32,
    "vocab_size": 50,
}


def hugging_face(name: str, example: torch.Tensor | None = None, **sizes: object) -> Captured:
    """A small model of `transformers` by the names of its configuration and its class."""
    kind, _, _ = name.partition("For")
    config = getattr(transformers, f"{kind.removesuffix('LMHeadModel')}Config")(**(sizes or TEXT))
    config.use_cache = False
    tokens = torch.zeros(1, 6, dtype=torch.long)
    return getattr(transformers, name)(config).eval(), tokens if example is None else example


SMALL: dict[str, Callable[[], Captured]] = {
    "inception": partial(inception, 16, 75, 7),
    "gnmt": partial(gnmt, 3, 8, 11, 5),
    "transformer": partial(transformer, 1, 8, 2, 11, 5),
    "llama": partial(hugging_face, "LlamaForCausalLM", num_key_value_heads=1, **TEXT),
    "qwen2": partial(hugging_face, "Qwen2ForCausalLM", num_key_value_heads=1, **TEXT),
    "gpt2": partial(hugging_face, "GPT2LMHeadModel", n_embd=16, n_head=2, n_layer=2, vocab_size=50),
    "bert": partial(hugging_face, "BertForMaskedLM"),
    "vit": partial(
        hugging_face, "ViTForImageClassification", torch.zeros(1, 3, 8, 8), image_size=8, patch_size=4, **TEXT
    ),
}
