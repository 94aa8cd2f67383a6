"""Documents cut into pieces, and the held-out pieces.

Documents larger than a fiftieth of the corpus are cut into blocks of that size. Pieces are held out in the
order of their hash until a fiftieth of the bytes is held out. The hash depends only on the documents' names.
The split does not depend on the tokenizer, so losses of two tokenizers are about the same text.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from weft.program.arrays import Ints
from weft.training.data.sampler import Words

HELD_OUT_SHARE = 50  # one part in fifty
# The bytes of a character in UTF-8 that are not its first one, at most.
BORDER_BYTES = 3


@dataclass(frozen=True)
class Pieces:
    """Whole documents or blocks of large ones, as bytes `start` to `end`; columns of equal length.

    A read moves both edges of a block to the `boundary` at or after them.
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
    """Documents in a fixed order, with bytes that can be read any number of times.

    Attributes:
        key: a JSON value that changes when a document does.
    """

    @property
    def key(self) -> object: ...

    def sizes(self) -> Ints:
        """Return the bytes of every document, shape (documents,)."""
        ...

    def order(self, pieces: Pieces) -> Words:
        """Return each piece's hash; the pieces with the smallest hashes are held out."""
        ...

    def name(self, document: int) -> str:
        """Return the user's name for a document."""
        ...

    def read(self, pieces: Pieces) -> Iterator[bytes]:
        """Yield the bytes of every piece; the pieces rise by (document, start).

        Raises:
            InputError: if a document cannot be read.
            RunError: if its size has changed.
        """
        ...


def share_bytes(sizes: Ints, sequence: int) -> int:
    """Return the held-out share in bytes: a fiftieth of the text, at least one sample of bytes."""
    return max(int(sizes.sum()) // HELD_OUT_SHARE, sequence + 1)


def cut(sizes: Ints, share: int) -> Pieces:
    """Cut the non-empty documents into pieces: whole, or blocks of `share` bytes, the last with the rest."""
    blocks = np.where(sizes > 0, np.maximum(1, sizes // share), 0)
    document = np.repeat(np.arange(len(sizes), dtype=np.int64), blocks)
    last = np.cumsum(blocks)
    number = np.arange(len(document), dtype=np.int64) - (last - blocks)[document]
    end = (number + 1) * share
    end[last[blocks > 0] - 1] = sizes[blocks > 0]
    return Pieces(document, number * share, end)


def held_out(pieces: Pieces, order: Words, share: int) -> npt.NDArray[np.bool_]:
    """Return the mask of held-out pieces, by rising hash up to a share of the bytes; one is always left."""
    queue = np.argsort(order, kind="stable")[:-1]
    sizes = pieces.sizes[queue]
    chosen = np.zeros(len(pieces), dtype=bool)
    chosen[queue[np.cumsum(sizes) - sizes < share]] = True
    return chosen


def boundary(content: bytes, position: int) -> int:
    """Return the first possible beginning of a character at or up to `BORDER_BYTES` after `position`.

    The bytes of a character after its first one are 10xxxxxx in UTF-8.
    """
    for byte in content[position : position + BORDER_BYTES]:
        if byte & 0b1100_0000 != 0b1000_0000:
            break
        position += 1
    return position


def block(content: bytes, start: int, end: int, *, first: bool, last: bool) -> bytes:
    """Return bytes `start` to `end` of `content`, with edges inside the document moved to characters.

    Args:
        content: bytes up to `BORDER_BYTES` after `end`, or up to the document's end.
        first, last: True if the block begins or ends its document.
    """
    begin = start if first else boundary(content, start)
    return content[begin : end if last else boundary(content, end)]
