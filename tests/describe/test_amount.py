"""Amounts: arithmetic agrees with evaluation, text reads back exactly, bad text is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.describe.amount import ZERO, Amount, Shape
from weft.errors import InputError

shapes = st.builds(Shape, st.integers(1, 64), st.integers(1, 4096), st.sampled_from([1, 2, 4, 8]))
terms = st.builds(
    lambda coefficient, batch, sequence, tensor, stream: Amount.of(
        coefficient, batch=batch, sequence=sequence, tensor=tensor, stream=stream
    ),
    st.floats(min_value=1e-3, max_value=1e9),
    st.integers(0, 2),
    st.integers(0, 2),
    st.integers(0, 2),
    st.integers(0, 2),
)
amounts = st.lists(terms, max_size=4).map(lambda parts: sum(parts, ZERO))


@given(amounts, amounts, shapes)
def test_sum_and_product_agree_with_evaluation(left, right, shape):
    assert (left + right)(shape) == pytest.approx(left(shape) + right(shape), rel=1e-12)
    assert (left * right)(shape) == pytest.approx(left(shape) * right(shape), rel=1e-12)


@given(amounts)
def test_text_reads_back_exactly(amount):
    assert Amount.parse(str(amount)) == amount


@given(amounts, amounts)
def test_equal_sums_are_equal_objects(left, right):
    assert (left + right).terms == (right + left).terms


def test_products_of_numbers_and_symbols():
    assert Amount.parse("2*4096*b*s/t + b")(Shape(3, 10, 2)) == 2 * 4096 * 3 * 10 / 2 + 3


def test_the_sequence_is_divided_over_the_tensor_ranks_where_they_divide_it():
    stream = Amount.parse("b*s/d")
    assert stream(Shape(3, 10, 2)) == 3 * 10 / 2
    assert stream(Shape(3, 9, 2)) == 3 * 9


def test_tensor_ranks_divide_the_tokens_of_their_context_rank_where_they_divide_these():
    stream = Amount.parse("b*s/d")
    assert stream(Shape(3, 16, 2, 2)) == 3 * 16 / 2 / 2
    assert stream(Shape(3, 12, 4, 2)) == 3 * 12 / 2


def test_context_ranks_have_equal_parts_of_what_counts_tokens():
    whole, own = Shape(3, 12, 2), Shape(3, 12, 2, 3)
    assert (whole.divides_tokens, own.divides_tokens) == (False, True)
    tokens = Amount.parse("b*s/t")
    assert tokens(own) == own.own_part(tokens(whole)) == tokens(whole) / 3
    assert own.all_parts(tokens(own)) == tokens(whole)


@pytest.mark.parametrize("text", ["", "b+s", "2*x", "b/s", "1/0", "t", "d", "2**b", "__import__('os')"])
def test_anything_else_is_refused(text):
    with pytest.raises(InputError):
        Amount.parse(text)
