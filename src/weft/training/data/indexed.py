"""Tokens that Megatron-LM's preprocessing wrote: `NAME.idx` and `NAME.bin`, used where they lie.

`NAME.idx` is little-endian (Megatron-LM, `megatron/core/datasets/indexed_dataset.py`):

    9 bytes                      MMIDIDX and two zero bytes
    64 and 8 bits                the version 1, and a code of the ids' type
    64 bits each                 the counts of sequences and of document edges
    32 bits for each sequence    its length
    64 bits for each sequence    its first byte in `NAME.bin`
    64 bits for each edge        the document edges, counted in sequences
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from weft.describe.one_line import one_line
from weft.errors import InputError, Violation
from weft.program.arrays import Ints

INDEX, TOKENS = ".idx", ".bin"
_MAGIC = b"MMIDIDX\0\0"
_HEADER = np.dtype([("version", "<u8"), ("code", "u1"), ("sequences", "<u8"), ("edges", "<u8")])
_TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
# Blocks of the tokens that the fingerprint reads, spread evenly; whole files may take hours.
_BLOCKS, _BLOCK_BYTES = 64, 1 << 16


@dataclass(frozen=True)
class IndexedTokens:
    """The ids of all documents in their order.

    Attributes:
        tokens: shape (tokens,), memory-mapped.
        ends: where each document ends in them, rising.
        fingerprint: a hash of the index and of blocks of the tokens.
    """

    tokens: npt.NDArray[np.integer]
    ends: Ints
    fingerprint: str

    def require_vocabulary(self, vocabulary: int, source: str) -> None:
        """Look for ids that a tokenizer lacks, in the blocks of the fingerprint.

        Raises:
            InputError: if there is one.
        """
        for block in _blocks(self.tokens):
            odd = block[(block < 0) | (block >= vocabulary)]
            if len(odd):
                problem = f"token {odd[0]} is not one of the tokenizer's {vocabulary}"
                raise InputError(Violation("task.tokenizer", f"{source}: {problem}"))

    def __repr__(self) -> str:
        return one_line(self, f"{len(self.tokens)} tokens of {len(self.ends)} documents")


def indexed_name(source: str) -> Path | None:
    """Return the common name of the two files that `source` names, also by one of them; None if none."""
    path = Path(source).expanduser()
    if not path.name:
        return None
    name = path.with_suffix("") if path.suffix in (INDEX, TOKENS) else path
    return name if _with(name, INDEX).is_file() else None


def open_indexed(name: Path) -> IndexedTokens:
    """Open the tokens of `NAME.idx` and `NAME.bin`.

    Raises:
        InputError: if a file is missing, damaged or cut, or is of another version.
    """
    try:
        return _opened(name)
    except _IndexError as error:
        raise InputError(Violation("task.data", f"{_with(name, INDEX)}: {error}")) from None
    except OSError as error:
        raise InputError(
            Violation("task.data", f"{error.filename}: cannot be read: {error.strerror}")
        ) from None


class _IndexError(Exception):
    """Why an index cannot be used."""


def _opened(name: Path) -> IndexedTokens:
    content, size = _with(name, INDEX).read_bytes(), _with(name, TOKENS).stat().st_size
    start = len(_MAGIC) + _HEADER.itemsize
    if not content.startswith(_MAGIC) or len(content) < start:
        raise _IndexError("it is no index of Megatron-LM")
    header = np.frombuffer(content, _HEADER, 1, len(_MAGIC))[0]
    sequences, edges = int(header["sequences"]), int(header["edges"])
    if int(header["version"]) != 1:
        raise _IndexError(f"version {header['version']}; weft reads version 1")
    if int(header["code"]) not in _TYPES:
        raise _IndexError(f"its tokens are of type {header['code']}, no integers")
    if len(content) < start + 12 * sequences + 8 * edges:
        raise _IndexError(f"it ends before its {sequences} sequences and {edges} document edges")
    dtype = np.dtype(_TYPES[int(header["code"])])
    lengths = np.frombuffer(content, "<i4", sequences, start).astype(np.int64)
    places = np.frombuffer(content, "<i8", sequences, start + 4 * sequences)
    documents = np.frombuffer(content, "<i8", edges, start + 12 * sequences)
    ends = np.cumsum(lengths)
    if (lengths < 0).any() or not np.array_equal(places, (ends - lengths) * dtype.itemsize):
        raise _IndexError("its sequences do not follow one another in the file of tokens")
    if (np.diff(documents) < 0).any() or (edges and not 0 <= documents[0] <= documents[-1] <= sequences):
        raise _IndexError("its document edges do not rise within its sequences")
    if not sequences or not ends[-1]:
        raise _IndexError("it has no tokens")
    if size != ends[-1] * dtype.itemsize:
        raise _IndexError(f"{_with(name, TOKENS).name} has {size} bytes, not {ends[-1] * dtype.itemsize}")
    tokens = np.memmap(_with(name, TOKENS), dtype=dtype, mode="r")
    document_ends = np.unique(np.concatenate([[0], ends])[documents])
    return IndexedTokens(tokens, document_ends[document_ends > 0], _fingerprint(content, tokens))


def _fingerprint(index: bytes, tokens: npt.NDArray[np.integer]) -> str:
    digest = hashlib.sha256(index)
    for block in _blocks(tokens):
        digest.update(block.tobytes())
    return digest.hexdigest()[:16]


def _blocks(tokens: npt.NDArray[np.integer]) -> Iterator[npt.NDArray[np.integer]]:
    block = max(1, _BLOCK_BYTES // tokens.itemsize)
    for start in np.linspace(0, max(0, len(tokens) - block), _BLOCKS, dtype=np.int64).tolist():
        yield tokens[start : start + block]


def _with(name: Path, ending: str) -> Path:
    return name.with_name(name.name + ending)
