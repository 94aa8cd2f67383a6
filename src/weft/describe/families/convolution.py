"""Common parts of convolutional networks: maps of channels, and a layer's work summed over its operators.

A convolution counts as the product of its unfolded input and its weight, for every kernel. Rows: samples x
output positions. Inner side: input channels x kernel squared. Columns: output channels (Chellapilla et al.,
2006). Pooling, batch norms and activations are memory-bound.

Kept tensors are the tensors that torch's operators save for backward, each once. A layer counts its input;
the next layer counts its output. So the sum over a whole model is exact. A stage that ends in an activation
additionally keeps its output.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from weft.describe.amount import ZERO, Amount
from weft.describe.families.operator_memory import Operator, OperatorMemory
from weft.describe.families.transformer import (
    LOGITS_COPY_BYTES,
    LOSS_BYTES_PER_LOGIT,
    ONE,
    TOKEN_BYTES,
    passes,
)
from weft.describe.layer import Layer, Matmul, PassWork, Temporaries
from weft.describe.layer_graph import LayerGraph, chain_edges
from weft.describe.model import ModelConfig
from weft.errors import InputError, Violation

# fp32 mean and inverse deviation of every channel of a micro-batch.
BATCH_NORM_BYTES = 8.0
# Indices of the largest values are int64; a dropout's mask has a byte for every element.
INDEX_BYTES = 8.0
MASK_BYTES = 1.0
# Elements moved per element: a batch norm reads twice and writes; see `transformer` for the others.
BATCH_NORM = 3.0
ACTIVATION = 2.0
SUM = 3.0
CROSS_ENTROPY = 6.0


@dataclass(frozen=True, slots=True)
class Maps:
    """A sample between two operators: `channels` maps of `size` x `size`, or a flat vector of `channels`."""

    channels: int
    size: int = 1
    flat: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.channels,) if self.flat else (self.channels, self.size, self.size)

    @property
    def elements(self) -> int:
        return self.channels * self.size**2

    def after(self, channels: int, kernel: int, stride: int, padding: int) -> Maps:
        """Return the output maps of a window that moves over these maps.

        Raises:
            InputError: when the window is larger than the maps.
        """
        size = (self.size + 2 * padding - kernel) // stride + 1
        if size < 1:
            problem = f"maps of {self.size} x {self.size} are too small for a window of {kernel} x {kernel}"
            raise InputError(Violation("model: image_size", f"{problem}; larger images are needed"))
        return Maps(channels, size)


class LayerWork:
    """The work of one layer, summed from its input to its output; call the methods in this order.

    `maps` are the maps after the last added operator, as `Layer.sent` counts them.
    """

    def __init__(self, maps: Maps, *, is_kept: bool = False) -> None:
        self.maps = self._first = maps
        self._products: list[Matmul] = []
        self._parameters = 0
        self._memory = 0.0
        self._kernels = 0
        # Statistics, alike for any number of samples.
        self._kept_bytes = 0.0
        self._operators: list[Operator] = []
        self._shortcut: list[Operator] = []
        # The number of operators before a sum with the shortcut; None without a shortcut.
        self._summed: int | None = None
        # Elements of the layer's input if this layer or the one before it keeps them.
        self._kept_input = maps.elements if is_kept else 0

    @classmethod
    def joined(cls, ends: Sequence[LayerWork]) -> LayerWork:
        """Return the layer that reads several vectors, those before `ends`, and concatenates them first."""
        if len(ends) == 1:
            return ends[0].following()
        work = cls(Maps(sum(one.maps.channels for one in ends), flat=True))
        work._kept_input = sum(one.maps.elements for one in ends if one._is_kept)
        work._move(2.0 * work.maps.elements)
        work._operators.append(between(work.maps, work.maps))
        return work

    def following(self) -> LayerWork:
        """Return the next layer, without any operator yet."""
        return LayerWork(self.maps, is_kept=self._is_kept)

    def convolution(self, channels: int, kernel: int, *, stride: int = 1, padding: int, bias: bool) -> None:
        self._add(*self._convolved(self.maps, channels, kernel, stride, padding, bias=bias))

    def batch_norm(self) -> None:
        self._add(self.maps, self._normalised(self.maps))

    def activation(self) -> None:
        """Add a ReLU, which keeps its output."""
        self._move(ACTIVATION * self.maps.elements)
        self._add(self.maps, between(self.maps, self.maps, keeps_output=True))

    def max_pool(self, kernel: int, *, stride: int, padding: int = 0) -> None:
        result = self.maps.after(self.maps.channels, kernel, stride, padding)
        self._move(self.maps.elements + result.elements)
        indices = INDEX_BYTES * result.elements
        self._add(result, between(self.maps, result, keeps_input=True, more_bytes=indices))

    def mean_pool(self, size: int) -> None:
        """Add means over windows; a mean of whole maps keeps nothing."""
        result = Maps(self.maps.channels, size)
        self._move(self.maps.elements + result.elements)
        self._add(result, between(self.maps, result, keeps_input=size > 1))

    def flatten(self) -> None:
        self.maps = Maps(self.maps.elements, flat=True)

    def linear(self, columns: int) -> None:
        """Add a product of vectors with a weight, and a bias."""
        self._add(*self._convolved(self.maps, columns, 1, 1, 0, bias=True))
        self.flatten()

    def dropout(self) -> None:
        self._move(ACTIVATION * self.maps.elements)
        self._add(self.maps, between(self.maps, self.maps, more_bytes=MASK_BYTES * self.maps.elements))

    def add_shortcut(self, source: Maps, *, stride: int) -> None:
        """Add the layer's input `source`, convolved and normalised if it has another shape."""
        self._summed = len(self._operators)
        if source.channels != self.maps.channels or stride != 1:
            result, product = self._convolved(source, self.maps.channels, 1, stride, 0, bias=False)
            self._shortcut = [replace(product, keeps_input=False), self._normalised(result)]
        self._move(SUM * self.maps.elements)

    def layer(self, name: str, kind: str, *, first: bool = False, classifies: bool = False) -> Layer:
        """Build the layer of all added operators.

        Args:
            first: True if it reads the images, which need no gradient.
            classifies: True if its outputs are logits, for which it computes the loss.
        """
        held = self._held(first)
        kept, kept_bytes = held.kept, held.kept_bytes + Amount.of(self._kept_bytes)
        memory, kernels, temporaries = self._memory, self._kernels, held.temporaries()
        if classifies:
            classes = self.maps.channels
            kept += Amount.of(classes, batch=1)
            kept_bytes += Amount.of(LOSS_BYTES_PER_LOGIT * classes + TOKEN_BYTES, batch=1)
            temporaries += (Temporaries(bytes=Amount.of(LOSS_BYTES_PER_LOGIT * classes, batch=1)),)
            memory += CROSS_ENTROPY * classes
            kernels += 3
        parameters = Amount.of(self._parameters)
        work = passes(
            self._products,
            (),
            memory=Amount.of(memory, batch=1),
            kernels=kernels,
            parameters=parameters,
        )
        if first:
            work["backward_weight"] = PassWork(
                matmuls=work["backward_weight"].matmuls,
                memory=work["backward_weight"].memory + work["backward_input"].memory,
                kernels=work["backward_weight"].kernels + 2 * kernels,
            )
            work["backward_input"] = PassWork()
        return Layer(
            name=name,
            kind=kind,
            parameters=parameters,
            kept=kept,
            kept_bytes=kept_bytes,
            read=Amount.of(self._first.elements, batch=1) if first else ZERO,
            freed=Amount.of(self.maps.channels, batch=1) if classifies else ZERO,
            freed_bytes=Amount.of(LOGITS_COPY_BYTES * self.maps.channels, batch=1) if classifies else ZERO,
            temporaries=temporaries,
            sent=ZERO if classifies else Amount.of(self.maps.elements, batch=1),
            **work,
        )

    @property
    def _is_kept(self) -> bool:
        """True if the producer of `maps` also keeps them."""
        return self._operators[-1].keeps_output if self._operators else self._kept_input > 0

    def _held(self, first: bool) -> OperatorMemory:
        """Return the memory of all added operators; the `first` layer's input needs no gradient."""
        operators, summed = self._operators, self._summed
        if first:
            operators = [replace(operators[0], read=0), *operators[1:]]
        return OperatorMemory(
            kept_input=self._kept_input,
            branch=operators[:summed],
            shortcut=self._shortcut,
            joined=[] if summed is None else operators[summed:],
        )

    def _add(self, result: Maps, operator: Operator) -> None:
        """Add an operator that makes `result` of `maps`; a layer's first operator keeps the layer's input."""
        if not self._operators and operator.keeps_input:
            self._kept_input = operator.read
            operator = replace(operator, keeps_input=False)
        self._operators.append(operator)
        self.maps = result

    def _move(self, elements: float) -> None:
        self._memory += elements
        self._kernels += 1

    def _convolved(
        self, source: Maps, channels: int, kernel: int, stride: int, padding: int, *, bias: bool
    ) -> tuple[Maps, Operator]:
        result = source.after(channels, kernel, stride, padding)
        inner = source.channels * kernel**2
        rows = Amount.of(result.size**2, batch=1)
        self._products.append(Matmul(ONE, rows, Amount.of(inner), Amount.of(channels)))
        self._parameters += channels * (inner + int(bias))
        return result, between(source, result, weight=channels * inner, keeps_input=True)

    def _normalised(self, maps: Maps) -> Operator:
        if maps.size < 2:
            problem = "a batch norm would see maps of 1 x 1, of which one sample has no variance"
            raise InputError(Violation("model: image_size", f"{problem}; larger images are needed"))
        self._move(BATCH_NORM * maps.elements)
        self._parameters += 2 * maps.channels
        self._kept_bytes += BATCH_NORM_BYTES * maps.channels
        return between(maps, maps, keeps_input=True)


