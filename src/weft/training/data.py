"""Text as memory-mapped tokens: documents from a source, split once into training and held-out text.

The split is by hash, so it depends on nothing but the documents' names: documents (the ones larger than a
fiftieth of the corpus cut into blocks of that size) are held out in the order of the hash of their name
until a fiftieth of the bytes is held out. The two sides are two files; training cannot reach the other.

Tokens are cached under a key made of every document's name, size and modification time.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from weft.errors import InputError, RunError, Violation
from weft.training.cache import cached
from weft.training.sources import Document, list_documents
from weft.training.tokenizers import Tokenizer

FORMAT = 2
SIDES = ("training", "held-out")
HELD_OUT_SHARE = 50  # one part in fifty

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Windows:
    """Samples of one side of a corpus: window i is tokens `i * sequence` to `(i + 1) * sequence`, inclusive.

    Attributes:
        tokens: shape (tokens,), unsigned, memory-mapped.
        sequence: tokens a model reads per sample; a window holds one more, the last target.
    """

    tokens: npt.NDArray[np.unsignedinteger]
    sequence: int

    def __len__(self) -> int:
        return max(0, len(self.tokens) - 1) // self.sequence

    def take(self, samples: Ints) -> Ints:
        """Tokens of the given samples, shape (samples, sequence + 1)."""
        offsets = np.arange(self.sequence + 1)
        taken: Ints = self.tokens[samples[:, None] * self.sequence + offsets].astype(np.int64)
        return taken


@dataclass(frozen=True)
class Corpus:
    """Both sides of a source of text; `fingerprint` is a hash of all tokens of both."""

    training: Windows
    held_out: Windows
    fingerprint: str


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes `start` to `end` of a document: all of it, or a block of a large one."""

    document: Document
    start: int
    end: int

    @property
    def order(self) -> bytes:
        """Where the piece stands in the queue for being held out."""
        return hashlib.sha256(f"{self.document.name}\0{self.start}".encode()).digest()


def open_corpus(source: str, sequence: int, tokenizer: Tokenizer, cache: Path) -> Corpus:
    """Tokens of `source` (see `weft.training.sources`), from the cache or built into it.

    Raises:
        InputError: when the source is missing, empty, unreadable, or too short for one training sample and
            one held-out sample of `sequence` tokens.
        RunError: when a document changes while it is read.
    """
    documents = list_documents(source)
    total_bytes = sum(document.size for document in documents)
    # Two windows are the least that can be split; say so before anything is built.
    if total_bytes < 2 * (sequence + 1):
        raise _too_short(source, f"{total_bytes} bytes", sequence)
    share_bytes = max(total_bytes // HELD_OUT_SHARE, sequence + 1)
    entry = cache / "tokens" / _key(documents, share_bytes, tokenizer)
    build = partial(
        _build, pieces=_pieces(documents, share_bytes), share_bytes=share_bytes, tokenizer=tokenizer
    )
    contents = cached(entry, build)
    dtype = _dtype(tokenizer)
    training, held_out = (
        Windows(np.memmap(entry / f"{side}.tokens", dtype=dtype, mode="r"), sequence) for side in SIDES
    )
    if not (len(training) and len(held_out)):
        given = f"{len(training.tokens)} training and {len(held_out.tokens)} held-out tokens"
        raise _too_short(source, given, sequence)
    return Corpus(training, held_out, contents["fingerprint"])


def _too_short(source: str, given: str, sequence: int) -> InputError:
    needed = f"training and held-out text need {sequence + 1} tokens each for one sample of {sequence}"
    return InputError(Violation("task.data", f"{source!r} has {given}; {needed}"))


def _key(documents: Sequence[Document], share_bytes: int, tokenizer: Tokenizer) -> str:
    listing = [[str(document.path), document.size, document.modified_ns] for document in documents]
    record = [FORMAT, tokenizer.name, tokenizer.version, share_bytes, listing]
    return hashlib.sha256(json.dumps(record).encode()).hexdigest()[:32]


def _dtype(tokenizer: Tokenizer) -> np.dtype[np.unsignedinteger]:
    return np.min_scalar_type(tokenizer.vocabulary - 1)


def _pieces(documents: Sequence[Document], share_bytes: int) -> list[Piece]:
    """Documents, the ones larger than a share cut into blocks of a share; a block takes the remainder."""
    pieces = []
    for document in documents:
        blocks = max(1, document.size // share_bytes)
        edges = [block * share_bytes for block in range(blocks)] + [document.size]
        pieces += [Piece(document, start, end) for start, end in pairwise(edges)]
    return pieces


def _held_out(pieces: Sequence[Piece], share_bytes: int) -> set[Piece]:
    """Pieces in the order of their hash until a share of the bytes is reached; one is always left."""
    chosen: set[Piece] = set()
    missing = share_bytes
    for piece in sorted(pieces, key=lambda piece: piece.order)[:-1]:
        if missing <= 0:
            break
        chosen.add(piece)
        missing -= piece.end - piece.start
    return chosen


def _build(
    building: Path, pieces: Sequence[Piece], share_bytes: int, tokenizer: Tokenizer
) -> Mapping[str, Any]:
    dtype = _dtype(tokenizer)
    held_out = _held_out(pieces, share_bytes)
    digest = hashlib.sha256()
    with ExitStack() as stack:
        files = {side: stack.enter_context(open(building / f"{side}.tokens", "wb")) for side in SIDES}
        for piece, content in _texts(pieces):
            side = "held-out" if piece in held_out else "training"
            tokens = tokenizer.encode(content).astype(dtype, copy=False).tobytes()
            files[side].write(tokens)
            digest.update(side.encode() + tokens)
    return {"fingerprint": digest.hexdigest()[:16]}


def _texts(pieces: Sequence[Piece]) -> Iterator[tuple[Piece, bytes]]:
    for piece in pieces:
        path = piece.document.path
        try:
            with open(path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                file.seek(piece.start)
                content = file.read(piece.end - piece.start)
        except OSError as error:
            raise InputError(Violation("task.data", f"{path}: cannot be read: {error.strerror}")) from None
        if size != piece.document.size or len(content) != piece.end - piece.start:
            raise RunError(f"{path}: the file changed while it was read; start again when it is complete")
        yield piece, content
