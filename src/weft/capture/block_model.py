"""`BlockModel`: a user's own model as layers, with costs from a run of each layer without data.

    def build() -> weft.BlockModel:
        layers = [Stem, *[Block] * 8, Head]
        return weft.BlockModel(layers, example=torch.zeros(1, 3, 32, 32), classes=10)

The costs follow from the operators that a forward pass on torch's meta device calls.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from weft.capture.layer_costs import CountedOperators, storages_saved
from weft.capture.model_arguments import examples_of, require_counts
from weft.describe.families.own import CalledLinear
from weft.describe.layer import Layer, distinct_kinds
from weft.describe.layer_graph import LayerGraph, chain_edges
from weft.describe.one_line import one_line
from weft.describe.units import counted, shown
from weft.errors import InputError, Violation
from weft.installed import failure


class BlockModel:
    """Layers, each from tensors to one tensor, all with the samples on the first axis.

    A layer treats every sample by itself and changes nothing but its parameters. So the split into
    micro-batches makes no difference. A batch norm is no such layer.

    Args:
        layers: for every layer a function without arguments, such as a class, that makes its module. Initial
            values are drawn from torch's generator.
        edges: pairs (producer, consumer) of positions, each to a later layer. Every layer but the last one is
            read. Default: a chain. A layer is called with the inputs of a sample that it reads, then with its
            producers' outputs, each in their order.
        example: the inputs of one sample, a tensor or a tuple of them, with samples on the first axis; only
            the shape and type of a sample matter.
        inputs: pairs (number of an input, layer that reads it). Default: each layer without a producer reads
            the only input. Of several inputs, the first such layer reads the first one, and so on.
        classes: classes in the last layer's output: the vocabulary of a language model.
        sequence: tokens per sample, which `tokens_per_s` counts; default: the second axis of the first input
            if it holds whole numbers, else 1.

    Raises:
        InputError: when a layer cannot be built or run on the example, or changes its state.
    """

    def __init__(
        self,
        layers: Sequence[Callable[[], nn.Module]],
        *,
        example: torch.Tensor | tuple[torch.Tensor, ...],
        classes: int,
        edges: Iterable[tuple[int, int]] | None = None,
        inputs: Iterable[tuple[int, int]] | None = None,
        sequence: int | None = None,
    ) -> None:
        require_counts(classes=classes, sequence=sequence)
        self._makers = _makers(layers)
        count, examples = len(self._makers), examples_of(example)
        self._edges = chain_edges(count) if edges is None else _pairs(edges, "edges")
        _require_edges(self._edges, count)
        reads = _reads(
            self._edges, count, len(examples), None if inputs is None else _pairs(inputs, "inputs")
        )
        self._inputs = () if len(examples) == 1 and inputs is None else tuple(reads)
        tokens = not examples[0].is_floating_point() and examples[0].dim() > 1
        self._sequence = sequence or (examples[0].shape[1] if tokens else 1)
        self._classes = classes
        samples = [torch.empty_like(one, device="meta") for one in examples]
        shapes, costed = [tuple(one.shape[1:]) for one in samples], list[Layer]()
        linears: list[tuple[CalledLinear, ...]] = []
        values: list[torch.Tensor] = []
        for index, make in enumerate(self._makers):
            read = [samples[number] for number, layer in reads if layer == index]
            before = [values[producer] for producer, consumer in self._edges if consumer == index]
            layer, value, called = _costed(index, make, read, before)
            costed.append(layer)
            linears.append(called)
            values.append(value)
            shapes.append(tuple(value.shape[1:]))
        self.sample_shapes: Sequence[tuple[int, ...]] = tuple(shapes)
        self._layers, self._linears = distinct_kinds(costed), tuple(linears)
        self._examples = examples

    def __repr__(self) -> str:
        sizes = f"{counted(self._sequence, 'token')} per sample, {self._classes} classes"
        return one_line(self, f"of {counted(len(self._layers), 'layer')}: {sizes}")

    def layer(self, index: int) -> nn.Module:
        """Return a new module of one layer."""
        return self._makers[index]()

    def linears(self, index: int) -> Sequence[CalledLinear]:
        """Return the plain, trained linear layers that one layer calls once, those of one tensor together."""
        return self._linears[index]

    def samples(self, count: int) -> Sequence[torch.Tensor]:
        """Return the inputs of that number of samples, each like the example."""
        return [one.expand(count, *one.shape[1:]).contiguous() for one in self._examples]

    def layer_graph(self) -> LayerGraph:
        """Return the costed layers; all amounts but parameters are proportional to the samples."""
        return LayerGraph(
            name="own",
            layers=self._layers,
            edges=self._edges,
            sequence=self._sequence,
            vocabulary=self._classes,
            inputs=self._inputs,
        )


def _makers(layers: Iterable[Callable[[], nn.Module]]) -> tuple[Callable[[], nn.Module], ...]:
    """Check that there are layers, and that each is a function; a module made before is none."""
    made = isinstance(layers, nn.Module)
    if made or not isinstance(layers, Iterable):
        problem = f"layers is {type(layers).__name__}; must be a list of functions that make modules"
        raise InputError(Violation("model.build", problem))
    makers = tuple(layers)
    if not makers:
        raise InputError(Violation("model.build", "0 layers; a model needs at least one layer", "1"))
    problems = [
        Violation("model.build", f"layer {index} is {type(maker).__name__}, no function that makes a module")
        for index, maker in enumerate(makers)
        if isinstance(maker, nn.Module) or not callable(maker)
    ]
    if problems:
        raise InputError(problems)
    return makers


def _pairs(given: Iterable[tuple[int, int]], name: str) -> tuple[tuple[int, int], ...]:
    """Return the pairs of integers in order, or refuse them."""
    pairs = tuple(given) if isinstance(given, Iterable) else (given,)
    for pair in pairs:
        if not (isinstance(pair, Sequence) and len(pair) == 2 and all(type(one) is int for one in pair)):
            raise InputError(Violation("model.build", f"{name}: {shown(pair)}: must be a pair of integers"))
    return tuple(sorted((first, second) for first, second in pairs))


def _require_edges(edges: Sequence[tuple[int, int]], layers: int) -> None:
    """Check that the edges are distinct and lead to later ones of `layers` layers."""
    for edge in edges:
        if not 0 <= edge[0] < edge[1] < layers:
            problem = f"edge {edge} must go from a layer to a later one of {layers}"
            raise InputError(Violation("model.build", problem))
    if len(set(edges)) < len(edges):
        twice = next(edge for edge in edges if edges.count(edge) > 1)
        raise InputError(Violation("model.build", f"edge {twice} is there more than once"))


def _reads(
    edges: Sequence[tuple[int, int]],
    layers: int,
    inputs: int,
    given: Iterable[tuple[int, int]] | None,
) -> list[tuple[int, int]]:
    """Return pairs (input, layer that reads it) of a model, the `given` ones or the default; all `inputs` are
    read."""
    begins = sorted({*range(layers)} - {consumer for _, consumer in edges})
    if given is not None:
        pairs = sorted(set(given))
    elif inputs == 1:
        pairs = [(0, layer) for layer in begins]
    else:
        pairs = list(enumerate(begins))
    wrong = [pair for pair in pairs if not (0 <= pair[0] < inputs and 0 <= pair[1] < layers)]
    idle = {*begins} - {layer for _, layer in pairs}
    if wrong and given is not None:
        problem = f"input {wrong[0]} must lead from one of {inputs} inputs to one of {layers} layers"
    elif wrong or {number for number, _ in pairs} != {*range(inputs)}:
        problem = f"the example has {counted(inputs, 'input')}, and layers without a producer are {begins}"
        problem += "; name `inputs`"
    elif idle:
        problem = f"layer {min(idle)} reads neither an input nor another layer"
    else:
        return pairs
    raise InputError(Violation("model.build", problem))


def _costed(
    index: int, make: Callable[[], nn.Module], samples: Sequence[torch.Tensor], before: Sequence[torch.Tensor]
) -> tuple[Layer, torch.Tensor, tuple[CalledLinear, ...]]:
    """Return one layer's costs for one sample, its output, and the linear layers that it calls."""
    work = CountedOperators()
    try:
        with torch.device("meta"):
            module = make()
        if not isinstance(module, nn.Module):
            raise TypeError(f"its function returns {type(module).__name__}, no module")
        if not all(one.is_meta for one in module.parameters()):
            raise TypeError("its function must make a new module, on torch's default device")
        module.to("meta")  # buffers from data
        versions = {name: buffer._version for name, buffer in module.named_buffers()}
        read = [one.detach().requires_grad_(one.is_floating_point()) for one in before]
        inputs = [*(one.detach() for one in samples), *read]
        linears = _Linears(module)
        with work, storages_saved(module.parameters()) as kept:
            output = module(*inputs)
        _require_unchanged(index, module, versions)
        if not isinstance(output, torch.Tensor) or output.dim() < 1 or len(output) != len(inputs[0]):
            raise TypeError(f"its output is no tensor of {len(inputs[0])} sample")
    except InputError:
        raise
    except Exception as error:
        raise InputError(
            Violation("model.build", f"layer {index} cannot be run: {failure(error)}")
        ) from error
    name, kind = f"layer.{index}", type(module).__name__
    layer = work.layer(name, kind, parameters=module.parameters(), kept=kept.values(), output=output)
    return layer, output.detach(), linears.called


