"""`causal-lm`: the prediction of every next token of text."""

from __future__ import annotations

import torch

from weft.program.arrays import Ints
from weft.training.data.tokenizers import get_tokenizer
from weft.training.tasks.base import Outputs, TaskSettings, cross_entropy
from weft.training.tasks.text import TextTask


class CausalLanguageModelling(TextTask):
    """Next-token prediction; the loss is in nats per token.

    Raises:
        InputError: if the data is refused or the model's vocabulary is smaller than the tokenizer's.
    """

    def __init__(self, settings: TaskSettings) -> None:
        tokenizer = get_tokenizer(settings.tokenizer)
        classes = f"that of the tokenizer {tokenizer.name}"
        super().__init__(settings, tokenizer, tokenizer.vocabulary, classes)
        self.bytes_per_token = self.corpus.held_out_bytes_per_token

    def batch(self, samples: Ints, *, held_out: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """Return tokens and their next tokens, both int64 of shape (samples, sequence)."""
        tokens = torch.from_numpy(self.windows(samples, held_out=held_out))
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def loss(self, outputs: Outputs, targets: torch.Tensor) -> torch.Tensor:
        """Return the cross entropy of logits (samples, sequence, vocabulary), in fp32 or wider."""
        return cross_entropy(outputs, targets)
