"""User-defined models: `package.module:function` names a function that returns an `OwnModel`.

`weft.BlockModel` is one, made of a list of layers; any other object with the same members works, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol, runtime_checkable

from weft.describe.layer_graph import LayerGraph
from weft.describe.model import ModelConfig
from weft.errors import InputError, Violation
from weft.installed import failure, imported

FAMILY = "own"


@runtime_checkable
class OwnModel(Protocol):
    """The result of a function that a run file names.

    Attributes:
        sample_shapes: the shape of each input of one sample, then of each layer's output.
    """

    sample_shapes: Sequence[tuple[int, ...]]

    def layer_graph(self) -> LayerGraph:
        """Return the costed layers; the graph's name does not matter.

        Its `inputs` tell which layers read which input of a sample. Only the last layer has no consumer.
        """
        ...

    def layer(self, index: int) -> Any:
        """Return the torch module of one layer, with initial values drawn from torch's generator.

        Its arguments are the inputs of a sample that it reads, then its producers' outputs, in their order.
        """
        ...


class CalledLinear(NamedTuple):
    """A linear layer inside a layer of a model, which is called once for a sample.

    Attributes:
        name: in its layer; empty if it is the layer.
        reads: the number of the tensor that it reads, among those of its layer.
        inner, columns: the features that it reads and returns.
        rows: the vectors of a sample that it multiplies.
    """

    name: str
    reads: int
    inner: int
    columns: int
    rows: int


@runtime_checkable
class ShowsLinears(Protocol):
    """A model that also tells its linear layers."""

    def linears(self, index: int) -> Sequence[CalledLinear]:
        """Return the linear layers of one layer, those that read one tensor after each other."""
        ...


@runtime_checkable
class ShowsSamples(OwnModel, Protocol):
    """A model that has samples to measure its layers with."""

    def samples(self, count: int) -> Sequence[Any]:
        """Return one tensor with that number of samples for each input."""
        ...


@runtime_checkable
class SharesParameters(Protocol):
    """A model with parameters that several layers use, the `tied` ones of its graph."""

    def shared_names(self) -> Sequence[Mapping[int, str]]:
        """Return the names of each tied parameter in its layers, in the order of the graph's."""
        ...


def require_model(model: object, where: str, given: str) -> None:
    """Refuse what is no `OwnModel`, `given` in words.

    Raises:
        InputError: at `where`.
    """
    if not isinstance(model, OwnModel):
        problem = f"{given}, which is no model: it needs sample_shapes, layer_graph() and layer(index)"
        raise InputError(Violation(where, problem, "weft.BlockModel or weft.CapturedModel"))


def own_model(name: str) -> OwnModel:
    """Build the model of `package.module:function`.

    Raises:
        InputError: when the function cannot be imported, fails, or does not return a model.
    """
    function = imported("model.build", name)
    if not callable(function):
        raise InputError(Violation("model.build", f"{name!r} is no function"))
    try:
        model: OwnModel = function()
    except InputError:
        raise
    except Exception as error:
        raise InputError(Violation("model.build", f"{name!r} fails: {failure(error)}")) from None
    require_model(model, "model.build", f"{name!r} returned {type(model).__name__}")
    graph = model.layer_graph()
    if len(model.sample_shapes) != len(graph.layers) + graph.input_count:
        given = f"{name!r} has {len(graph.layers)} layers and {len(model.sample_shapes)} sample_shapes"
        more = "one shape" if graph.input_count == 1 else f"{graph.input_count} shapes"
        raise InputError(Violation("model.build", f"{given}; needed: {more} more than layers"))
    unread = {*range(len(graph.layers) - 1)} - {producer for producer, _ in graph.edges}
    if unread:
        problem = (
            f"{name!r}: no layer reads what layer {min(unread)} gives; only the last one gives the output"
        )
        raise InputError(Violation("model.build", problem))
    return model


def own_config(name: str) -> ModelConfig:
    """Return the sizes of a user-defined model that do not need its layers.

    Samples of one input of shape (channels, size, size) are images.

    Raises:
        InputError: as `own_model`.
    """
    model = own_model(name)
    graph, first = model.layer_graph(), model.sample_shapes[0]
    images = graph.input_count == 1 and len(first) == 3 and first[1] == first[2]
    return graph_config(
        graph,
        name=name,
        family=FAMILY,
        image_size=first[1] if images else 0,
        channels=first[0] if images else 0,
    )


def graph_config(graph: LayerGraph, *, name: str, family: str, **rest: Any) -> ModelConfig:
    """Return the sizes of a model that its layers alone describe; `rest` are further fields."""
    return ModelConfig(
        name=name,
        family=family,
        layers=len(graph.layers) - 2,
        hidden=0,
        heads=0,
        key_value_heads=0,
        feed_forward=0,
        vocabulary=graph.vocabulary,
        sequence=graph.sequence,
        **rest,
    )


def layer_graph(config: ModelConfig) -> LayerGraph:
    """Return the costed layers, with the function's name as the graph's name."""
    return replace(own_model(config.name).layer_graph(), name=config.name)
