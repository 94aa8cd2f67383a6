"""`LayerGraph`: a model as a DAG of costed layers, at block, module or operator granularity.

One type serves planners, cost models and compilers. Amounts of elements have the compute precision;
`*_bytes` amounts do not change with precision (masks, indices, fp32 statistics).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from weft.describe.amount import ZERO, Amount, Shape
from weft.describe.layer import PLAIN_PRODUCT, Layer, Matmul, PassWork, Temporaries
from weft.describe.one_line import one_line
from weft.describe.replica_grid import ReplicaGrid
from weft.describe.units import counted, format_count
from weft.errors import InputError, Violation, nearest_divisor


@dataclass(frozen=True, slots=True)
class TiedParameters:
    """Parameters that several layers use, by position; they count in the first of these layers.

    `frozen` is their count if training leaves them alone, and `parameters` otherwise.
    """

    layers: tuple[int, ...]
    parameters: Amount
    frozen: Amount = ZERO


@dataclass(frozen=True, kw_only=True)
class LayerGraph:
    """A DAG of layers in a topological order; `edges` are pairs of positions (producer, consumer).

    `sequence` is the default number of tokens per sample. `vocabulary` is the number of classes of the head
    (0 without a head). `tied` are parameters that several layers use. `divided` has the sizes that the
    tensor-parallel degree must divide exactly; if it is empty, no layer can be divided. `experts` are those
    of every mixture, which expert ranks divide; 0 without mixtures. `model` is the same graph without a
    plan's choices for single layers; None without choices.

    A sample has one or several tensors, its inputs, numbered from 0. `inputs` are pairs (input, layer that
    reads it), rising. Without pairs, every layer without a producer reads the only input.
    """

    name: str
    layers: tuple[Layer, ...]
    edges: tuple[tuple[int, int], ...]
    sequence: int
    vocabulary: int = 0
    tied: tuple[TiedParameters, ...] = ()
    divided: tuple[tuple[str, int], ...] = ()
    experts: int = 0
    inputs: tuple[tuple[int, int], ...] = ()
    model: LayerGraph | None = None

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
        problems += self._input_problems()
        if len({layer.name for layer in self.layers}) != len(self.layers):
            problems.append(Violation(self.name, "two layers have the same name"))
        if not self.layers:
            problems.append(Violation(self.name, "a model needs at least one layer"))
        if problems:
            raise InputError(problems)

    def _input_problems(self) -> list[Violation]:
        """Return the mistakes of `inputs`: unknown layers, gaps, and layers that read nothing."""
        if not self.inputs:
            return []
        numbers, readers = {number for number, _ in self.inputs}, {layer for _, layer in self.inputs}
        problems = [
            Violation(self.name, f"input {one} must go to one of {counted(len(self.layers), 'layer')}")
            for one in self.inputs
            if not 0 <= one[1] < len(self.layers)
        ]
        if sorted(set(self.inputs)) != list(self.inputs):
            problems.append(Violation(self.name, "inputs must rise, each pair once"))
        if numbers != set(range(len(numbers))):
            problems.append(Violation(self.name, f"inputs {sorted(numbers)} must be numbered from 0"))
        fed = {consumer for _, consumer in self.edges} | readers
        problems += [
            Violation(self.name, f"layer {layer} reads neither an input nor another layer")
            for layer in range(len(self.layers))
            if layer not in fed
        ]
        return problems

    def __repr__(self) -> str:
        size = f"{counted(len(self.layers), 'layer')}, {format_count(self.parameters())} parameters"
        return one_line(self, f"{self.name}: {size}, sequence {self.sequence}")

    @property
    def knows_products(self) -> bool:
        """True if layers can be recomputed selectively: all layers have `products`."""
        return all(layer.products is not None for layer in self.layers)

    @cached_property
    def is_chain(self) -> bool:
        """True if every layer reads the one before it, and the first one the only input."""
        count = len(self.layers)
        return self.edges == chain_edges(count) and self.inputs_read == ((0,), *((),) * (count - 1))

    @cached_property
    def alike(self) -> tuple[int, ...]:
        """For each layer, the first layer with the same fields but the name."""
        first: dict[tuple[int, ...], int] = {}
        return tuple(first.setdefault(layer.parts, index) for index, layer in enumerate(self.layers))

    @cached_property
    def feeders(self) -> tuple[frozenset[int], ...]:
        """For each layer, its producers."""
        found: list[set[int]] = [set() for _ in self.layers]
        for producer, consumer in self.edges:
            found[consumer].add(producer)
        return tuple(map(frozenset, found))

    @property
    def input_count(self) -> int:
        """The number of inputs of a sample."""
        return 1 + max((number for number, _ in self.inputs), default=0)

    @cached_property
    def inputs_read(self) -> tuple[tuple[int, ...], ...]:
        """For each layer, the inputs of a sample that it reads, rising."""
        if not self.inputs:
            return tuple(() if before else (0,) for before in self.feeders)
        found: list[list[int]] = [[] for _ in self.layers]
        for number, layer in self.inputs:
            found[layer].append(number)
        return tuple(map(tuple, found))

    def crossing(self, stages: Iterable[Sequence[int]]) -> dict[tuple[int, int], frozenset[int]]:
        """Return the layers with output across each edge of stages; `stages` has the layers of each."""
        stage_of = [0] * len(self.layers)
        for index, layers in enumerate(stages):
            for layer in layers:
                stage_of[layer] = index
        found: dict[tuple[int, int], set[int]] = {}
        for producer, consumer in self.edges:
            edge = (stage_of[producer], stage_of[consumer])
            if edge[0] != edge[1]:
                found.setdefault(edge, set()).add(producer)
        return {edge: frozenset(layers) for edge, layers in found.items()}

    def amounts(self, name: str, shape: Shape) -> tuple[float, ...]:
        """Return the value of this amount for every layer; it is computed once for each shape."""
        return self._of_each((name, shape), lambda layer: getattr(layer, name)(shape))

    def frozen_bytes(self, shape: Shape, element_bytes: int) -> tuple[float, ...]:
        """Return the bytes of every layer's frozen parameters; it is computed once for each shape.

        Those that are not packed have `element_bytes` each.
        """
        key = (f"frozen bytes {element_bytes}", shape)
        return self._of_each(key, lambda layer: layer.frozen_bytes(shape, element_bytes))

    def temporary_bytes(
        self, shape: Shape, element_bytes: int, summed_bytes: int, *, later: bool = False
    ) -> tuple[float, ...]:
        """Return the bytes of every layer's largest `Temporaries`; it is computed once for each shape.

        Elements have `element_bytes`; gradients are added up in `summed_bytes` each. `later` leaves out the
        first moments of backward passes.
        """
        key = (f"temporaries {element_bytes} {summed_bytes} {later}", shape)
        asked = shape, element_bytes, summed_bytes
        return self._of_each(key, lambda layer: layer.temporary_bytes(*asked, later=later))

    def _of_each(self, key: tuple[str, Shape], value: Callable[[Layer], float]) -> tuple[float, ...]:
        """Return a value of every layer, computed once for layers with equal fields."""
        if key not in self._evaluated:
            known = {index: value(self.layers[index]) for index in set(self.alike)}
            self._evaluated[key] = tuple(known[index] for index in self.alike)
        return self._evaluated[key]

    @cached_property
    def _evaluated(self) -> dict[tuple[str, Shape], tuple[float, ...]]:
        return {}

    @cached_property
    def tensor_exchanges(self) -> tuple[int, ...]:
        """The number of all-reduces of every layer; see `Layer.tensor_exchanges`."""
        known = {index: self.layers[index].tensor_exchanges for index in set(self.alike)}
        return tuple(known[index] for index in self.alike)

    def parameters(self, tensor_parallel: int = 1) -> int:
        """Return the count of parameters held by one tensor rank, trained and frozen."""
        return self._count(tensor_parallel, "parameters", "frozen")

    @property
    def has_frozen_layers(self) -> bool:
        return any(layer.frozen.terms for layer in self.layers)

    def trained_parameters(self, tensor_parallel: int = 1) -> int:
        """Return the count of parameters that one tensor rank trains."""
        return self._count(tensor_parallel, "parameters")

    def _count(self, tensor_parallel: int, *names: str) -> int:
        shape = Shape(1, self.sequence, tensor_parallel)
        return round(sum(sum(self.amounts(name, shape)) for name in names))

    def refuse_grid(self, grid: ReplicaGrid, sequence: int) -> str | None:
        """Return the reason why a replica's ranks cannot divide layers and tokens by this grid, or None."""
        return (
            self.refuse_tensor(grid.tensor)
            or self.refuse_context(grid.context, sequence)
            or self.refuse_expert(grid.expert)
        )

    def refuse_tensor(self, tensor_parallel: int) -> str | None:
        """Return the reason why tensor ranks cannot divide the layers, with the nearest degree, or None.

        The vocabulary is never a reason: its shares differ by at most one, and are padded.
        """
        if tensor_parallel == 1:
            return None
        if not self.divided:
            return f"tp {tensor_parallel}: no layer of the model can be divided over tensor ranks"
        odd = ", ".join(f"{size} {name}" for name, size in self.divided if size % tensor_parallel)
        if not odd:
            return None
        near = nearest_divisor(tensor_parallel, *(size for _, size in self.divided))
        return f"tp {tensor_parallel} does not divide {odd}; nearest tp: {near}"

    def refuse_context(self, context_parallel: int, sequence: int) -> str | None:
        """Return the reason why context ranks cannot divide a sample's tokens, with a nearest value, or None.

        Each rank has two equal chunks of tokens, so that all ranks have equal work in causal attention.
        """
        if context_parallel == 1:
            return None
        if not any(layer.gathered.terms for layer in self.layers):
            return f"cp {context_parallel}: no ranks can divide the tokens of this model; nearest cp: 1"
        chunks = 2 * context_parallel
        if sequence % chunks:
            # A longer sequence is not proposed: the model may have no positions for it.
            near = max(chunks, sequence // chunks * chunks)
            return (
                f"cp {context_parallel}: sequence {sequence} is not a multiple of 2 x cp = {chunks}; "
                f"nearest sequence: {near}"
            )
        return None

    def refuse_expert(self, expert_parallel: int) -> str | None:
        """Return the reason why expert ranks cannot divide the experts, with the nearest degree, or None."""
        if expert_parallel == 1:
            return None
        if not self.experts:
            return f"ep {expert_parallel}: the model has no experts; nearest ep: 1"
        if self.experts % expert_parallel:
            near = nearest_divisor(expert_parallel, self.experts)
            return f"ep {expert_parallel} does not divide {self.experts} experts; nearest ep: {near}"
        return None

    @cached_property
    def fingerprint(self) -> str:
        """Sixteen hex digits that change when any of the model's data for planners changes.

        The amounts of context ranks, temporaries and freed activations follow, and are left out.
        """
        if self.model is not None:
            return self.model.fingerprint
        return hashlib.sha256(self._text(context=False).encode()).hexdigest()[:16]

    def to_json(self) -> str:
        return self._text(context=True)

    def _text(self, *, context: bool) -> str:
        texts: dict[int, str] = {}
        layers = []
        for layer, alike in zip(self.layers, self.alike, strict=True):
            if alike not in texts:
                nameless = replace(layer, name="")
                texts[alike] = indented(layer_record(nameless, context=context), 2)
            layers.append("  " + texts[alike].replace('"name": ""', f'"name": {json.dumps(layer.name)}', 1))
        record: dict[str, Any] = {
            "version": 1,
            "name": self.name,
            "sequence": self.sequence,
            "vocabulary": self.vocabulary,
            "edges": [list(edge) for edge in self.edges],
        }
        if self.inputs:
            record["inputs"] = [list(one) for one in self.inputs]
        if self.divided:
            record["divided"] = [list(one) for one in self.divided]
        if self.experts:
            record["experts"] = self.experts
        if self.tied:
            record["tied"] = [_tied_record(one) for one in self.tied]
        texts_of = {key: indented(value, 1) for key, value in record.items()}
        texts_of["layers"] = "[\n" + ",\n".join(layers) + "\n ]"
        return "{\n" + ",\n".join(f' "{key}": {text}' for key, text in sorted(texts_of.items())) + "\n}"

    @classmethod
    def from_json(cls, text: str, where: str = "layer graph") -> LayerGraph:
        """Read the text that `to_json` writes.

        Raises:
            InputError: when the text is not a layer graph.
        """
        try:
            record = json.loads(text)
            if record["version"] != 1:
                raise InputError(Violation(where, f"version {record['version']} is not 1"))
            return cls(
                name=str(record["name"]),
                sequence=int(record["sequence"]),
                vocabulary=int(record.get("vocabulary", 0)),
                experts=int(record.get("experts", 0)),
                layers=tuple(layer_from(item) for item in record["layers"]),
                edges=tuple((int(a), int(b)) for a, b in record["edges"]),
                tied=tuple(
                    TiedParameters(tuple(int(layer) for layer in layers), *map(Amount.parse, counts))
                    for layers, *counts in record.get("tied", ())
                ),
                divided=tuple((str(name), int(size)) for name, size in record.get("divided", ())),
                inputs=tuple((int(number), int(layer)) for number, layer in record.get("inputs", ())),
            )
        except InputError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise InputError(Violation(where, f"not a layer graph file: {reason}")) from None


def chain_edges(layers: int) -> tuple[tuple[int, int], ...]:
    return tuple((index, index + 1) for index in range(layers - 1))


_AMOUNTS = ("parameters", "kept", "kept_bytes", "sent", "tensor_reduced")
_FROZEN = ("frozen", "packed", "packed_bytes")
_CONTEXT_AMOUNTS = ("gathered", "context_kept")
_PRODUCTS = ("products", "product_bytes")
_READ = ("read", "read_bytes")
_FREED = ("freed", "freed_bytes", "freed_products")
_WHEN = ("first", "again")
_TEMPORARIES = ("elements", "bytes", "weights", "rounded")
_PASSES = ("forward", "backward_input", "backward_weight")


def indented(value: Any, depth: int) -> str:
    """Return JSON of a value at this depth of a file with an indent of one per level."""
    return json.dumps(value, indent=1, sort_keys=True).replace("\n", "\n" + " " * depth)


def layer_record(layer: Layer, *, context: bool) -> dict[str, Any]:
    record: dict[str, Any] = {"name": layer.name, "kind": layer.kind}
    for key in _AMOUNTS:
        record[key] = str(getattr(layer, key))
    record |= {key: str(getattr(layer, key)) for key in _FROZEN if getattr(layer, key).terms}
    if layer.products is not None:
        record |= {"products": str(layer.products), "product_bytes": str(layer.product_bytes)}
    if context and layer.gathered.terms:
        record |= {key: str(getattr(layer, key)) for key in _CONTEXT_AMOUNTS}
    if context and layer.dispatched.terms:
        record["dispatched"] = str(layer.dispatched)
        record["routed_kept"] = str(layer.routed_kept)
        record["routed_share"] = layer.routed_share
        record["routed"] = [_matmul_record(matmul) for matmul in layer.routed]
    if context and layer.temporaries:
        record["temporaries"] = [_temporaries_record(one) for one in layer.temporaries]
        record |= {key: str(getattr(layer, key)) for key in _FREED}
        record |= {key: str(getattr(layer, key)) for key in _READ if getattr(layer, key).terms}
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


def layer_from(record: dict[str, Any]) -> Layer:
    # Typed loosely because Layer takes both kinds of value by name.
    passes: dict[str, Any] = {
        key: PassWork(
            matmuls=tuple(_matmul_from(item) for item in record[key]["matmuls"]),
            memory=Amount.parse(record[key]["memory"]),
            kernels=int(record[key]["kernels"]),
        )
        for key in (*_PASSES, "again")
        if key in record or key in _PASSES
    }
    amounts: dict[str, Any] = {key: Amount.parse(record[key]) for key in _AMOUNTS}
    given = (*_FROZEN, *_PRODUCTS, *_FREED, *_READ, *_CONTEXT_AMOUNTS, "dispatched", "routed_kept")
    amounts |= {key: Amount.parse(record[key]) for key in given if key in record}
    return Layer(
        name=str(record["name"]),
        kind=str(record["kind"]),
        temporaries=tuple(_temporaries_from(one) for one in record.get("temporaries", ())),
        routed=tuple(_matmul_from(one) for one in record.get("routed", ())),
        routed_share=float(record.get("routed_share", 0.0)),
        **amounts,
        **passes,
    )


def _tied_record(one: TiedParameters) -> list[Any]:
    """Return the layers and the count, and the frozen count if there is one."""
    counts = (one.parameters, one.frozen) if one.frozen.terms else (one.parameters,)
    return [list(one.layers), *map(str, counts)]


def _temporaries_record(one: Temporaries) -> dict[str, Any]:
    amounts = {key: str(getattr(one, key)) for key in _TEMPORARIES if getattr(one, key).terms}
    divided = {"divided": one.divided} if one.divided is not None else {}
    return {**amounts, **divided, **{key: True for key in _WHEN if getattr(one, key)}}


def _temporaries_from(record: dict[str, Any]) -> Temporaries:
    # Typed loosely because Temporaries takes both kinds of value by name.
    given: dict[str, Any] = {key: Amount.parse(record[key]) for key in _TEMPORARIES if key in record}
    given |= {key: bool(record[key]) for key in _WHEN if key in record}
    return Temporaries(divided=record.get("divided"), **given)


def _matmul_record(matmul: Matmul) -> list[str]:
    """Return the four amounts, and the kernel if it is not a plain product."""
    amounts = [str(amount) for amount in (matmul.count, matmul.rows, matmul.inner, matmul.columns)]
    return amounts if matmul.kernel == PLAIN_PRODUCT else [*amounts, matmul.kernel]


def _matmul_from(record: list[str]) -> Matmul:
    count, rows, inner, columns = (Amount.parse(text) for text in record[:4])
    return Matmul(count, rows, inner, columns, *record[4:])
