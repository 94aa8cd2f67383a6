"""`causal-lm`: the prediction of every next token of text."""

from __future__ import annotations

import torch

from weft.program.arrays import Ints
from weft.training.data.text import open_corpus
from weft.training.data.tokenizers import get_tokenizer
from weft.training.tasks.base import Outputs, TaskSettings, cross_entropy
from weft.training.tasks.text import about_text, require_vocabulary


class CausalLanguageModelling:
    """Next-token prediction; the loss is in nats per token.

    Raises:
        InputError: if the data is refused or the model's vocabulary is smaller than the tokenizer's.
    """

    takes_divided_logits = True
    takes_divided_tokens = True

    def __init__(self, settings: TaskSettings) -> None:
        tokenizer = get_tokenizer(settings.tokenizer)
        require_vocabulary(
            settings.vocabulary, tokenizer.vocabulary, f"that of the tokenizer {tokenizer.name}"
        )
        self._corpus = open_corpus(settings.data, settings.sequence, tokenizer, settings.cache)
        self.samples = len(self._corpus.training)
        self.held_out_samples = len(self._corpus.held_out)
        self.tokens_per_sample = settings.sequence
        self.fingerprint = self._corpus.fingerprint
        self.bytes_per_token = self._corpus.held_out_bytes_per_token
        self.about = about_text(tokenizer, self._corpus)

    def batch(self, samples: Ints, *, held_out: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """Return tokens and their next tokens, both int64 of shape (samples, sequence)."""
        windows = self._corpus.held_out if held_out else self._corpus.training
        tokens = torch.from_numpy(windows.take(samples))
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def loss(self, outputs: Outputs, targets: torch.Tensor) -> torch.Tensor:
        """Return the cross entropy of logits (samples, sequence, vocabulary), in fp32 or wider."""
        return cross_entropy(outputs, targets)
