"""`loss_input`: the input of a loss function from a last stage's output, whole or this rank's share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import torch

from weft.run.parallel.context.divided_tokens import DividedTokens
from weft.run.parallel.divided_logits import DividedLogits
from weft.run.state.precision import at_least_fp32

Divided = DividedLogits | DividedTokens


@runtime_checkable
class DividesOutput(Protocol):
    """A last stage with an output that may be a share."""

    def divided(self, output: torch.Tensor) -> Divided | None:
        """Return the output as a share of the whole; None if it is whole."""
        ...


def loss_input(module: object, loss_function: object) -> Callable[[torch.Tensor], torch.Tensor | Divided]:
    """Return the function from a last stage's output to the input of its loss, in fp32 or wider.

    A function with the attribute `takes_divided_tokens` or `takes_divided_logits` gets that share; any other
    gets all logits. If both are divided, a function that takes tokens gets its tokens. One that takes columns
    only gets its columns for all tokens.
    """
    # The check looks through the protocol's names, so it is made once.
    if not isinstance(module, DividesOutput):
        return at_least_fp32

    def taken(output: torch.Tensor) -> torch.Tensor | Divided:
        output = at_least_fp32(output)
        share = module.divided(output)
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

    return taken
