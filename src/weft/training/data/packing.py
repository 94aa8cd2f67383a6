"""Documents packed into samples of one size, with as few samples as best fit finds.

The longest document comes first. Each goes into the sample with the least space that still holds it (best-fit
decreasing; Ding et al., Fewer Truncations Improve Language Modeling, arXiv 2404.10830, section 3).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np

from weft.program.arrays import Ints


@dataclass(frozen=True, slots=True)
class Packs:
    """The documents of each sample: `documents[borders[i]:borders[i + 1]]` are those of sample i."""

    documents: Ints
    borders: Ints

    def __len__(self) -> int:
        return len(self.borders) - 1

    def of(self, sample: int) -> Ints:
        return self.documents[self.borders[sample] : self.borders[sample + 1]]

    def sums(self, counts: Ints) -> Ints:
        """Return the sum over each sample's documents; `counts` has one number for each document."""
        found: Ints = np.add.reduceat(counts[self.documents], self.borders[:-1])
        return found


def best_fit(lengths: Ints, capacity: int) -> Packs:
    """Pack documents of these lengths, each from 1 to `capacity`, into samples of `capacity`."""
    samples: list[list[int]] = []
    # Of samples with space, by it: (space, sample), rising.
    open_samples: list[tuple[int, int]] = []
    for document in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[document])
        place = bisect_left(open_samples, (length, 0))
        if place == len(open_samples):
            space, sample = capacity, len(samples)
            samples.append([])
        else:
            space, sample = open_samples.pop(place)
        samples[sample].append(document)
        if space > length:
            insort(open_samples, (space - length, sample))
    borders = np.cumsum([0, *map(len, samples)], dtype=np.int64)
    return Packs(np.array([one for some in samples for one in some], dtype=np.int64), borders)
