"""Documents cut into pieces, and the pieces that are held out.

The split is by hash, so it depends on nothing but what the documents are called: documents (the ones larger
than a fiftieth of the corpus cut into blocks of that size) are held out in the order of their hash until a
fiftieth of the bytes is held out. It does not depend on the tokenizer, so that losses of two tokenizers are
about the same text.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from weft.training.data.sampler import Ints, Words

HELD_OUT_SHARE = 50  # one part in fifty
# The bytes of a character in UTF-8 that are not its first one, at most.
BORDER_BYTES = 3


@dataclass(frozen=True)
class Pieces:
    """Bytes `start` to `end` of a document: all of it, or a block of a large one; columns of equal length.

    Both edges of a block move to the `boundary` at or after them when it is read.
    """

    document: Ints
    start: Ints
    end: Ints

    def __len__(self) -> int:
        return len(self.document)

    @property
    def sizes(self) -> Ints:
        return self.end - self.start


class Texts(Protocol):
    """Documents in an order of their own, whose bytes can be read again and again.

    Attributes:
        key: goes into JSON and changes when a document does.
    """

    @property
    def key(self) -> object: ...

    def sizes(self) -> Ints:
        """Return bytes of every document."""
        ...

    def order(self, pieces: Pieces) -> Words:
        """Where each piece stands in the queue for being held out."""
        ...

    def name(self, document: int) -> str:
        """What people call a document."""
        ...

    def read(self, pieces: Pieces) -> Iterator[bytes]:
        """Return the bytes of pieces that rise by (document, start), in their order.

        Raises:
            InputError: when a document cannot be read.
            RunError: when one has another size by now.
        """
        ...


def share_bytes(sizes: Ints, sequence: int) -> int:
    """How much text is held out: at least what makes one sample of bytes."""
    return max(int(sizes.sum()) // HELD_OUT_SHARE, sequence + 1)


def cut(sizes: Ints, share: int) -> Pieces:
    """Documents that are not empty, the ones larger than a share in blocks of it; a block takes the rest."""
    blocks = np.where(sizes > 0, np.maximum(1, sizes // share), 0)
    document = np.repeat(np.arange(len(sizes), dtype=np.int64), blocks)
    last = np.cumsum(blocks)
    number = np.arange(len(document), dtype=np.int64) - (last - blocks)[document]
    end = (number + 1) * share
    end[last[blocks > 0] - 1] = sizes[blocks > 0]
    return Pieces(document, number * share, end)


def held_out(pieces: Pieces, order: Words, share: int) -> npt.NDArray[np.bool_]:
    """Pieces in the order of their hash until a share of the bytes is reached; one is always left."""
    queue = np.argsort(order, kind="stable")[:-1]
    sizes = pieces.sizes[queue]
    chosen = np.zeros(len(pieces), dtype=bool)
    chosen[queue[np.cumsum(sizes) - sizes < share]] = True
    return chosen


def boundary(content: bytes, position: int) -> int:
    """Return the first place at or after `position`, at most `BORDER_BYTES` on, where a character may begin.

    The bytes of a character after its first one are 10xxxxxx in UTF-8.
    """
    for byte in content[position : position + BORDER_BYTES]:
        if byte & 0b1100_0000 != 0b1000_0000:
            break
        position += 1
    return position


def block(content: bytes, start: int, end: int, *, first: bool, last: bool) -> bytes:
    """Bytes `start` to `end` of what was read, edges inside the document moved to where characters begin.

    Args:
        content: reaches `BORDER_BYTES` further than `end` where the document does.
        first, last: the block begins or ends its document.
    """
    begin = start if first else boundary(content, start)
    return content[begin : end if last else boundary(content, end)]
