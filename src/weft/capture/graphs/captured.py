"""`CapturedModel`: a whole module of the user's, cut into layers by its exported graph.

def build() -> weft.CapturedModel:
    return weft.CapturedModel(Inception(), example=torch.zeros(1, 3, 299, 299), level="block")
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from weft.capture.graphs.exported import Example, ExportedModule, export_module
from weft.capture.graphs.levels import OperatorGroup, groups_of
from weft.capture.graphs.pieces import OperatorPiece, pieces_of, run_piece
from weft.capture.graphs.values import values_of
from weft.capture.layer_costs import CountedOperators, storages_saved
from weft.capture.model_arguments import BUILD, require_counts
from weft.describe.amount import Amount
from weft.describe.layer import Layer, distinct_kinds
from weft.describe.layer_graph import LayerGraph, TiedParameters
from weft.describe.one_line import one_line
from weft.errors import InputError, Violation


class CapturedModel:
    """The layers of a module; they compute what the module computes, with its values.

    The module treats every sample by itself, and changes nothing but its parameters.

    Args:
        module: returns one floating tensor; or a model of `transformers`, whose logits, else last hidden
            states, are the result. Parameters on the meta device suffice for plans.
        example: one sample or several: a tensor, a tuple of them, or a mapping from the names of arguments to
            tensors, each with the samples on the first axis. Only shapes and types matter.
        level: `operator`, `module` for the operators of one module without parts, or `block` for those of one
            element of a list of modules.
        classes: classes in the result; default: its last axis.
        sequence: tokens per sample, which `tokens_per_s` counts; default: the second axis of the first input
            if it holds whole numbers, else 1.

    Raises:
        InputError: when the module cannot be captured, with the place in its code.
    """

    def __init__(
        self,
        module: nn.Module,
        example: Example,
        *,
        level: str = "block",
        classes: int | None = None,
        sequence: int | None = None,
    ) -> None:
        require_counts(classes=classes, sequence=sequence)
        exported = export_module(module, example)
        values = values_of(exported)
        groups = groups_of(values, level)
        self._pieces = pieces_of(values, groups)
        layers, shapes = _costed(exported, self._pieces, groups)
        first = exported.examples[0]
        tokens = first.shape[1] if not first.is_floating_point() and first.dim() > 1 else 1
        inputs = [(number, index) for index, piece in enumerate(self._pieces) for number in piece.inputs]
        edges = [(one, index) for index, piece in enumerate(self._pieces) for one in piece.reads]
        self.level = level
        self.sample_shapes: Sequence[tuple[int, ...]] = (
            *(tuple(one.shape[1:]) for one in exported.examples),
            *shapes,
        )
        self._graph = LayerGraph(
            name=type(module).__name__,
            layers=distinct_kinds(layers),
            edges=tuple(sorted(edges)),
            sequence=sequence or tokens,
            vocabulary=classes or shapes[-1][-1],
            inputs=() if _is_usual(inputs, edges, len(exported.inputs)) else tuple(sorted(inputs)),
            tied=tuple(
                TiedParameters(tuple(names), Amount.of(size)) for names, size in _shared(self._pieces)
            ),
        )
        self._examples = exported.examples

    def __repr__(self) -> str:
        return one_line(self, f"{self._graph.name} of {len(self._pieces)} layers, level {self.level}")

    def layer_graph(self) -> LayerGraph:
        """Return the costed layers; all amounts but parameters are proportional to the samples."""
        return self._graph

    def layer(self, index: int) -> nn.Module:
        """Return a new module of one layer, with the values of the captured module.

        Raises:
            InputError: when a parameter is on the meta device.
        """
        tensors = {name: _copy(name, tensor) for name, tensor in self._pieces[index].tensors.items()}
        return self._pieces[index].module(tensors)

    def shared_names(self) -> Sequence[Mapping[int, str]]:
        """Return the names of each tied parameter in its layers, in the order of the graph's."""
        return [names for names, _ in _shared(self._pieces)]

    def samples(self, count: int) -> Sequence[torch.Tensor]:
        """Return the inputs of that number of samples, each like the example."""
        return [one.expand(count, *one.shape[1:]).contiguous() for one in self._examples]


def _copy(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_meta:
        raise InputError(
            Violation(BUILD, f"{name} is on the meta device and has no values; it can be planned")
        )
    value = tensor.detach().clone()
    return nn.Parameter(value, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value


def _is_usual(inputs: Sequence[tuple[int, int]], edges: Sequence[tuple[int, int]], count: int) -> bool:
    """Return True if every layer without a producer reads the only input, and no other layer does."""
    fed = {consumer for _, consumer in edges}
    return count == 1 and not any(layer in fed for _, layer in inputs)


def _costed(
    exported: ExportedModule, pieces: Sequence[OperatorPiece], groups: Sequence[OperatorGroup]
) -> tuple[list[Layer], list[tuple[int, ...]]]:
    """Return each layer's costs for one sample, and the shape of its output, from a run without data.

    A storage that several layers save for their backward passes counts in the first.
    """
    layers, outputs, known, counted = list[Layer](), list[torch.Tensor](), set[int](), set[int]()
    with _plain_recurrence(), FakeTensorMode(allow_non_fake_inputs=True):
        fakes: dict[int, torch.Tensor] = {}
        samples = [_fake(one, fakes) for one in exported.examples]
        for piece, group in zip(pieces, groups, strict=True):
            tensors = {name: _fake(tensor, fakes) for name, tensor in piece.tensors.items()}
            read = [*(samples[number] for number in piece.inputs), *(outputs[layer] for layer in piece.reads)]
            work = CountedOperators()
            owned = [one for one in tensors.values() if isinstance(one, nn.Parameter)]
            with work, storages_saved(owned, known) as kept:
                output = run_piece(piece, tensors, read)
            known |= set(kept)
            own = {id(one): one for one in owned if id(one) not in counted}
            counted |= set(own)
            layers.append(
                work.layer(group.name, group.kind, parameters=own.values(), kept=kept.values(), output=output)
            )
            # With its graph, so that no storage is used twice.
            outputs.append(output)
    return layers, [tuple(one.shape[1:]) for one in outputs]


@contextmanager
def _plain_recurrence() -> Iterator[None]:
    """Let recurrent layers run step by step, because the size of oneDNN's workspace is unknown."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.backends.mkldnn.flags(enabled=False):
            yield


def _fake(tensor: torch.Tensor, fakes: dict[int, torch.Tensor]) -> torch.Tensor:
    """Return a tensor without data, the same for the same tensor; floating ones have 4 bytes per element."""
    if id(tensor) not in fakes:
        kind = torch.float32 if tensor.is_floating_point() else tensor.dtype
        fake = torch.empty(tensor.shape, dtype=kind)
        fakes[id(tensor)] = (
            nn.Parameter(fake, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake
        )
    return fakes[id(tensor)]


def _shared(pieces: Sequence[OperatorPiece]) -> list[tuple[Mapping[int, str], int]]:
    """Return each trained parameter that several layers use: its name in each of them, and its size."""
    names: dict[int, dict[int, str]] = {}
    sizes: dict[int, int] = {}
    for index, piece in enumerate(pieces):
        for name, tensor in piece.tensors.items():
            if tensor.requires_grad:
                names.setdefault(id(tensor), {})[index] = name
                sizes[id(tensor)] = tensor.numel()
    return [(layers, sizes[key]) for key, layers in names.items() if len(layers) > 1]
