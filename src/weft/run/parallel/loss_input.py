"""`loss_input`: the input of a loss function from a last stage's output, whole or this rank's share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import torch
from torch import nn

from weft.errors import InputError, Violation
from weft.run.parallel.context.divided_tokens import DividedTokens
from weft.run.parallel.divided_logits import DividedLogits
from weft.run.parallel.tensor_stage import token_ranks
from weft.run.parallel.unmade_logits import LossKernel, UnmadeLogits
from weft.run.state.precision import at_least_fp32

Divided = DividedLogits | DividedTokens | UnmadeLogits


@runtime_checkable
class DividesOutput(Protocol):
    """A last stage with an output that may be a share, or the input of a loss kernel."""

    loss_kernel: LossKernel | None

    def divided(self, output: torch.Tensor) -> Divided | None:
        """Return the output as a share of the whole, in fp32 or wider, or as unmade logits; None if it is
        whole."""
        ...


def loss_input(module: nn.Module, loss_function: object) -> Callable[[torch.Tensor], torch.Tensor | Divided]:
    """Return the function from a last stage's output to the input of its loss, in fp32 or wider.

    A function with the attribute `takes_divided_tokens` or `takes_divided_logits` gets that share; any other
    gets all logits. If both are divided, a function that takes tokens gets its tokens. One that takes columns
    only gets its columns for all tokens. A loss kernel needs a function that takes what the kernel leaves.

    Raises:
        InputError: when the stage has a loss kernel and the function needs made logits.
    """
    # The check looks through the protocol's names, so it is made once.
    if not isinstance(module, DividesOutput):
        return at_least_fp32
    if module.loss_kernel is not None:
        _require_unmade(module, loss_function)

    def taken(output: torch.Tensor) -> torch.Tensor | Divided:
        share = module.divided(output)
        if share is None:
            return at_least_fp32(output)
        all_tokens: torch.Tensor | Divided = share
        if isinstance(share, DividedTokens):
            if getattr(loss_function, share.declared, False):
                return share
            all_tokens = share.with_all_tokens()
        if isinstance(all_tokens, DividedLogits) and not getattr(loss_function, all_tokens.declared, False):
            return all_tokens.whole()
        return all_tokens

    return taken


def _require_unmade(module: nn.Module, loss_function: object) -> None:
    """Refuse a loss function that does not take unmade logits, of the stage's tokens.

    Raises:
        InputError: naming the attributes that the function lacks.
    """
    divides_tokens = token_ranks(module).size > 1
    needed = [UnmadeLogits.declared, *([DividedTokens.declared] if divides_tokens else [])]
    lacking = [name for name in needed if not getattr(loss_function, name, False)]
    if lacking:
        problem = f"the loss function needs all logits: it does not declare {' or '.join(lacking)}"
        raise InputError(Violation("plan.loss", problem, "whole"))
