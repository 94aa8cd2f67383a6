"""`PlacedModel`: the layers of a model on several devices of one process, as a plan places them.

A plan of one replica and one rank for each stage says which layer is on which device. Tensors go to a device
once, as the plan's messages do, and autograd takes the way back. So a user's own loop trains a model that no
single device holds (Baechi, SoCC 2020, section 5).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from weft.describe.families.own import OwnModel, require_model
from weft.describe.layer_graph import LayerGraph
from weft.describe.one_line import one_line
from weft.describe.plan import Plan
from weft.describe.plan_file import given_plan
from weft.describe.units import counted, format_bytes, shown
from weft.errors import InputError, RunError, Violation
from weft.predict.cost.memory import plan_states
from weft.run.stage.families.own import OwnStage
from weft.run.state.precision import STEPPED


@dataclass(frozen=True, slots=True)
class PlacedDevice:
    """A device of this process, and the bytes that its tensors may take; None: all that it has.

    Several may be one processor, each with its own limit, as a rehearsal of a machine with several GPUs.

    Raises:
        InputError: when the limit is no count of bytes.
    """

    device: torch.device
    limit_bytes: int | None = None

    def __post_init__(self) -> None:
        limit = self.limit_bytes
        if limit is not None and (not isinstance(limit, int) or limit < 0):
            raise InputError(Violation("limit_bytes", f"{shown(limit)} is no count of bytes", "3000000000"))


class _Ledger:
    """The bytes that a device's parameters, their states and kept activations take."""

    def __init__(
        self, number: int, limit_bytes: int | None, resident_bytes: int, parameters: Iterable[nn.Parameter]
    ) -> None:
        self.number, self.limit_bytes = number, limit_bytes
        # Backward passes also keep views of weights.
        self._resident = {one.untyped_storage()._cdata for one in parameters}
        self.held_bytes = self.peak_bytes = resident_bytes
        self._storages: dict[int, int] = {}

    def check(self) -> None:
        """Raise an error if the device holds more than it may."""
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)
        if self.limit_bytes is not None and self.held_bytes > self.limit_bytes:
            lacking = format_bytes(self.held_bytes - self.limit_bytes)
            problem = f"device {self.number} lacks {lacking}: its limit is {format_bytes(self.limit_bytes)}"
            raise RunError(problem)

    def keep(self, tensor: torch.Tensor) -> _Kept:
        """Count a tensor that a backward pass needs, once for each storage."""
        kept = _Kept(tensor)
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key not in self._resident:
            if not self._storages.get(key):
                self.held_bytes += size
                self.check()
            self._storages[key] = self._storages.get(key, 0) + 1
            weakref.finalize(kept, self._release, key, size)
        return kept

    def _release(self, key: int, size: int) -> None:
        self._storages[key] -= 1
        if not self._storages[key]:
            del self._storages[key]
            self.held_bytes -= size


