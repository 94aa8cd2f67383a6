"""`chat`: the answers of an assistant in conversations, as the next tokens of their text.

The questions are read and never targets. Conversations have unlike numbers of targets. A step's loss is the
mean over all targets of its samples. Each micro-batch weighs as much as its share of them.
"""

from __future__ import annotations

import numpy as np
import torch

from weft.describe.tasks import only_source
from weft.program.arrays import Ints
from weft.run.parallel.divided_logits import IGNORED
from weft.run.workspace import Samples
from weft.training.data.chats import open_chats
from weft.training.data.tokenizers import about, get_tokenizer, require_classes
from weft.training.tasks.base import Outputs, TaskSettings, cross_entropy


class Chat:
    """Prediction of an assistant's answers; the loss is in nats per token of the answers.

    Raises:
        InputError: if the data is refused or the model's vocabulary is smaller than the tokenizer's.
    """

    takes_divided_logits = True
    takes_divided_tokens = True
    takes_unmade_logits = True
    weighs_samples = True

    def __init__(self, settings: TaskSettings) -> None:
        tokenizer = get_tokenizer(settings.tokenizer)
        require_classes(tokenizer, settings.vocabulary, masked=False)
        self.corpus = open_chats(
            only_source(settings.data),
            settings.sequence,
            tokenizer,
            settings.cache,
            packing=settings.packing,
        )
        self.samples = len(self.corpus.training)
        self.held_out_samples = len(self.corpus.held_out)
        self.tokens_per_sample = settings.sequence
        self.fingerprint = self.corpus.fingerprint
        self.about = {**about(tokenizer), "filled": round(self.corpus.training.filled, 3)}
        if self.corpus.warnings:
            self.about["warning"] = "; ".join(self.corpus.warnings)

    def batch(self, samples: Ints, *, held_out: bool = False, among: Ints | None = None) -> Samples:
        """Return tokens (samples, sequence) and targets (samples, sequence + 2), both int64.

        A row of targets holds the next tokens, or `IGNORED` where they are no targets. Two numbers follow:
        the targets of the samples `among`, and the count of these samples. The default is the batch's own.
        With packing, the lengths of conversations follow.
        """
        side = self.corpus.held_out if held_out else self.corpus.training
        rows = side.rows(samples)
        among = samples if among is None else among
        mean = np.broadcast_to([side.counts[among].sum(), len(among)], (len(samples), 2))
        targets = np.concatenate([np.where(rows.asked, rows.targets, IGNORED), mean], axis=1)
        pair = torch.from_numpy(rows.inputs.copy()), torch.from_numpy(targets)
        return (*pair, rows.documents) if rows.documents else pair

    def loss(self, outputs: Outputs, targets: torch.Tensor) -> torch.Tensor:
        """Return the cross entropy of logits (samples, sequence, vocabulary), in fp32 or wider.

        The mean of all micro-batches' results is the mean over the targets of all their samples.
        """
        asked, total, samples = targets[:, :-2].contiguous(), targets[0, -2], targets[0, -1]
        own = (asked != IGNORED).sum().double()
        return cross_entropy(outputs, asked) * (own * samples / (total * len(targets)))
