"""Types of a stage's submodules that torch's own types lack."""

from __future__ import annotations

from collections.abc import ValuesView
from typing import TYPE_CHECKING, Generic, TypeVar

from torch import nn

Kind = TypeVar("Kind", bound=nn.Module)


class Submodules(nn.ModuleDict, Generic[Kind]):
    """A `ModuleDict` with a type for its modules."""

    if TYPE_CHECKING:

        def __getitem__(self, key: str) -> Kind: ...

        def values(self) -> ValuesView[Kind]: ...


def weight_of(module: nn.Embedding | nn.Linear) -> nn.Parameter:
    """Return the weight of a module, which torch's types call a tensor."""
    weight: nn.Parameter = module.weight  # type: ignore[assignment]
    return weight
