"""`Function`: torch's own class with types for `apply`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch


class Function(torch.autograd.Function):
    """A `torch.autograd.Function` that typed code may apply."""

    if TYPE_CHECKING:

        @classmethod
        def apply(cls, *arguments: Any) -> Any: ...
