"""What a loss function is given of a last stage's output, of which this rank may have a share only."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch

from weft.run.parallel.context.divided_tokens import DividedTokens
from weft.run.parallel.divided_logits import DividedLogits
from weft.run.state.precision import at_least_fp32

Divided = DividedLogits | DividedTokens


@runtime_checkable
class DividesOutput(Protocol):
    """A last stage whose output may be a share."""

    def divided(self, output: torch.Tensor) -> Divided | None:
        """Return its output with what it is a share of, or None where it is whole."""
        ...


def loss_input(module: object, loss_function: object, output: torch.Tensor) -> torch.Tensor | Divided:
    """What a last stage's output is to a loss function, in fp32 or wider.

    One that has `takes_divided_tokens` or `takes_divided_logits` is given such a share as it is, any other
    all logits. Where both are divided, one that takes tokens is given these, one that takes columns alone
    those of all tokens.
    """
    output = at_least_fp32(output)
    share = module.divided(output) if isinstance(module, DividesOutput) else None
    if share is None:
        return output
    all_tokens: torch.Tensor | Divided = share
    if isinstance(share, DividedTokens):
        if getattr(loss_function, share.declared, False):
            return share
        all_tokens = share.with_all_tokens()
    if isinstance(all_tokens, DividedLogits) and not getattr(loss_function, all_tokens.declared, False):
        return all_tokens.whole()
    return all_tokens
