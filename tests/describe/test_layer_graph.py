"""LayerGraph files read back, fingerprints see every change, illegal graphs are refused."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.describe.amount import Amount, Shape
from weft.describe.families import layer_graph
from weft.describe.layer import Layer, Matmul, PassWork
from weft.describe.layer_graph import LayerGraph, TiedParameters, chain_edges
from weft.describe.models import PRESETS
from weft.errors import InputError

GRAPHS = {name: layer_graph(PRESETS[name]) for name in ("gpt2", "llama-13b", "bert-large", "resnet-50")}


def small_graph() -> LayerGraph:
    tokens = Amount.of(1, batch=1, sequence=1)
    matmul = Matmul(Amount.of(1), tokens, Amount.of(8), Amount.of(16))
    layer = Layer(
        name="block.0",
        kind="block",
        parameters=Amount.of(128, tensor=1),
        forward=PassWork((matmul,), memory=tokens * 8, kernels=3),
        kept=tokens * 8,
        sent=tokens * 16,
    )
    other = replace(layer, name="block.1")
    return LayerGraph(name="small", layers=(layer, other), edges=chain_edges(2), sequence=4)


def test_a_file_reads_back_to_the_same_graph():
    graph = small_graph()
    assert LayerGraph.from_json(graph.to_json()) == graph


@pytest.mark.parametrize("name", sorted(GRAPHS))
def test_a_file_is_plain_json_however_often_its_layers_repeat(name):
    text = GRAPHS[name].to_json()
    record = json.loads(text)
    assert json.dumps(record, indent=1, sort_keys=True) == text
    layers = record["layers"]
    assert len({layer["name"] for layer in layers}) == len(layers)


@given(st.sampled_from(sorted(GRAPHS)), st.integers(1, 4), st.sampled_from([1, 2, 4]))
def test_amounts_of_all_layers_are_those_of_each(name, micro_batch_size, degree):
    graph, shape = GRAPHS[name], Shape(micro_batch_size, 64, degree, 2)
    for amount in ("parameters", "kept", "sent", "tensor_reduced", "gathered"):
        assert graph.amounts(amount, shape) == tuple(getattr(one, amount)(shape) for one in graph.layers)
    assert graph.tensor_exchanges == tuple(one.tensor_exchanges for one in graph.layers)
    assert [graph.layers[index].parts for index in graph.alike] == [one.parts for one in graph.layers]


def test_equal_sizes_have_one_graph_that_keeps_its_costs():
    first, second = (layer_graph(replace(PRESETS["gpt2"], layers=3)) for _ in range(2))
    assert first is second
    assert layer_graph(replace(PRESETS["gpt2"], layers=4)) != first


def test_feeders_are_the_producers_of_the_edges():
    graph = GRAPHS["resnet-50"]
    found = [(producer, index) for index, before in enumerate(graph.feeders) for producer in before]
    assert sorted(found) == sorted(graph.edges)


def test_parameters_are_divided_over_the_tensor_ranks():
    assert small_graph().parameters() == 256
    assert small_graph().parameters(tensor_parallel=2) == 128


def test_what_context_ranks_do_is_part_of_the_file_and_not_of_the_fingerprint():
    """Plans and measurements of a model are of the same model, whether it is known what these do or not."""
    graph = layer_graph(PRESETS["llama-13b"])
    assert LayerGraph.from_json(graph.to_json()) == graph
    plain = tuple(replace(layer, gathered=Amount(), context_kept=Amount()) for layer in graph.layers)
    assert plain != graph.layers
    assert replace(graph, layers=plain).fingerprint == graph.fingerprint


@pytest.mark.parametrize("name", ["vit-base", "resnet-18"])
def test_models_without_tokens_to_divide_say_so(name):
    near = "cp 2: no ranks can divide the tokens of this model; nearest cp: 1"
    assert layer_graph(PRESETS[name]).refuse_context(2, 256) == near
    assert layer_graph(PRESETS[name]).refuse_context(1, 197) is None


def test_the_fingerprint_sees_every_change():
    graph = small_graph()
    changed = [
        replace(graph, sequence=8),
        replace(graph, edges=()),
        replace(graph, layers=(graph.layers[0], replace(graph.layers[1], sent=Amount.of(1)))),
    ]
    assert len({graph.fingerprint, *(other.fingerprint for other in changed)}) == 4


@pytest.mark.parametrize("edges", [((1, 0),), ((0, 0),), ((0, 2),), ((-1, 0),)])
def test_an_edge_goes_forward_and_stays_inside(edges):
    with pytest.raises(InputError):
        replace(small_graph(), edges=edges)


def test_names_are_unique():
    graph = small_graph()
    with pytest.raises(InputError, match="same name"):
        replace(graph, layers=(graph.layers[0], graph.layers[0]))


@given(st.text(max_size=60) | st.binary(max_size=60).map(lambda b: b.decode("latin-1")))
def test_a_broken_file_is_one_clear_refusal(text):
    with pytest.raises(InputError):
        LayerGraph.from_json(text)


@given(st.data())
def test_a_file_with_a_piece_torn_out_is_refused(data):
    text = small_graph().to_json()
    start = data.draw(st.integers(0, len(text) - 2))
    with pytest.raises(InputError):
        LayerGraph.from_json(text[:start])


def test_what_tensor_ranks_divide_is_named_and_is_part_of_the_file():
    config = replace(PRESETS["gpt-1m"], family="llama", heads=8, key_value_heads=2, feed_forward=96)
    graph = layer_graph(config)
    assert LayerGraph.from_json(graph.to_json()).divided == graph.divided
    assert replace(graph, divided=()).fingerprint != graph.fingerprint
    assert [graph.refuse_tensor(degree) for degree in (1, 2)] == [None, None]
    assert graph.refuse_tensor(4) == "tp 4 does not divide 2 key-value heads; nearest tp: 2"
    assert graph.refuse_tensor(10**15).endswith("nearest tp: 2")
    assert graph.refuse_tensor(3) == "tp 3 does not divide 8 heads, 2 key-value heads; nearest tp: 2"


def test_tied_parameters_are_part_of_the_file_and_of_the_fingerprint():
    untied = small_graph()
    graph = replace(untied, tied=(TiedParameters((0, 1), Amount.of(3, tensor=1)),))
    assert LayerGraph.from_json(graph.to_json()) == graph
    assert untied.fingerprint != graph.fingerprint
    assert "tied" not in untied.to_json()


@pytest.mark.parametrize("layers", [(0,), (1, 0), (0, 0), (0, 99), (-1, 1)])
def test_tied_layers_are_several_of_the_graph(layers):
    graph = small_graph()
    with pytest.raises(InputError, match="must be several of"):
        replace(graph, tied=(TiedParameters(layers, Amount.of(3)),))


@pytest.mark.parametrize(
    ("inputs", "problem"),
    [
        (((0, 0), (1, 2)), "input .1, 2. must go to one of 2 layers"),
        (((0, 0), (2, 1)), "inputs .0, 2. must be numbered from 0"),
        (((0, 1),), "layer 0 reads neither an input nor another layer"),
        (((1, 0), (0, 0)), "inputs must rise"),
    ],
)
def test_inputs_go_to_layers_and_every_layer_reads(inputs, problem):
    with pytest.raises(InputError, match=problem):
        replace(small_graph(), inputs=inputs)


def test_a_chain_reads_one_input_in_its_first_layer():
    graph = small_graph()
    assert graph.is_chain
    assert (graph.inputs_read, graph.input_count) == (((0,), ()), 1)
    assert replace(graph, inputs=((0, 0),)).is_chain
    other = replace(graph, inputs=((0, 0), (1, 1)))
    assert not other.is_chain
    assert (other.inputs_read, other.input_count) == (((0,), (1,)), 2)
    assert LayerGraph.from_json(other.to_json()) == other
    assert other.fingerprint != graph.fingerprint
