"""Laws of K-FAC where tensor ranks divide linear layers: factors and products are those of whole ones."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from thread_group import ThreadGroup, in_groups

from weft.methods.kfac.runtime.factors import DampedInverse, Eigenvectors, Factor
from weft.methods.kfac.runtime.linear_parts import INPUTS, OUTPUTS, DividedLinear, with_all_features
from weft.run.parallel.tensor_layers import Division
from weft.run.parallel.tensor_parallel import TensorRanks

SEEDS, RANKS = st.integers(0, 2**32), st.sampled_from([2, 3])
STREAM = 5


def drawn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def tensor_ranks(group: ThreadGroup, *, divides_sequence: bool = False) -> TensorRanks:
    ranks = TensorRanks(group.place, group.size, divides_sequence=divides_sequence)
    ranks.connect(group)
    return ranks


@given(SEEDS, RANKS, st.integers(1, 3), st.integers(1, 8), st.booleans())
@settings(max_examples=25)
def test_ranks_add_up_to_the_factors_of_all_rows_and_features(
    seed: int, size: int, blocks: int, rows: int, divides_sequence: bool
) -> None:
    """One layer reads the stream and returns divided features, another one reads these for the stream."""
    rows *= size if divides_sequence else 1
    stream, wide = drawn(seed, rows, STREAM), drawn(seed + 1, rows, 2 * blocks * size)
    division = Division(1, blocks, wide.shape[1])

    def sums(group: ThreadGroup) -> list[torch.Tensor]:
        ranks = tensor_ranks(group, divides_sequence=divides_sequence)
        linears = [DividedLinear(ranks, side, division) for side in (OUTPUTS, INPUTS)]
        own, left = division.own(wide, ranks), ranks.own_tokens(stream, 0)
        found = []
        for side, shown in ((INPUTS, (stream, own)), (OUTPUTS, (own, left))):
            kept = [one.kept(side, part) for one, part in zip(linears, shown, strict=True)]
            for one, part, some in zip(linears, shown, kept, strict=True):
                features = wide.shape[1] if part is own else STREAM
                assert one.kept_shape(side, rows, features) == tuple(some.shape)
            found += [one.T @ one for one in with_all_features(linears, side, kept)]
        # To each other rank go the features of its rows, of both sides.
        sent = 2 * own.element_size() * own.shape[1] * (rows - len(ranks.share(rows)))
        assert group.sent_bytes.get("rows", 0) == sent
        return found

    each = [sum(parts) for parts in zip(*in_groups(size, sums), strict=True)]
    for found, whole in zip(each, (stream, wide, wide, stream), strict=True):
        torch.testing.assert_close(found, whole.T @ whole)


@pytest.mark.parametrize("form", [DampedInverse, Eigenvectors])
@pytest.mark.parametrize("side", [INPUTS, OUTPUTS])
@given(seed=SEEDS, size=RANKS, blocks=st.integers(1, 3))
@settings(max_examples=10)
def test_products_of_parts_are_parts_of_the_product(
    form: type[Factor], side: int, seed: int, size: int, blocks: int
) -> None:
    divided = 2 * blocks * size
    columns, inner = (divided, STREAM) if side == OUTPUTS else (STREAM, divided)
    outputs, inputs = result_of(seed, columns, form), result_of(seed + 1, inner, form)
    weight, bias = drawn(seed + 2, columns, inner), drawn(seed + 3, columns)
    division = Division(1 - side, blocks, divided)

    def multiplied(group: ThreadGroup) -> tuple[torch.Tensor, torch.Tensor]:
        ranks = tensor_ranks(group)
        linear, own = DividedLinear(ranks, side, division), division.own(weight, ranks)
        own_bias = division.own(bias, ranks) if side == OUTPUTS else bias
        return (
            form.multiplied(own, outputs, inputs, 0.1, linear),
            form.multiplied(own_bias, outputs, (), 0.1, linear),
        )

    weights, biases = zip(*in_groups(size, multiplied), strict=True)
    ranks = TensorRanks(0, size)
    torch.testing.assert_close(division.joined(weights, ranks), form.multiplied(weight, outputs, inputs, 0.1))
    expected = form.multiplied(bias, outputs, (), 0.1)
    if side == OUTPUTS:
        torch.testing.assert_close(division.joined(biases, ranks), expected)
    else:
        # All ranks have the whole bias, and stay equal.
        assert all(torch.equal(one, expected) for one in biases)


def result_of(seed: int, size: int, form: type[Factor]) -> tuple[torch.Tensor, ...]:
    factor = form(size, torch.float64, torch.device("cpu"))
    factor.add(drawn(seed, 2 * size, size), 1.0 / size)
    factor.complete()
    factor.invert(0.1, factor.mean)
    return factor.next