def between(
    source: Maps,
    result: Maps,
    *,
    weight: int = 0,
    keeps_input: bool = False,
    keeps_output: bool = False,
    more_bytes: float = 0.0,
) -> Operator:
    """Return the operator that reads `source` and makes `result`; see `Operator`."""
    return Operator(
        read=source.elements,
        made=result.elements,
        weight=weight,
        keeps_input=keeps_input,
        keeps_output=keeps_output,
        more_bytes=more_bytes,
    )


# A layer and its output.
Step = tuple[Layer, Maps]


def images(config: ModelConfig) -> Maps:
    """Return the maps of an image, the input of the first layer."""
    return Maps(config.channels, config.image_size)


def convolutional_graph(config: ModelConfig, steps: Iterable[Step]) -> LayerGraph:
    """Build the graph of a chain of layers; an image counts as one token."""
    layers = tuple(layer for layer, _ in steps)
    return LayerGraph(
        name=config.name,
        layers=layers,
        edges=chain_edges(len(layers)),
        sequence=config.sequence,
        vocabulary=config.vocabulary,
    )


class ConvolutionWindow(NamedTuple):
    """The window of one convolution, and `pooled`: a pool follows it."""

    kernel: int
    stride: int
    padding: int
    pooled: bool


def classifier_steps(
    config: ModelConfig,
    convolutions: Iterable[tuple[int, ConvolutionWindow]],
    *,
    pool: tuple[int, int],
    dropout_first: bool,
) -> Iterator[Step]:
    """Yield convolutions with these channels, each with its activation and pool, then three linear layers.

    `pool` is its size and stride. Dropout is before a linear layer's product, or after its activation.
    """
    assert config.convolutions is not None, "the network has convolutions"
    work = LayerWork(images(config))
    for index, (channels, window) in enumerate(convolutions):
        maps = work.maps
        work.convolution(channels, window.kernel, stride=window.stride, padding=window.padding, bias=True)
        work.activation()
        if window.pooled:
            work.max_pool(pool[0], stride=pool[1])
        kind = kind_of("convolution", maps, work.maps)
        yield work.layer(f"convolution.{index}", kind, first=index == 0), work.maps
        work = work.following()
    work.mean_pool(config.convolutions.pooled_size)
    work.flatten()
    for index in range(2):
        if dropout_first:
            work.dropout()
        work.linear(config.feed_forward)
        work.activation()
        if not dropout_first:
            work.dropout()
        yield work.layer(f"linear.{index}", f"linear.{index}"), work.maps
        work = work.following()
    work.linear(config.vocabulary)
    yield work.layer("head", "head", classifies=True), work.maps


def borders(config: ModelConfig, steps: Iterable[Step]) -> list[tuple[int, ...]]:
    """Return the shape of one sample before the first layer, between two layers, and after the last layer."""
    return [images(config).shape, *(maps.shape for _, maps in steps)]


def kind_of(what: str, before: Maps, after: Maps) -> str:
    """Return a layer's kind; layers of one kind cost the same, so that a kind is measured once."""
    return f"{what}.{before.channels}x{before.size}.{after.channels}x{after.size}"
