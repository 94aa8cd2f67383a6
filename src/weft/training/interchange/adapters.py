"""Adapters: tensors that a method trains beside a frozen model, merged with its weights or apart."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from weft.bundles import runtime_parts
from weft.describe.model import ModelConfig
from weft.describe.plan import Choice, Plan
from weft.errors import InputError, Violation
from weft.training.checkpoint.tensor_folders import TensorFolder


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """An adapter for peft: its configuration without the base, and a checkpoint's names by its own."""

    configuration: Mapping[str, object]
    names: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class AdapterOf:
    """A method that trains an adapter; the method contributes it.

    `merged` returns a checkpoint's tensors, those of the adapter merged with the model's. `adapter` describes
    the adapter in a checkpoint. Both also get the model and the plan's choice of the method.
    """

    method: str
    merged: Callable[[TensorFolder, ModelConfig, Choice], TensorFolder]
    adapter: Callable[[TensorFolder, ModelConfig, Choice], Adapter]


def merged(source: TensorFolder, config: ModelConfig, plan: Plan) -> TensorFolder:
    """Return the tensors of a plan's checkpoint, with all adapters merged."""
    for one in runtime_parts(AdapterOf) if plan.methods else ():
        choice = plan.method(one.method)
        if choice is not None:
            source = one.merged(source, config, choice)
    return source


def adapter_in(source: TensorFolder, config: ModelConfig, plan: Plan) -> Adapter:
    """Return the adapter in a plan's checkpoint.

    Raises:
        InputError: if no method of the plan trains one.
    """
    for one in runtime_parts(AdapterOf):
        choice = plan.method(one.method)
        if choice is not None:
            found: Adapter = one.adapter(source, config, choice)
            return found
    raise InputError(Violation("adapter", "this run trains all weights of its model, and no adapter"))
