"""Tokenizers: from the bytes of a document to token ids and back.

A tokenizer is chosen by name; adding one is one class and one entry in `TOKENIZERS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from weft.errors import require_choice


class Tokenizer(Protocol):
    """What the data pipeline needs of a tokenizer.

    `vocabulary` is one more than the highest id; `version` changes whenever the same bytes would give other
    ids, so that cached tokens are never mixed up.
    """

    name: ClassVar[str]
    version: ClassVar[int]
    vocabulary: ClassVar[int]

    def encode(self, document: bytes) -> npt.NDArray[np.unsignedinteger]:
        """Ids of a whole document, shape (tokens,), ending in the end-of-document id."""
        ...

    def decode(self, tokens: npt.NDArray[np.integer]) -> bytes:
        """The bytes that `tokens` stand for, end-of-document ids left out."""
        ...


class ByteTokenizer:
    """One token per byte. Byte 0, which text does not contain, ends a document."""

    name: ClassVar[str] = "bytes"
    version: ClassVar[int] = 1
    vocabulary: ClassVar[int] = 256

    def encode(self, document: bytes) -> npt.NDArray[np.unsignedinteger]:
        return np.frombuffer(document + b"\0", dtype=np.uint8)

    def decode(self, tokens: npt.NDArray[np.integer]) -> bytes:
        return bytes(tokens[tokens != 0].tolist())


TOKENIZERS: Mapping[str, type[Tokenizer]] = MappingProxyType({ByteTokenizer.name: ByteTokenizer})


def get_tokenizer(name: str) -> Tokenizer:
    """The tokenizer called `name`.

    Raises:
        InputError: when there is none of that name.
    """
    require_choice("tokenizer", name, TOKENIZERS)
    return TOKENIZERS[name]()
