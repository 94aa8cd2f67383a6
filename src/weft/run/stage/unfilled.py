"""`unfilled`: modules without memory, whose parameters are drawn later."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

# Layers of torch and of `transformers` draw their weights by these; on the meta device, a draw takes
# milliseconds.
DRAWS = frozenset({nn.init.normal_, nn.init.uniform_, nn.init.kaiming_uniform_})


@contextmanager
def unfilled() -> Iterator[None]:
    """Make modules on the meta device, without draws of their parameters."""
    with torch.device("meta"), _Undrawn():
        yield


class _Undrawn(TorchFunctionMode):
    """Leaves parameters as they are."""

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        arguments: Sequence[Any] = (),
        named: Mapping[str, Any] | None = None,
    ) -> Any:
        if function in DRAWS:
            return arguments[0] if arguments else (named or {})["tensor"]
        return function(*arguments, **(named or {}))
