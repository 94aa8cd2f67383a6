"""Operators join their module or block unless that closes a cycle of layers."""

from __future__ import annotations

import own_models
import torch
from captured_models import SMALL
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from weft.capture.graphs.captured import CapturedModel
from weft.capture.graphs.joining import joined


def names(module: nn.Module, example: torch.Tensor, level: str) -> list[str]:
    return [layer.name for layer in CapturedModel(module, example, level=level).layer_graph().layers]


def test_blocks_are_elements_of_lists_and_modules_beside_them() -> None:
    module, example = SMALL["llama"]()
    assert names(module, example, "block") == [
        "model.embed_tokens",
        "model.layers.0",
        "model.layers.1",
        "model.norm",
        "lm_head",
    ]
    assert names(*own_models.branches(), "block") == ["stem", "tanh", "narrow", "wide", "cat", "head"]


def test_an_operator_in_place_is_one_layer_with_the_operator_that_it_changes() -> None:
    assert names(*own_models.branches(), "operator") == [
        "stem.conv2d",
        "tanh",
        "narrow.conv2d",
        "wide.conv2d+relu",
        "wide.2.conv2d",
        "cat",
        "head.linear",
    ]


class Crossed(nn.Module):
    """One module is called before and after another."""

    def __init__(self) -> None:
        super().__init__()
        self.outer, self.inner = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.outer(self.inner(self.outer(inputs)))


def test_a_module_around_another_is_two_layers_with_common_weights() -> None:
    graph = CapturedModel(Crossed(), torch.zeros(1, 4), level="block").layer_graph()
    assert [layer.name for layer in graph.layers] == ["outer", "inner", "outer.2"]
    assert [one.layers for one in graph.tied] == [(0, 2), (0, 2)]
    assert graph.parameters() == 40


@given(st.data())
def test_layers_form_no_cycle_and_have_every_operator_once(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 12))
    reads = [sorted(data.draw(st.sets(st.integers(0, node - 1)))) if node else [] for node in range(count)]
    keys = data.draw(st.lists(st.sampled_from("abc"), min_size=count, max_size=count))
    tie = st.tuples(st.integers(0, count - 1), st.integers(0, count - 1))
    together = data.draw(st.lists(tie, max_size=2))
    groups = joined(reads, together, keys)
    assert sorted(node for group in groups for node in group) == list(range(count))
    place = {node: index for index, group in enumerate(groups) for node in group}
    # Layers stand behind all that they read.
    assert all(place[one] <= place[node] for node in range(count) for one in reads[node])
    assert all(place[one] == place[other] for one, other in together)
    tied = {node for pair in together for node in pair}
    for group in groups:
        assert len({keys[node] for node in group if node not in tied}) <= 1 or tied & set(group)
