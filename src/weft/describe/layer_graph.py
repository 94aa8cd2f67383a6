"""`LayerGraph`: a model as a DAG of costed layers, at block, module or operator granularity.

One type serves planners, cost models and compilers. Amounts of elements are counted in elements of the
compute precision; `*_bytes` amounts do not change with precision (masks, indices, fp32 statistics).
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, fields, replace
from functools import cached_property
from math import gcd
from typing import Any

from weft.describe.amount import ZERO, Amount, Shape
from weft.errors import InputError, Violation

PLAIN_PRODUCT = "product"


@dataclass(frozen=True, slots=True)
class Matmul:
    """`count` products of a (rows x inner) by an (inner x columns) matrix.

    `kernel` says by what they are computed: a plain product, or one of the kernels of attention, whose speeds
    `weft.predict.cost.speeds` knows.
    """

    count: Amount
    rows: Amount
    inner: Amount
    columns: Amount
    kernel: str = PLAIN_PRODUCT

    def flops(self, shape: Shape) -> float:
        if shape.context_parallel > 1:
            # Tokens may be counted along two sides, as in scores, but ranks divide the product once.
            return 2.0 * (self.count * self.rows * self.inner * self.columns)(shape)
        return 2.0 * self.count(shape) * self.rows(shape) * self.inner(shape) * self.columns(shape)


@dataclass(frozen=True, slots=True)
class Pass:
    """The work of one pass of one micro-batch through one layer.

    `memory` counts the elements read and written by memory-bound kernels (norms, activations, residuals,
    lookups, losses); `kernels` counts all kernels launched, the matmuls' included.
    """

    matmuls: tuple[Matmul, ...] = ()
    memory: Amount = ZERO
    kernels: int = 0

    def flops(self, shape: Shape) -> float:
        return sum(matmul.flops(shape) for matmul in self.matmuls)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One node of the graph.

    Attributes:
        name: unique in the graph, such as ``block.3``.
        kind: layers of one kind, size and shape cost the same (``embedding``, ``block``, ``head``, ...).
        parameters: count of parameters of one tensor rank.
        forward, backward_input, backward_weight: the three passes; a full backward is the sum of two.
        kept, kept_bytes: what the backward pass needs and the forward pass keeps, per micro-batch.
        products, product_bytes: what of the results of its products (matrix products, convolutions, attention
            kernels) is needed to make everything kept again from the layer's input without calling them; None
            where this is not known.
        again: what is run forward again where the layer keeps that; None: all of `forward` but its products.
        sent: elements of the layer's output, per micro-batch.
        tensor_reduced: elements all-reduced over the tensor ranks in the forward pass (the same again in the
            backward pass).
        gathered: elements of a rank's keys and values, which context ranks gather in the forward pass (and
            whose gradients they reduce and scatter in the backward pass); zero where no token needs another.
        context_kept: what backward needs besides `kept` where context ranks divide the tokens, without the
            gathered keys and values.
    """

    name: str
    kind: str
    parameters: Amount = ZERO
    forward: Pass = Pass()
    backward_input: Pass = Pass()
    backward_weight: Pass = Pass()
    kept: Amount = ZERO
    kept_bytes: Amount = ZERO
    products: Amount | None = None
    product_bytes: Amount = ZERO
    again: Pass | None = None
    sent: Amount = ZERO
    tensor_reduced: Amount = ZERO
    gathered: Amount = ZERO
    context_kept: Amount = ZERO

    @property
    def tensor_exchanges(self) -> int:
        """How many all-reduces of equal size `tensor_reduced` is made of.

        One follows every product that tensor ranks divide along the side over which it adds up.
        """
        divided = [any(term.tensor for term in matmul.inner.terms) for matmul in self.forward.matmuls]
        return max(1, sum(divided))

    @property
    def parts(self) -> tuple[int, ...]:
        """Identities of all of it but the name: the same where layers share all of that.

        To compare them is far cheaper than to compare amounts.
        """
        return tuple([id(getattr(self, name)) for name in _PARTS])

    def flops(self, shape: Shape) -> float:
        """Floating-point operations of forward and backward of one micro-batch."""
        return sum(p.flops(shape) for p in (self.forward, self.backward_input, self.backward_weight))


_PARTS = tuple(field.name for field in fields(Layer) if field.name != "name")


@dataclass(frozen=True, slots=True)
class TiedParameters:
    """Parameters that several layers use, by position; they are counted in the first of these layers."""

    layers: tuple[int, ...]
    parameters: Amount


