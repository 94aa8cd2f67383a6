"""The size of clipped micro-batches that recorded norms and steps make best, by a rule of weft's own.

Some samples are *draggers*: they pull a micro-batch away from the mean gradient. A micro-batch of b samples
has none with probability (1 - e)^b, where e is the share of draggers. Its gradient then has the cosine
1 / sqrt(1 + s / b) with the mean gradient. The noise s is that of one sample's gradient over the signal, both
squared. The product of the two says how far a mean of directions reaches. Small micro-batches are noisy, and
large ones have draggers.
"""

from __future__ import annotations

from math import log1p, sqrt
from typing import NamedTuple

import numpy as np

from weft.program.arrays import Floats

# Norms this many robust deviations above the median are those of draggers; of normal noise, 1 in 740 is.
_FAR = 3.0
# The standard deviation of a normal distribution over its median absolute deviation.
_DEVIATION = 1.4826


class Draggers(NamedTuple):
    """The samples that steps under `min` tell of.

    Attributes:
        rate: the share of draggers among samples, e.
        noise: squared noise of a sample's gradient over the squared mean gradient, s.
    """

    rate: float
    noise: float

    def reach(self, samples: float) -> float:
        """Return how far a mean of directions of micro-batches of so many samples reaches, from 0 to 1."""
        return float((1.0 - self.rate) ** samples) / sqrt(1.0 + self.noise / samples)

    @property
    def best_samples(self) -> float:
        """The samples of a micro-batch that reach farthest; infinite without draggers."""
        if self.rate == 0.0:
            return float("inf")
        per_sample = -log1p(-self.rate)
        # Where the derivative of the logarithm of `reach` is zero.
        return (sqrt(self.noise**2 + 2.0 * self.noise / per_sample) - self.noise) / 2.0


def estimate(norms: Floats, lengths: Floats, samples: int) -> Draggers | None:
    """Return what recorded steps tell of draggers; None if the directions of a step do not agree at all.

    Args:
        norms: of the mean gradients of clipped micro-batches, (steps, micro-batches), finite and above zero.
        lengths: the norm of each step's gradient over the bound, which is that of the mean of directions,
            (steps,).
        samples: of a clipped micro-batch.
    """
    count = norms.shape[1]
    if count < 2:
        return None
    sizes = np.log(norms)
    middle = np.median(sizes, axis=1, keepdims=True)
    deviation = _DEVIATION * np.median(np.abs(sizes - middle), axis=1, keepdims=True)
    spoilt = float((sizes > middle + _FAR * deviation).mean())
    # Directions that do not agree have a mean with a squared length of 1 / count.
    agreeing = (count * float(np.mean(lengths**2)) - 1.0) / (count - 1.0)
    if agreeing <= 0.0 or spoilt == 1.0:
        return None
    cosine = min(1.0, sqrt(agreeing) / (1.0 - spoilt))
    rate = 1.0 - (1.0 - spoilt) ** (1.0 / samples)
    return Draggers(rate, samples * (cosine**-2 - 1.0))
