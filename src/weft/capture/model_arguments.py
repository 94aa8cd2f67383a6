"""Checks of what users give to their own models: examples of inputs, and counts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from weft.describe.units import shown
from weft.errors import InputError, Violation

BUILD = "model.build"


def examples_of(given: object) -> tuple[torch.Tensor, ...]:
    """Return the first sample of each input, from a tensor or several.

    Raises:
        InputError: when one is no tensor, or has no sample on its first axis.
    """
    given = (given,) if isinstance(given, torch.Tensor) else given
    examples: tuple[Any, ...] = tuple(given) if isinstance(given, Iterable) else ()
    if any(isinstance(one, torch.Tensor) and one.dim() and not len(one) for one in examples):
        raise InputError(Violation(BUILD, "the example has 0 samples; at least 1 is needed"))
    if not examples or not all(isinstance(one, torch.Tensor) and one.dim() for one in examples):
        problem = "the example must be a tensor or several, each with the samples on its first axis"
        raise InputError(Violation(BUILD, problem))
    return tuple(one[:1].detach() for one in examples)


def require_counts(**counts: int | None) -> None:
    """Check that the counts are positive integers, or None.

    Raises:
        InputError: with each that is not, by its name.
    """
    problems = [
        Violation(BUILD, f"{name} = {shown(count)}: must be a positive integer")
        for name, count in counts.items()
        if count is not None and not (type(count) is int and count > 0)
    ]
    if problems:
        raise InputError(problems)
