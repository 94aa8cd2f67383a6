"""Modules without memory draw no parameter, which the meta device would take milliseconds for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from small_plans import divisible, tiny
from torch.utils._python_dispatch import TorchDispatchMode

from weft.run.stage.families import stage_family
from weft.run.stage.unfilled import unfilled


class Operations(TorchDispatchMode):
    """The names of all operations on tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self,
        function: Any,
        types: Sequence[type],
        arguments: Sequence[Any] = (),
        named: Mapping[str, Any] | None = None,
    ) -> Any:
        self.names.append(function.overloadpacket.__name__)
        return function(*arguments, **(named or {}))


def operations(making: Callable[[], Any]) -> list[str]:
    with Operations() as seen, making():
        config = tiny("gpt")
        stage = stage_family("gpt")(config, range(config.layers + 2))
    assert all(parameter.is_meta for parameter in stage.parameters())
    return [name for name in seen.names if name.startswith(("normal", "uniform"))]


@pytest.mark.parametrize("family", ["gpt", "llama", "bert", "vit"])
def test_a_stage_without_memory_has_the_parameters_of_the_meta_device(family: str) -> None:
    config = divisible(family)
    shapes = []
    for making in (unfilled, lambda: torch.device("meta")):
        with making():
            stage = stage_family(family)(config, range(config.layers + 2))
        assert all(parameter.is_meta for parameter in stage.parameters())
        shapes.append({name: one.shape for name, one in stage.named_parameters()})
    assert shapes[0] == shapes[1] != {}


def test_a_stage_without_memory_draws_nothing() -> None:
    assert operations(lambda: torch.device("meta")) != []
    assert operations(unfilled) == []
