"""Text as memory-mapped tokens: documents from a source, split once into training and held-out text.

The two sides are two files; training cannot reach the other. The cache key of tokens consists of the
documents' key and the tokenizer's.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from weft.errors import InputError, Violation
from weft.program.arrays import Ints
from weft.training.data.cache import cached
from weft.training.data.pieces import Pieces, Texts, cut, held_out, share_bytes
from weft.training.data.sources import open_texts
from weft.training.data.tokenizers import Tokenizer

FORMAT = 3
SIDES = ("training", "held-out")
# The text of one call of a tokenizer: enough to keep all cores busy.
BATCH_BYTES = 4 << 20
BATCH_PIECES = 4096


@dataclass(frozen=True)
class Windows:
    """Samples of one side of a corpus: window i is tokens `i * sequence` to `(i + 1) * sequence`, inclusive.

    Attributes:
        tokens: shape (tokens,), unsigned, memory-mapped.
        sequence: tokens that a model reads per sample; a window holds one more, the last target.
    """

    tokens: npt.NDArray[np.unsignedinteger]
    sequence: int

    def __len__(self) -> int:
        return max(0, len(self.tokens) - 1) // self.sequence

    def take(self, samples: Ints) -> Ints:
        """Return the tokens of the given samples, int64 of shape (samples, sequence + 1)."""
        offsets = np.arange(self.sequence + 1)
        taken: Ints = self.tokens[samples[:, None] * self.sequence + offsets].astype(np.int64)
        return taken


@dataclass(frozen=True)
class Corpus:
    """Both sides of a source of text.

    Attributes:
        fingerprint: a hash of all tokens of both sides.
        held_out_bytes: bytes of the held-out text.
        repaired: the number of documents with bytes that are not UTF-8, read as U+FFFD, and the first one.
    """

    training: Windows
    held_out: Windows
    fingerprint: str
    held_out_bytes: int
    repaired: tuple[int, str]

    @property
    def held_out_bytes_per_token(self) -> float:
        return self.held_out_bytes / len(self.held_out.tokens)


def open_corpus(source: str, sequence: int, tokenizer: Tokenizer, cache: Path) -> Corpus:
    """Return the tokens of `source` (see `weft.training.data.sources`), from the cache or built into it.

    Raises:
        InputError: if the source is missing, empty, unreadable, or too short for one training sample and
            one held-out sample of `sequence` tokens.
        RunError: if a document changes during the read.
    """
    texts = open_texts(source, cache)
    sizes = texts.sizes()
    # A split needs at least two windows; the check comes before the build.
    if sizes.sum() < 2 * (sequence + 1):
        raise _too_short(source, f"{sizes.sum()} bytes", sequence)
    share = share_bytes(sizes, sequence)
    record = [FORMAT, tokenizer.key, share, texts.key]
    entry = cache / "tokens" / hashlib.sha256(json.dumps(record).encode()).hexdigest()[:32]
    contents = cached(entry, partial(_build, texts=texts, sizes=sizes, share=share, tokenizer=tokenizer))
    dtype = _dtype(tokenizer)
    training, left = (
        Windows(np.memmap(entry / f"{side}.tokens", dtype=dtype, mode="r"), sequence) for side in SIDES
    )
    if not (len(training) and len(left)):
        given = f"{len(training.tokens)} training and {len(left.tokens)} held-out tokens"
        raise _too_short(source, given, sequence)
    return Corpus(
        training,
        left,
        contents["fingerprint"],
        contents["bytes"]["held-out"],
        (contents["repaired"], contents["first_repaired"]),
    )


def _too_short(source: str, given: str, sequence: int) -> InputError:
    needed = f"training and held-out text need {sequence + 1} tokens each for one sample of {sequence}"
    return InputError(Violation("task.data", f"{source!r} has {given}; {needed}"))


def _dtype(tokenizer: Tokenizer) -> np.dtype[np.unsignedinteger]:
    return np.min_scalar_type(tokenizer.vocabulary - 1)


def _build(building: Path, texts: Texts, sizes: Ints, share: int, tokenizer: Tokenizer) -> Mapping[str, Any]:
    dtype = _dtype(tokenizer)
    pieces = cut(sizes, share)
    apart = held_out(pieces, texts.order(pieces), share)
    digest = hashlib.sha256()
    size = dict.fromkeys(SIDES, 0)
    repaired: dict[int, None] = {}
    with ExitStack() as stack:
        files = {side: stack.enter_context(open(building / f"{side}.tokens", "wb")) for side in SIDES}
        for numbers, contents in _batches(texts, pieces):
            encoded = tokenizer.encode(contents)
            for number, content, ids in zip(numbers, contents, encoded, strict=True):
                side = SIDES[int(apart[number])]
                tokens = ids.astype(dtype, copy=False).tobytes()
                files[side].write(tokens)
                digest.update(side.encode() + tokens)
                size[side] += len(content)
                if tokenizer.reads_utf8 and not _is_utf8(content):
                    repaired[int(pieces.document[number])] = None
    return {
        "fingerprint": digest.hexdigest()[:16],
        "bytes": size,
        "repaired": len(repaired),
        "first_repaired": texts.name(next(iter(repaired))) if repaired else "",
    }


def _batches(texts: Texts, pieces: Pieces) -> Iterator[tuple[list[int], list[bytes]]]:
    """Yield numbers and contents of pieces in their order, about `BATCH_BYTES` at a time."""
    numbers: list[int] = []
    contents: list[bytes] = []
    size = 0
    for number, content in enumerate(texts.read(pieces)):
        numbers.append(number)
        contents.append(content)
        size += len(content)
        if size >= BATCH_BYTES or len(numbers) >= BATCH_PIECES:
            yield numbers, contents
            numbers, contents, size = [], [], 0
    if numbers:
        yield numbers, contents


def _is_utf8(content: bytes) -> bool:
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return True
