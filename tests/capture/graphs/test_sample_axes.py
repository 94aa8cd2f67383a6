"""Samples are followed through views as numpy moves them."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from weft.capture.graphs.sample_axes import SamplesAt, _reshaped


def places(value: np.ndarray, samples: int) -> list[SamplesAt]:
    """Return all places that tell the sample of each element."""
    found = []
    for axis, size in enumerate(value.shape):
        shape = [-1 if one == axis else 1 for one in range(value.ndim)]
        for inner in range(1, size // samples + 1):
            along = (np.arange(size) // inner % samples).reshape(shape)
            if size % (inner * samples) == 0 and (value == along).all():
                found.append(SamplesAt(axis, inner))
    return found


@given(st.data())
def test_views_move_samples_as_in_an_array(data: st.DataObject) -> None:
    samples = data.draw(st.integers(2, 4))
    factors = [samples, *data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))]
    value = np.broadcast_to(np.arange(samples).reshape(-1, *[1] * (len(factors) - 1)), factors)
    place: SamplesAt | None = SamplesAt(0)
    for _ in range(data.draw(st.integers(1, 3))):
        before = value.shape
        count = len(factors)
        cuts = sorted(data.draw(st.sets(st.integers(1, count - 1)))) if count > 1 else []
        after = tuple(math.prod(factors[a:b]) for a, b in pairwise([0, *cuts, count]))
        value = value.reshape(after)
        place = _reshaped(place, samples, before, after)
        assert places(value, samples) == ([] if place is None else [place])
        if place is None:
            return
        order = data.draw(st.permutations(range(value.ndim)))
        value, place = value.transpose(order), SamplesAt(order.index(place.axis), place.inner)
        factors = data.draw(st.permutations(factors))
