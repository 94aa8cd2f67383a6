"""The costs of one layer from a run without data: products, other operators, and kept activations."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from weft.describe.amount import Amount
from weft.describe.families.transformer import passes
from weft.describe.layer import Layer, Matmul, sample_product
from weft.errors import InputError, Violation

_ELEMENT_BYTES = 4
# Copies of shapes alone, and memory that the next operator fills.
_FREE = (
    "_unsafe_view",
    "detach",
    "lift_fresh",
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "device",
)
# Their time is not that of the elements that they read and write.
_UNKNOWN = (
    "linalg_",
    "_linalg_",
    "fft_",
    "_fft_",
    "cholesky",
    "lu_",
    "svd",
    "_cdist",
    "_ctc_loss",
    "mkldnn_rnn",
)
_GROUPED = ("_grouped_mm", "grouped_mm_fallback")


class Storage(NamedTuple):
    """The memory of a tensor; `floating` if its elements have the precision of the computations."""

    nbytes: int
    floating: bool


@contextmanager
def storages_saved(
    parameters: Iterable[torch.Tensor], known: Collection[int] = ()
) -> Iterator[Mapping[int, Storage]]:
    """Yield each storage that autograd saves in the block for backward passes, no parameters.

    Storages whose addresses are `known` are left out.
    """
    owned = {parameter.untyped_storage()._cdata for parameter in parameters} | set(known)
    found: dict[int, Storage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in owned:
            found[storage._cdata] = Storage(storage.nbytes(), tensor.is_floating_point())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield found


class CountedOperators(TorchDispatchMode):
    """A counter of products by their sizes, and of the elements that other operators read and write.

    Raises:
        InputError: at an operator with unknown cost.
    """

    def __init__(self) -> None:
        # Not `super()`: mypy allows untyped calls only where torch is named.
        TorchDispatchMode.__init__(self)
        self.products: list[Matmul] = []
        self.products_of_values: list[Matmul] = []
        self.elements = 0.0
        self.kernels = 0

    def __torch_dispatch__(
        self, operator: Any, types: Any, arguments: tuple[Any, ...] = (), options: Any = None
    ) -> Any:
        result = operator(*arguments, **(options or {}))
        name = operator.overloadpacket.__name__
        if not self._count_product(name, arguments, result) and not operator.is_view and name not in _FREE:
            if operator.namespace not in ("aten", "prims") or name.startswith(_UNKNOWN):
                raise InputError(Violation("model.build", f"operator {operator.name()} has no known cost"))
            if operator.overloadpacket in flop_registry:
                raise InputError(Violation("model.build", f"operator {operator.name()} has no known cost"))
            written = [one for one in _several(result) if isinstance(one, torch.Tensor)]
            read = [one for value in arguments for one in _several(value) if isinstance(one, torch.Tensor)]
            if written:
                self.elements += sum(value.numel() for value in (*written, *read))
                self.kernels += 1
        return result

    def _count_product(self, name: str, arguments: tuple[Any, ...], result: Any) -> bool:
        """Count an operator if it is a product, and return True if so."""
        if name in ("mm", "addmm"):
            left, weight = arguments[-2:]
            rows, inner = left.shape
            self.products.append(sample_product(1, rows, inner, weight.shape[1]))
        elif name in ("bmm", "baddbmm"):
            left, right = arguments[-2:]
            count, rows, inner = left.shape
            self.products_of_values.append(sample_product(count, rows, inner, right.shape[2]))
        elif name == "convolution":
            self.products.append(_convolution(arguments, result))
        elif name.startswith("_scaled_dot_product"):
            self.products_of_values += _attention(arguments)
        elif name in _GROUPED:
            rows, inner = arguments[0].shape
            self.products.append(sample_product(1, rows, inner, arguments[1].shape[-1]))
        else:
            return False
        return True

    def layer(
        self,
        name: str,
        kind: str,
        *,
        parameters: Iterable[torch.Tensor],
        kept: Iterable[Storage],
        output: torch.Tensor,
    ) -> Layer:
        """Return the layer with the counted work; all amounts but parameters are proportional to samples.

        Parameters without `requires_grad` are frozen.
        """
        storages, counts = list(kept), {True: 0, False: 0}
        for one in parameters:
            counts[one.requires_grad] += one.numel()
        trained = Amount.of(counts[True])
        floating, others = (
            sum(one.nbytes for one in storages if one.floating is which) for which in (True, False)
        )
        return Layer(
            name=name,
            kind=kind,
            parameters=trained,
            frozen=Amount.of(counts[False]),
            kept=Amount.of(floating / _ELEMENT_BYTES, batch=1),
            kept_bytes=Amount.of(others, batch=1),
            sent=Amount.of(output.numel(), batch=1),
            **passes(
                self.products,
                self.products_of_values,
                memory=Amount.of(self.elements, batch=1),
                kernels=self.kernels,
                parameters=trained,
            ),
        )


def _several(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def _convolution(arguments: tuple[Any, ...], result: torch.Tensor) -> Matmul:
    """Return the product of all windows; a transposed convolution has a window for each element it reads."""
    read, weight, transposed = arguments[0], arguments[1], arguments[6]
    windows = read if transposed else result
    rows = math.prod(windows.shape[2:]) * windows.shape[0]
    return sample_product(1, rows, math.prod(weight.shape[1:]), weight.shape[0])


def _attention(arguments: tuple[Any, ...]) -> list[Matmul]:
    """Return the products of scores and of context in an attention kernel; a mask does not shorten them."""
    queries, keys, values = arguments[:3]
    count = Amount.of(math.prod(queries.shape[:-2]), batch=1)
    causal = any(one is True for one in arguments[3:])
    kernel = "flash2-causal" if causal else "flash2"
    rows, inner, columns = queries.shape[-2], queries.shape[-1], keys.shape[-2]
    sizes = ((rows, inner, columns), (rows, columns, values.shape[-1]))
    return [
        Matmul(
            count,
            rows=Amount.of(size[0]),
            inner=Amount.of(size[1]),
            columns=Amount.of(size[2]),
            kernel=kernel,
        )
        for size in sizes
    ]
