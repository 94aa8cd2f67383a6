"""Laws of K-FAC's linear layers in users' own models, which torch builds."""

from __future__ import annotations

import own_models
import pytest
from torch import nn

from weft.capture.block_model import BlockModel
from weft.describe.models import resolve_model
from weft.errors import InputError
from weft.methods.kfac.linears import FACTORS, treated_in, treated_text


def test_own_models_state_the_rows_of_a_sample() -> None:
    text = "1-2: 5x6>4,4 6x5>5; 3-3: 5x6>11"
    assert treated_text(treated_in(resolve_model("own_models:mixed"))) == text
    assert treated_text(treated_in(resolve_model("own_models:images"))) == "3-3: 1x384>10"


def many() -> BlockModel:
    return own_models.of_one_layer(lambda: nn.Sequential(*[nn.Linear(4, 4) for _ in range(FACTORS + 1)]))


def wide() -> BlockModel:
    return own_models.of_one_layer(lambda: nn.Sequential(nn.Linear(4, 20_000), nn.Linear(20_000, 4)))


class Silent:
    """A model that does not tell its linear layers."""

    def __init__(self) -> None:
        model = own_models.images()
        self.sample_shapes, self.layer_graph, self.layer = model.sample_shapes, model.layer_graph, model.layer


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("own_models:diamond", r"form a graph \(nearest valid: a chain of layers\)"),
        ("methods.test_kfac_linears_runtime:many", "has more than 64 linear layers"),
        ("methods.test_kfac_linears_runtime:wide", "has no linear layers"),
        ("methods.test_kfac_linears_runtime:Silent", "does not tell its linear layers"),
    ],
)
def test_own_models_without_linear_layers_to_treat_are_refused(name: str, problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        treated_in(resolve_model(name))