class _Kept:
    """A tensor that autograd keeps for a backward pass."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class PlacedModel(nn.Module):
    """A model's layers on the devices of one process.

    Args:
        model: the layers, such as `BlockModel` or `CapturedModel`.
        plan: a Plan, or the path of a plan file, of one replica and one rank for each stage; rank r is
            `devices[r]`.
        devices: those of the plan's ranks, such as "cuda:0" or `PlacedDevice`.
        seed: draws initial values as runs with this seed do.

    Raises:
        InputError: when the plan has several replicas or ranks for a stage, is for another model, or needs
            more devices; when layers that share a parameter are on several devices.
        RunError: when states exceed a device's limit, with the bytes that it lacks.
    """

    def __init__(
        self,
        model: OwnModel,
        plan: Plan | Path | str,
        devices: Sequence[PlacedDevice | torch.device | str],
        *,
        seed: int = 0,
    ) -> None:
        super().__init__()
        plan = given_plan(plan)
        require_model(model, "model", shown(model))
        self._graph = graph = model.layer_graph()
        several = isinstance(devices, Iterable) and not isinstance(devices, str)
        self._devices = [_device(one) for one in (devices if several else [devices])]
        _require_placed(plan, graph, len(self._devices))
        ranks = plan.rank_of_layers
        self._order, self._home = list(ranks), [ranks[layer] for layer in range(len(graph.layers))]
        # The values and the names of any run with this seed.
        whole = OwnStage(model, range(len(graph.layers)), seed, STEPPED[plan.precision])
        for home, module in zip(self._home, whole.layers.values(), strict=True):
            module.to(self._devices[home].device)
        for one, parameter in zip(graph.tied, whole.shared.values(), strict=True):
            parameter.data = parameter.data.to(self._devices[self._home[one.layers[0]]].device)
        self.layers, self.shared = whole.layers, whole.shared
        each = plan_states(plan).total
        owned: list[list[nn.Parameter]] = [[] for _ in self._devices]
        for home, module in zip(self._home, self.layers.values(), strict=True):
            owned[home] += module.parameters()
        for one, parameter in zip(graph.tied, self.shared.values(), strict=True):
            owned[self._home[one.layers[0]]].append(parameter)
        self._ledgers = [
            _Ledger(number, one.limit_bytes, each * sum(own.numel() for own in owned[number]), owned[number])
            for number, one in enumerate(self._devices)
        ]
        for ledger in self._ledgers:
            ledger.check()

    def __repr__(self) -> str:
        return one_line(
            self, f"{counted(len(self.layers), 'layer')} on {counted(len(self._devices), 'device')}"
        )

    @property
    def held_bytes(self) -> list[int]:
        """The bytes of each device now: parameters with their states, and kept activations."""
        return [ledger.held_bytes for ledger in self._ledgers]

    @property
    def peak_bytes(self) -> list[int]:
        """The most of `held_bytes` so far."""
        return [ledger.peak_bytes for ledger in self._ledgers]

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        """Return the last layer's output, on its device.

        Raises:
            InputError: when there are more or fewer inputs than the model reads.
            RunError: when a device would hold more than its limit.
        """
        if len(inputs) != self._graph.input_count:
            problem = f"given {counted(len(inputs), 'input')}; the model reads {self._graph.input_count}"
            raise InputError(Violation("inputs", problem))
        made: dict[int, torch.Tensor] = {}
        moved: dict[tuple[int, int], torch.Tensor] = {}
        for layer in self._order:
            home = self._home[layer]
            device, ledger = self._devices[home].device, self._ledgers[home]
            read: list[torch.Tensor] = [inputs[one].to(device) for one in self._graph.inputs_read[layer]]
            for producer in sorted(self._graph.feeders[layer]):
                if (producer, home) not in moved:
                    moved[producer, home] = made[producer].to(device, non_blocking=True)
                read.append(moved[producer, home])
            with torch.autograd.graph.saved_tensors_hooks(ledger.keep, _unpacked):
                made[layer] = self.layers[str(layer)](*read)
        return made[len(self.layers) - 1]


def _device(given: Any) -> PlacedDevice:
    if isinstance(given, PlacedDevice):
        return given
    try:
        return PlacedDevice(torch.device(given))
    except (RuntimeError, TypeError) as error:
        (line, *_) = str(error).splitlines() if isinstance(error, RuntimeError) else ["no device of torch"]
        raise InputError(Violation("devices", f"{shown(given)}: {line}", "cpu")) from None


def _unpacked(kept: Any) -> torch.Tensor:
    tensor: torch.Tensor = kept.tensor
    return tensor


def _require_placed(plan: Plan, graph: LayerGraph, devices: int) -> None:
    """Refuse plans with other stages than placed ones, of other models, or for more devices."""
    if not plan.has_layers_once:
        problem = "a stage has several replicas or ranks; one process has each layer once"
        raise InputError(Violation("plan", problem, "dp 1, tp 1"))
    problems, layers, homes = [], len(graph.layers), plan.rank_of_layers
    if sorted(homes) != list(range(layers)):
        problems.append(
            Violation("plan", f"its stages do not have the {counted(layers, 'layer')} of the model")
        )
    for one in graph.tied:
        if len({homes.get(layer) for layer in one.layers}) > 1:
            names = " and ".join(graph.layers[layer].name for layer in one.layers)
            problems.append(Violation("plan", f"{names} share a parameter and are on several devices"))
    if plan.ranks > devices:
        problem = f"given {counted(devices, 'device')}, and the plan has {counted(plan.ranks, 'rank')}"
        problems.append(Violation("devices", problem, str(plan.ranks)))
    if problems:
        raise InputError(problems)
