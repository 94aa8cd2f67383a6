"""Choices per layer: the options of methods for single layers, and the changed layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from weft.bundles import parts
from weft.errors import InputError, Violation, nearest

if TYPE_CHECKING:
    from weft.describe.job import Job
    from weft.describe.layer import Layer
    from weft.describe.layer_graph import LayerGraph
    from weft.describe.plan import LayerChoice

Value = int | float | str
_WHERE = "plan: layer_choices"


@dataclass(frozen=True, kw_only=True)
class LayerOption:
    """An option of layers; a method contributes it.

    Attributes:
        name: the choice's name in plans.
        refuse: returns the reason why a layer cannot have a value, or None.
        changed: returns the layer with a value, for samples of a number of tokens; its name does not change.
        refuse_job: returns the reason why a job's devices or precision cannot run the option, or None.
    """

    name: str
    refuse: Callable[[Layer, Value], str | None]
    changed: Callable[[Layer, Value, int], Layer]
    refuse_job: Callable[[Job], str | None] = lambda job: None


def layer_options() -> Mapping[str, LayerOption]:
    """Return the options of all methods by name."""
    return {one.name: one for one in parts(LayerOption)}


def choice_problems(choices: Sequence[LayerChoice], graph: LayerGraph) -> Iterator[Violation]:
    """Yield all mistakes in choices for the layers of a model."""
    known, last = layer_options(), len(graph.layers) - 1
    taken: set[tuple[str, int]] = set()
    for choice in choices:
        option = known.get(choice.name)
        if option is None:
            allowed = ", ".join(sorted(known)) or "none"
            yield Violation(_WHERE, f"{choice.name!r} is not one of {allowed}", nearest(choice.name, known))
            continue
        for layer in choice.layers:
            if layer > last:
                yield Violation(
                    _WHERE, f"{choice.name} of layer {layer}: layers 0 to {last} exist", str(last)
                )
            elif (choice.name, layer) in taken:
                yield Violation(_WHERE, f"{choice.name} of layer {layer} is chosen more than once")
            elif reason := option.refuse(_as_modelled(graph).layers[layer], choice.value):
                yield Violation(_WHERE, f"{choice.name} of layer {layer}: {reason}")
            taken.add((choice.name, layer))


def job_problems(choices: Sequence[LayerChoice], job: Job) -> list[Violation]:
    """Return one line for each chosen option that a job's devices or precision cannot run."""
    known = layer_options()
    chosen = [known[name] for name in sorted({choice.name for choice in choices} & set(known))]
    return [Violation(one.name, reason) for one in chosen if (reason := one.refuse_job(job)) is not None]


def with_choices(graph: LayerGraph, choices: Sequence[LayerChoice]) -> LayerGraph:
    """Return the graph of the same model, with the costs of layers under exactly these choices.

    Raises:
        InputError: with all mistakes in the choices.
    """
    model = _as_modelled(graph)
    if not choices:
        return model
    if problems := list(choice_problems(choices, model)):
        raise InputError(problems)
    wanted: dict[int, tuple[tuple[str, Value], ...]] = {}
    for choice in choices:
        for layer in choice.layers:
            wanted[layer] = (*wanted.get(layer, ()), (choice.name, choice.value))
    # Equal layers with the same choices stay equal.
    made: dict[tuple[int, tuple[tuple[str, Value], ...]], Layer] = {}
    layers = list(model.layers)
    for index, chosen in wanted.items():
        key = (model.alike[index], chosen)
        if key not in made:
            made[key] = _changed(layers[index], chosen, model.sequence)
        layers[index] = replace(made[key], name=layers[index].name)
    return replace(model, layers=tuple(layers), model=model)


def _as_modelled(graph: LayerGraph) -> LayerGraph:
    """Return the graph without choices."""
    return graph if graph.model is None else graph.model


def _changed(layer: Layer, chosen: Sequence[tuple[str, Value]], sequence: int) -> Layer:
    changed, options = layer, layer_options()
    for name, value in chosen:
        changed = options[name].changed(changed, value, sequence)
    return replace(changed, unchanged=layer)
