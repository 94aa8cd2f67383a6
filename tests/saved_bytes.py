"""`saved_by_autograd`: the bytes that a forward pass leaves for its backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch


def saved_by_autograd(call: Callable[[], object], own: Iterable[torch.Tensor]) -> int:
    """Return the bytes of all storages that `call` saves, without those of its `own` tensors."""
    left_out = {tensor.untyped_storage().data_ptr() for tensor in own}
    saved: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        # Kept alive, so that no other storage takes its address.
        if tensor.untyped_storage().data_ptr() not in left_out:
            saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        call()
        return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())
