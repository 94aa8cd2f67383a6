"""Layers that keep little for the backward pass, and run again in it.

Under full recomputation a layer keeps its input alone (Chen et al., Training Deep Nets with Sublinear Memory
Cost, arXiv 1604.06174). Under selective recomputation it also keeps the outputs of its matrix products,
convolutions and attention kernels. Korthikanti et al. (arXiv 2205.05198) choose these operations by their
cost for the memory that they free.
A recomputed layer has the same graph as a kept one. Only the tensors that its nodes have saved are computed
again, all of them when the first node needs one. `torch.utils.checkpoint` does the same, but runs a layer
again for every backward call. These are two calls if a backward pass is split in two parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from weft.errors import RunError
from weft.run.stage.layers import Made, RunLayer

_aten = torch.ops.aten
# Operations with a time that is worth the memory of their outputs. The batched products of an attention
# without its own kernel are not among them: selective recomputation exists to drop their scores.
PRODUCTS = frozenset(
    {
        _aten.mm.default,
        _aten.addmm.default,
        _aten._grouped_mm.default,
        _aten.convolution.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_cudnn_attention.default,
    }
)


def recomputed(
    function: Callable[..., Made], *inputs: torch.Tensor, draws: bool, keep_products: bool = False
) -> Made:
    """Return `function(*inputs)`, and keep only the inputs for the backward pass.

    The function must compute the same when it is called again. It runs again once for all backward calls on
    its graph, up to the last value that they need.

    Args:
        draws: True if it draws from torch's generators (dropout); it then draws the same numbers again.
        keep_products: also keep the outputs of the operations in `PRODUCTS`, instead of calling them again.

    Raises:
        RunError: in the backward pass, if the function saved fewer tensors in its second run, or wrote over
            kept outputs.
    """
    layer = _Layer(function, inputs, draws)
    with saved_tensors_hooks(layer.keep, _Saved.get), layer.products if keep_products else nullcontext():
        value = function(*inputs)
    layer.products.forget_unused()
    return value


class _Saved:
    """A placeholder for one tensor that a node of the graph has saved; the node is its last owner."""

    __slots__ = ("__weakref__", "layer", "tensor")

    def __init__(self, layer: _Layer) -> None:
        self.layer = layer
        self.tensor: torch.Tensor | None = None

    def get(self) -> torch.Tensor:
        if self.tensor is None:
            self.layer.run_again()
        if self.tensor is None:
            raise RunError("a recomputed layer did not compute again what it had computed at first")
        return self.tensor


class _Layer:
    """One run of a layer: its inputs, and the tensors that its nodes have saved, in their order."""

    def __init__(self, function: Callable[..., object], inputs: Sequence[torch.Tensor], draws: bool) -> None:
        self._function = function
        # Detached, so that the layer does not hold the graph of the layers before it.
        self._inputs = [one.detach().requires_grad_(one.requires_grad) for one in inputs]
        self._generators = _generator_states(inputs[0].device) if draws else {}
        self._saved: list[ref[_Saved]] = []
        self.products = _Products()

    def keep(self, tensor: torch.Tensor) -> _Saved:
        self.products.needed()
        saved = _Saved(self)
        self._saved.append(ref(saved))
        return saved

    def run_again(self) -> None:
        """Run the layer again, and fill in the saved tensors of the nodes that still exist."""
        waiting = iter(self._saved)
        left = len(self._saved)

        def fill_in(tensor: torch.Tensor) -> None:
            nonlocal left
            saved = next(waiting)()
            if saved is not None:
                saved.tensor = tensor.detach()
            left -= 1
            if not left:
                raise _Complete

        with (
            _drawing_from(self._generators),
            torch.enable_grad(),
            self.products.reused(),
            saved_tensors_hooks(fill_in, _never_needed),
            suppress(_Complete),
        ):
            self._function(*self._inputs)


class _Products(TorchDispatchMode):
    """The outputs of products in a layer's first run; `reused` returns them again."""

    def __init__(self) -> None:
        # Not `super()`: torch's functions may lack types, but mypy does not see that `super()` is torch's.
        TorchDispatchMode.__init__(self)
        self._kept: list[tuple[Any, list[int]]] = []
        self._needed = 0

    def needed(self) -> None:
        """Note that a tensor is saved: the outputs before it are needed to compute it again."""
        self._needed = len(self._kept)

    def forget_unused(self) -> None:
        """Drop the outputs after the last saved tensor: the second run ends there."""
        del self._kept[self._needed :]

    def reused(self) -> AbstractContextManager[object]:
        return _Reused(self._kept) if self._kept else nullcontext()

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        given = function(*arguments, **(options or {}))
        if function in PRODUCTS:
            kept = _detached(given)
            self._kept.append((kept, _versions(kept)))
        return given


class _Reused(TorchDispatchMode):
    def __init__(self, kept: list[tuple[Any, list[int]]]) -> None:
        TorchDispatchMode.__init__(self)
        self._left = iter(kept)

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        if function not in PRODUCTS:
            return function(*arguments, **(options or {}))
        given, versions = next(self._left)
        if _versions(given) != versions:
            raise RunError(f"a recomputed layer wrote over what {function} gave; recompute it fully")
        return _detached(given)


def _detached(given: Any) -> Any:
    """Return the same tensors without a graph; writes to one also count in the other's version."""
    # A dispatch mode works below the layer that shares the counters: let it in.
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tree_map_only(torch.Tensor, torch.Tensor.detach, given)


def _versions(given: Any) -> list[int]:
    return [leaf._version for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor)]


class _Complete(Exception):  # noqa: N818  (it ends a run and is no error)
    """The end of a layer's second run: nothing after it is needed."""


def _never_needed(nothing: None) -> torch.Tensor:
    raise RunError("a recomputed layer may not differentiate inside its forward pass")


def _generator_states(device: torch.device) -> dict[torch.device, torch.Tensor]:
    """Return the states of the generators that a layer on the device draws from."""
    states = {torch.device("cpu"): torch.get_rng_state()}
    if device.type != "cpu":
        states[device] = torch.get_device_module(device).get_rng_state(device)
    return states


@contextmanager
def _drawing_from(states: dict[torch.device, torch.Tensor]) -> Iterator[None]:
    """Let generators draw from these states, and restore their own states afterwards."""
    before = {key: state for device in states for key, state in _generator_states(device).items()}
    _set_generators(states)
    try:
        yield
    finally:
        _set_generators(before)


def _set_generators(states: dict[torch.device, torch.Tensor]) -> None:
    for device, state in states.items():
        if device.type == "cpu":
            torch.set_rng_state(state)
        else:
            torch.get_device_module(device).set_rng_state(state, device)


PARTS = (
    RunLayer(word="full", run=recomputed),
    RunLayer(word="selective", run=partial(recomputed, keep_products=True)),
)