class _Linears:
    """The linear layers of a module, and the tensors that they read in one call."""

    def __init__(self, module: nn.Module) -> None:
        # Tensors that several modules own, or that one of them owns twice, have gradients of all their uses.
        owners = Counter(id(one) for part in module.modules() for one in part._parameters.values())
        # By name, in the order of the calls; None: called more than once, or outside of the graph.
        self._reads: dict[str, tuple[nn.Linear, torch.Tensor] | None] = {}
        for name, part in module.named_modules():
            own = [one for one in part._parameters.values() if one is not None]
            plain = type(part).forward is nn.Linear.forward and part._parameters.get("weight") is not None
            if plain and all(one.requires_grad and owners[id(one)] == 1 for one in own):
                part.register_forward_hook(partial(self._call, name))

    def _call(self, name: str, module: nn.Linear, given: tuple[torch.Tensor, ...], output: Any) -> None:
        seen = name not in self._reads and given and output.requires_grad
        self._reads[name] = (module, given[0]) if seen else None

    @property
    def called(self) -> tuple[CalledLinear, ...]:
        numbers: dict[int, int] = {}
        found = []
        for name, call in self._reads.items():
            if call is not None:
                module, read = call
                number = numbers.setdefault(id(read), len(numbers))
                inner, columns = module.in_features, module.out_features
                found.append(CalledLinear(name, number, inner, columns, read.numel() // inner))
        return tuple(sorted(found, key=lambda one: one.reads))


def _require_unchanged(index: int, module: nn.Module, versions: Mapping[str, int]) -> None:
    """Check that the module's buffers have the `versions` from before the run."""
    changed = sorted(name for name, buffer in module.named_buffers() if versions.get(name) != buffer._version)
    if changed:
        problem = f"layer {index} changes its state while it runs: {', '.join(changed)}"
        raise InputError(Violation("model.build", problem))
