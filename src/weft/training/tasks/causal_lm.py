"""`causal-lm`: predict every next token of text."""

from __future__ import annotations

import torch

from weft.errors import InputError, Violation
from weft.training.data import open_corpus
from weft.training.tasks.base import Ints, TaskSettings, in_fp32
from weft.training.tokenizers import get_tokenizer


class CausalLanguageModelling:
    """Next-token prediction over bytes; the loss is in nats per token.

    Raises:
        InputError: when the data is refused or the model's vocabulary is smaller than the tokenizer's.
    """

    def __init__(self, settings: TaskSettings) -> None:
        tokenizer = get_tokenizer("bytes")
        if settings.vocabulary < tokenizer.vocabulary:
            allowed = f"at least {tokenizer.vocabulary}, the tokenizer's"
            raise InputError(
                Violation(
                    "model.vocabulary",
                    f"{settings.vocabulary} is too small; allowed: {allowed}",
                    str(tokenizer.vocabulary),
                )
            )
        self._corpus = open_corpus(settings.data, settings.sequence, tokenizer, settings.cache)
        self.samples = len(self._corpus.training)
        self.held_out_samples = len(self._corpus.held_out)
        self.tokens_per_sample = settings.sequence
        self.fingerprint = self._corpus.fingerprint

    def batch(self, samples: Ints, *, held_out: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and the tokens that follow them, both int64 of shape (samples, sequence)."""
        windows = self._corpus.held_out if held_out else self._corpus.training
        tokens = torch.from_numpy(windows.take(samples))
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Cross entropy of logits (samples, sequence, vocabulary), computed in fp32 or wider."""
        return torch.nn.functional.cross_entropy(in_fp32(outputs.flatten(0, 1)), targets.flatten())