@dataclass(frozen=True, kw_only=True)
class LayerGraph:
    """A DAG of layers in a topological order; `edges` are pairs of positions (producer, consumer).

    `sequence` is the default number of tokens per sample. `vocabulary` is the number of classes of the head
    (0 where there is none). `tied` are parameters that several layers use. `divided` names the numbers that
    tensor ranks must divide among them without a rest; where there are none, no layer can be divided.
    """

    name: str
    layers: tuple[Layer, ...]
    edges: tuple[tuple[int, int], ...]
    sequence: int
    vocabulary: int = 0
    tied: tuple[TiedParameters, ...] = ()
    divided: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        problems = [
            Violation(self.name, f"edge {edge} must go from a layer to a later one of {len(self.layers)}")
            for edge in self.edges
            if not 0 <= edge[0] < edge[1] < len(self.layers)
        ]
        problems += [
            Violation(self.name, f"tied layers {one.layers} must be several of {len(self.layers)}, rising")
            for one in self.tied
            if len(one.layers) < 2
            or sorted(set(one.layers)) != list(one.layers)
            or not 0 <= one.layers[0] <= one.layers[-1] < len(self.layers)
        ]
        if len({layer.name for layer in self.layers}) != len(self.layers):
            problems.append(Violation(self.name, "two layers have the same name"))
        if not self.layers:
            problems.append(Violation(self.name, "a model needs at least one layer"))
        if problems:
            raise InputError(problems)

    @property
    def knows_products(self) -> bool:
        """Whether layers can be recomputed selectively: all say what their products leave."""
        return all(layer.products is not None for layer in self.layers)

    @property
    def is_chain(self) -> bool:
        return self.edges == chain_edges(len(self.layers))

    @cached_property
    def alike(self) -> tuple[int, ...]:
        """By layer the first one that shares all of it but the name."""
        first: dict[tuple[int, ...], int] = {}
        return tuple(first.setdefault(layer.parts, index) for index, layer in enumerate(self.layers))

    @cached_property
    def feeders(self) -> tuple[frozenset[int], ...]:
        """By layer those that send to it."""
        found: list[set[int]] = [set() for _ in self.layers]
        for producer, consumer in self.edges:
            found[consumer].add(producer)
        return tuple(map(frozenset, found))

    def amounts(self, name: str, shape: Shape) -> tuple[float, ...]:
        """Of every layer the amount of this name, evaluated once for all plans that ask."""
        key = (name, shape)
        if key not in self._evaluated:
            known: dict[int, float] = {}
            for index in set(self.alike):
                amount: Amount = getattr(self.layers[index], name)
                known[index] = amount(shape)
            self._evaluated[key] = tuple(known[index] for index in self.alike)
        return self._evaluated[key]

    @cached_property
    def _evaluated(self) -> dict[tuple[str, Shape], tuple[float, ...]]:
        return {}

    @cached_property
    def tensor_exchanges(self) -> tuple[int, ...]:
        """Those of every layer."""
        known = {index: self.layers[index].tensor_exchanges for index in set(self.alike)}
        return tuple(known[index] for index in self.alike)

    def parameters(self, tensor_parallel: int = 1) -> int:
        """Count of parameters held by one tensor rank."""
        shape = Shape(1, self.sequence, tensor_parallel)
        return round(sum(layer.parameters(shape) for layer in self.layers))

    def refuse_tensor(self, tensor_parallel: int) -> str | None:
        """Why the layers cannot be divided over so many tensor ranks, with the nearest degree, or None.

        The vocabulary is no reason: its shares differ by one at most, and are padded.
        """
        if tensor_parallel == 1:
            return None
        if not self.divided:
            return f"tp {tensor_parallel}: no layer of the model can be divided over tensor ranks"
        common = gcd(*(size for _, size in self.divided))
        if common % tensor_parallel == 0:
            return None
        highest = min(2 * tensor_parallel - 1, common)
        possible = (degree for degree in range(1, highest + 1) if common % degree == 0)
        near = min(possible, key=lambda degree: abs(degree - tensor_parallel))
        odd = ", ".join(f"{size} {name}" for name, size in self.divided if size % tensor_parallel)
        return f"tp {tensor_parallel} does not divide {odd}; nearest tp: {near}"

    def refuse_context(self, context_parallel: int, sequence: int) -> str | None:
        """Why so many ranks cannot divide the tokens of a sample, with the nearest number that can, or None.

        Each has two equal chunks of them, so that with causal attention all have the same work.
        """
        if context_parallel == 1:
            return None
        if not any(layer.gathered.terms for layer in self.layers):
            return f"cp {context_parallel}: no ranks can divide the tokens of this model; nearest cp: 1"
        chunks = 2 * context_parallel
        if sequence % chunks:
            # Not a longer one, for which the model may have no positions.
            near = max(chunks, sequence // chunks * chunks)
            return (
                f"cp {context_parallel}: sequence {sequence} is not a multiple of 2 x cp = {chunks}; "
                f"nearest sequence: {near}"
            )
        return None

    @cached_property
    def fingerprint(self) -> str:
        """Sixteen hex digits that change when anything a planner reads changes.

        What context ranks gather and keep follows from the products, and is left out.
        """
        return hashlib.sha256(self._text(context=False).encode()).hexdigest()[:16]

    def to_json(self) -> str:
        return self._text(context=True)

    def _text(self, *, context: bool) -> str:
        texts: dict[int, str] = {}
        layers = []
        for layer, alike in zip(self.layers, self.alike, strict=True):
            if alike not in texts:
                nameless = replace(layer, name="")
                texts[alike] = _indented(_layer_record(nameless, context=context), 2)
            layers.append("  " + texts[alike].replace('"name": ""', f'"name": {json.dumps(layer.name)}', 1))
        record: dict[str, Any] = {
            "version": 1,
            "name": self.name,
            "sequence": self.sequence,
            "vocabulary": self.vocabulary,
            "edges": [list(edge) for edge in self.edges],
        }
        if self.divided:
            record["divided"] = [list(one) for one in self.divided]
        if self.tied:
            record["tied"] = [[list(one.layers), str(one.parameters)] for one in self.tied]
        texts_of = {key: _indented(value, 1) for key, value in record.items()}
        texts_of["layers"] = "[\n" + ",\n".join(layers) + "\n ]"
        return "{\n" + ",\n".join(f' "{key}": {text}' for key, text in sorted(texts_of.items())) + "\n}"

    @classmethod
    def from_json(cls, text: str, where: str = "layer graph") -> LayerGraph:
        """Read what `to_json` writes.

        Raises:
            InputError: when the text is not such a file.
        """
        try:
            record = json.loads(text)
            if record["version"] != 1:
                raise InputError(Violation(where, f"version {record['version']} is not 1"))
            return cls(
                name=str(record["name"]),
                sequence=int(record["sequence"]),
                vocabulary=int(record.get("vocabulary", 0)),
                layers=tuple(_layer_from(item) for item in record["layers"]),
                edges=tuple((int(a), int(b)) for a, b in record["edges"]),
                tied=tuple(
                    TiedParameters(tuple(int(layer) for layer in layers), Amount.parse(parameters))
                    for layers, parameters in record.get("tied", ())
                ),
                divided=tuple((str(name), int(size)) for name, size in record.get("divided", ())),
            )
        except InputError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise InputError(Violation(where, f"not a layer graph file: {reason}")) from None


def chain_edges(layers: int) -> tuple[tuple[int, int], ...]:
    return tuple((index, index + 1) for index in range(layers - 1))


def _indented(value: Any, depth: int) -> str:
    """JSON of a value that lies so deep in a file whose lines are indented by one."""
    return json.dumps(value, indent=1, sort_keys=True).replace("\n", "\n" + " " * depth)


_AMOUNTS = ("parameters", "kept", "kept_bytes", "sent", "tensor_reduced")
_CONTEXT_AMOUNTS = ("gathered", "context_kept")
_PASSES = ("forward", "backward_input", "backward_weight")


def _layer_record(layer: Layer, *, context: bool) -> dict[str, Any]:
    record: dict[str, Any] = {"name": layer.name, "kind": layer.kind}
    for key in _AMOUNTS:
        record[key] = str(getattr(layer, key))
    if layer.products is not None:
        record |= {"products": str(layer.products), "product_bytes": str(layer.product_bytes)}
    if context and layer.gathered.terms:
        record |= {key: str(getattr(layer, key)) for key in _CONTEXT_AMOUNTS}
    works = {key: getattr(layer, key) for key in _PASSES}
    if layer.again is not None:
        works["again"] = layer.again
    for key, work in works.items():
        record[key] = {
            "matmuls": [_matmul_record(matmul) for matmul in work.matmuls],
            "memory": str(work.memory),
            "kernels": work.kernels,
        }
    return record


def _matmul_record(matmul: Matmul) -> list[str]:
    """The four amounts, and the kernel where it is no plain product."""
    amounts = [str(amount) for amount in (matmul.count, matmul.rows, matmul.inner, matmul.columns)]
    return amounts if matmul.kernel == PLAIN_PRODUCT else [*amounts, matmul.kernel]


def _matmul_from(record: list[str]) -> Matmul:
    count, rows, inner, columns = (Amount.parse(text) for text in record[:4])
    return Matmul(count, rows, inner, columns, *record[4:])


def _layer_from(record: dict[str, Any]) -> Layer:
    # Typed loosely because Layer takes both kinds of value by name.
    passes: dict[str, Any] = {
        key: Pass(
            matmuls=tuple(_matmul_from(item) for item in record[key]["matmuls"]),
            memory=Amount.parse(record[key]["memory"]),
            kernels=int(record[key]["kernels"]),
        )
        for key in (*_PASSES, "again")
        if key in record or key in _PASSES
    }
    amounts: dict[str, Any] = {key: Amount.parse(record[key]) for key in _AMOUNTS}
    if "products" in record:
        amounts |= {key: Amount.parse(record[key]) for key in ("products", "product_bytes")}
    amounts |= {key: Amount.parse(record[key]) for key in _CONTEXT_AMOUNTS if key in record}
    return Layer(name=str(record["name"]), kind=str(record["kind"]), **amounts, **passes)
