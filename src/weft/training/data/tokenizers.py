"""Tokenizers: from the bytes of documents to token ids and back.

`bytes` needs no file; anything else names a `tokenizer.json` (`weft.training.data.tokenizer_json`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from weft.describe.run_file import RunFile
from weft.describe.run_tables.training import BYTES, MODEL
from weft.errors import InputError, Violation, nearest

Ids = npt.NDArray[np.unsignedinteger]


class Tokenizer(Protocol):
    """What the data pipeline needs of a tokenizer.

    Attributes:
        name: what people call it.
        key: changes whenever the same bytes would give other ids, so that cached tokens are never mixed up.
        vocabulary: one more than the highest id.
        mask: the id that stands for a masked token; `vocabulary` where it has none of its own.
        reads_utf8: bytes that are not UTF-8 become U+FFFD, so that `decode` does not give them back.
    """

    name: str
    key: str
    vocabulary: int
    mask: int
    reads_utf8: bool

    def encode(self, documents: Sequence[bytes]) -> list[Ids]:
        """Ids of each whole document, shape (tokens,), ending in the end-of-document id."""
        ...

    def decode(self, tokens: npt.NDArray[np.integer]) -> bytes:
        """Return the bytes that `tokens` stand for, end-of-document ids left out."""
        ...


class ByteTokenizer:
    """One token per byte. Byte 0, which text does not contain, ends a document."""

    name = BYTES
    key = "bytes 1"
    vocabulary = 256
    mask = 256
    reads_utf8 = False

    def encode(self, documents: Sequence[bytes]) -> list[Ids]:
        return [np.frombuffer(document + b"\0", dtype=np.uint8) for document in documents]

    def decode(self, tokens: npt.NDArray[np.integer]) -> bytes:
        return bytes(tokens[tokens != 0].tolist())


def fingerprint_of(tokenizer: Tokenizer) -> str:
    """Return a short hash that changes whenever the same bytes would give other ids."""
    return hashlib.sha256(tokenizer.key.encode()).hexdigest()[:16]


def tokenizer_name(run: RunFile) -> str:
    """`bytes`, or the file or folder of the tokenizer of a run."""
    if run.task.tokenizer != MODEL:
        return run.task.tokenizer
    folder = Path(run.model.hf or "").expanduser()
    return str(folder.parent if folder.is_file() else folder)


def get_tokenizer(name: str) -> Tokenizer:
    """`bytes`, or the tokenizer of a `tokenizer.json` or of a folder with one.

    Raises:
        InputError: when there is none, or its file cannot be used.
    """
    if name == BYTES:
        return ByteTokenizer()
    path = Path(name).expanduser()
    if not path.exists():
        problem = f"{name!r} does not exist; allowed: {BYTES}, a tokenizer.json or a folder with one"
        raise InputError(Violation("task.tokenizer", problem, nearest(name, [BYTES])))
    # Not at the top: a run of bytes does not need the library.
    from weft.training.data.tokenizer_json import JsonTokenizer

    return JsonTokenizer.read(path)
