"""`Layer`: one costed layer of a model, and the work of its passes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

from weft.describe.amount import ZERO, Amount, Shape
from weft.describe.one_line import one_line

PLAIN_PRODUCT = "product"
# Of operands that are cast to 8 bits.
FP8_PRODUCT = "fp8-product"
# Of a gradient that a forward pass computes; ranks exchange its result backward.
GRADIENT_PRODUCT = "gradient-product"
# With a side as short as the rank of an adapter. No rank exchanges its result by itself.
LOW_RANK_PRODUCT = "low-rank-product"
# Small products of heads in fp32, for every precision of the others: of linear attention, and of indexers.
FP32_PRODUCT = "fp32-product"


@dataclass(frozen=True, slots=True)
class Matmul:
    """`count` products of a (rows x inner) by an (inner x columns) matrix.

    `kernel` names their kernel: a plain product, one of 8 bits or fp32, of a gradient, or of attention.
    `weft.predict.cost.layer_times` has their speeds.
    """

    count: Amount
    rows: Amount
    inner: Amount
    columns: Amount
    kernel: str = PLAIN_PRODUCT

    def flops(self, shape: Shape) -> float:
        if shape.divides_tokens:
            # Tokens may be counted along two sides, as in scores, but ranks divide the product once.
            return 2.0 * (self.count * self.rows * self.inner * self.columns)(shape)
        return 2.0 * self.count(shape) * self.rows(shape) * self.inner(shape) * self.columns(shape)


@dataclass(frozen=True, slots=True)
class PassWork:
    """The work of one pass of one micro-batch through one layer.

    `memory` counts the elements read and written by memory-bound kernels (norms, activations, residuals,
    lookups, losses); `kernels` counts all launched kernels, with matmuls.
    """

    matmuls: tuple[Matmul, ...] = ()
    memory: Amount = ZERO
    kernels: int = 0

    def flops(self, shape: Shape) -> float:
        return sum(matmul.flops(shape) for matmul in self.matmuls)

    def plus(self, other: PassWork) -> PassWork:
        return PassWork(
            self.matmuls + other.matmuls, self.memory + other.memory, self.kernels + other.kernels
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Temporaries:
    """The memory of one moment of a layer's backward pass, beside its kept activations.

    Attributes:
        elements, bytes: gradients of activations, and copies of them.
        weights: elements of the gradient of a weight. It has the compute precision. Another copy has the
            precision in which gradients are added up, if that is another one.
        rounded: elements in the compute precision that only exist if gradients are added up in another one.
        divided: True, or False, for a moment that only happens if tensor ranks divide the layer, or if they
            do not.
        first: True for a moment before the layer runs forward again, if it recomputes everything.
        again: True for a moment that only happens if the layer has run forward again.
    """

    elements: Amount = ZERO
    bytes: Amount = ZERO
    weights: Amount = ZERO
    rounded: Amount = ZERO
    divided: bool | None = None
    first: bool = False
    again: bool = False

    def __repr__(self) -> str:
        return one_line(self, f"{self.elements} elements, {self.bytes} bytes, {self.weights} of a weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One node of the graph.

    Attributes:
        name: unique in the graph, such as ``block.3``.
        kind: layers of one kind, size and shape cost the same (``embedding``, ``block``, ``head``, ...).
        parameters: count of trained parameters of one tensor rank.
        frozen: count of its other parameters, which have no gradients and no states.
        packed, packed_bytes: count and bytes of the part of `frozen` that lies in few bits.
        forward, backward_input, backward_weight: the three passes; a full backward is the sum of two.
        kept, kept_bytes: activations that the forward pass keeps for the backward pass, per micro-batch.
        read, read_bytes: the part of them that samples take, of a layer without layers before it; zero if
            they are all of it.
        freed, freed_bytes: the part of them that it frees at its end: copies of logits.
        products, product_bytes: the part of its products' results (matrix products, convolutions, attention
            kernels) that suffices to recompute everything kept from the layer's input without the products;
            None if unknown.
        freed_products: the part of `products` that a forward pass frees if it keeps everything for backward.
        temporaries: the moments of the backward pass that may need most memory, with the gradient of the
            layer's output. No pass needs more than the largest.
        again: the recomputed forward work if the layer keeps `products`; None: `forward` without products.
        sent: elements of the layer's output, per micro-batch.
        tensor_reduced: elements all-reduced over the tensor ranks in the forward pass; the backward pass
            all-reduces the same number.
        gathered: elements of a rank's keys and values, which context ranks gather in the forward pass. The
            backward pass reduce-scatters their gradients. Zero if no token needs another token.
        dispatched: elements of the rows that a rank's tokens send to experts in the forward pass. They come
            back, and their gradients go both ways in the backward pass. Zero without experts.
        routed: the products of `forward` with rows of experts, and `routed_share` the part of these rows
            that goes to experts of the choice of tokens. `routed_kept` are their elements among `kept`.
        context_kept: additional kept activations if context ranks divide the tokens, without the gathered
            keys and values.
        unchanged: the model's own layer if a choice has changed this one; else None.
    """

    name: str
    kind: str
    parameters: Amount = ZERO
    frozen: Amount = ZERO
    packed: Amount = ZERO
    packed_bytes: Amount = ZERO
    forward: PassWork = PassWork()
    backward_input: PassWork = PassWork()
    backward_weight: PassWork = PassWork()
    kept: Amount = ZERO
    kept_bytes: Amount = ZERO
    read: Amount = ZERO
    read_bytes: Amount = ZERO
    freed: Amount = ZERO
    freed_bytes: Amount = ZERO
    products: Amount | None = None
    product_bytes: Amount = ZERO
    freed_products: Amount = ZERO
    temporaries: tuple[Temporaries, ...] = ()
    again: PassWork | None = None
    sent: Amount = ZERO
    tensor_reduced: Amount = ZERO
    gathered: Amount = ZERO
    context_kept: Amount = ZERO
    dispatched: Amount = ZERO
    routed: tuple[Matmul, ...] = ()
    routed_share: float = 0.0
    routed_kept: Amount = ZERO
    unchanged: Layer | None = None

    def __repr__(self) -> str:
        return one_line(self, f"{self.name}: {self.kind}, parameters {self.parameters}")

    @property
    def tensor_exchanges(self) -> int:
        """The number of equal all-reduces in `tensor_reduced`.

        One follows every product that tensor ranks divide along its inner side.
        """
        alone = (GRADIENT_PRODUCT, LOW_RANK_PRODUCT)
        exchanged = (one for one in self.forward.matmuls if one.kernel not in alone)
        divided = [any(term.tensor for term in matmul.inner.terms) for matmul in exchanged]
        return max(1, sum(divided))

    @property
    def parts(self) -> tuple[int, ...]:
        """The identities of all fields but the name, equal if layers share these fields.

        Comparing identities is far cheaper than comparing amounts.
        """
        return tuple([id(getattr(self, name)) for name in _PARTS])

    def frozen_bytes(self, shape: Shape, element_bytes: int) -> int:
        """Return the bytes of frozen parameters; those in no few bits have `element_bytes` each."""
        whole = self.frozen(shape) - self.packed(shape)
        return round(element_bytes * whole + self.packed_bytes(shape))

    def temporary_bytes(
        self, shape: Shape, element_bytes: int, summed_bytes: int, *, later: bool = False
    ) -> float:
        """Return the bytes of the largest `temporaries`; gradients are added up in `summed_bytes` each.

        `later`: without the first moments of the backward pass, and with those of a second forward pass.
        """
        copied_bytes = summed_bytes if summed_bytes != element_bytes else 0
        divides = shape.tensor_parallel > 1
        moments = (
            element_bytes * one.elements(shape)
            + one.bytes(shape)
            + (element_bytes + copied_bytes) * one.weights(shape)
            + (element_bytes if copied_bytes else 0) * one.rounded(shape)
            for one in self.temporaries
            if (one.divided is None or one.divided is divides) and not (one.first if later else one.again)
        )
        return max(moments, default=0.0)

    def flops(self, shape: Shape) -> float:
        """Return the floating-point operations of forward and backward of one micro-batch."""
        return sum(p.flops(shape) for p in (self.forward, self.backward_input, self.backward_weight))


_PARTS = tuple(field.name for field in fields(Layer) if field.name != "name")


def sample_product(count: int, rows: int, inner: int, columns: int) -> Matmul:
    """Return the product of one sample; more samples add rows, or products if there are several."""
    several = count > 1
    return Matmul(
        count=Amount.of(count, batch=1) if several else Amount.of(1.0),
        rows=Amount.of(rows) if several else Amount.of(rows, batch=1),
        inner=Amount.of(inner),
        columns=Amount.of(columns),
    )


def distinct_kinds(layers: Sequence[Layer]) -> tuple[Layer, ...]:
    """Return the layers with kinds that tell unlike layers apart: `Linear`, `Linear-2` and so on."""
    kinds: dict[Layer, str] = {}
    counts: Mapping[str, int] = {}
    found = []
    for layer in layers:
        plain = replace(layer, name="")
        if plain not in kinds:
            number = counts.get(layer.kind, 0) + 1
            counts = {**counts, layer.kind: number}
            kinds[plain] = layer.kind if number == 1 else f"{layer.kind}-{number}"
        found.append(replace(layer, kind=kinds[plain]))
    return tuple(found)
