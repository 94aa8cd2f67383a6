"""Text as memory-mapped tokens: documents from a source, split once into training and held-out text.

The two sides are two files; training cannot reach the other. The cache key of tokens consists of the
documents' key and the tokenizer's. Tokens of Megatron-LM stay where they are. Their last documents are held
out, about a fiftieth. Several sources are a blend.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from weft.errors import InputError, Violation
from weft.program.arrays import Ints
from weft.training.data.cache import cached
from weft.training.data.indexed import IndexedTokens, indexed_name, open_indexed
from weft.training.data.pieces import Pieces, Texts, cut, held_out, share_bytes
from weft.training.data.sources import open_texts
from weft.training.data.tokenizers import Tokenizer, ids_type

FORMAT = 3
SIDES = ("training", "held-out")
# The text of one call of a tokenizer: enough to keep all cores busy.
BATCH_BYTES = 4 << 20
BATCH_PIECES = 4096
# Of an epoch of a blend: larger numbers are not exact in floats.
MOST_SAMPLES = 2**53


@dataclass(frozen=True)
class Windows:
    """Samples of one side of a corpus: window i is tokens `i * sequence` to `(i + 1) * sequence`, inclusive.

    Attributes:
        tokens: shape (tokens,), unsigned, memory-mapped.
        sequence: tokens that a model reads per sample; a window holds one more, the last target.
        vocabulary: one more than the highest id; tokens that others made are compared with it.
    """

    tokens: npt.NDArray[np.integer]
    sequence: int
    vocabulary: int | None = None

    def __len__(self) -> int:
        return max(0, len(self.tokens) - 1) // self.sequence

    def take(self, samples: Ints) -> Ints:
        """Return the tokens of the given samples, int64 of shape (samples, sequence + 1).

        Raises:
            ValueError: if a token is not of the vocabulary.
        """
        offsets = np.arange(self.sequence + 1)
        taken: Ints = self.tokens[samples[:, None] * self.sequence + offsets].astype(np.int64)
        if self.vocabulary is not None:
            outside = taken[(taken < 0) | (taken >= self.vocabulary)]
            if outside.size:
                raise ValueError(f"token {outside[0]} is not one of the tokenizer's {self.vocabulary}")
        return taken


@dataclass(frozen=True)
class Blend:
    """Samples of several sources by their shares.

    An epoch ends when every source was read whole at least once; the others begin again before. Each block
    of samples is of one source, from places far from each other.
    """

    parts: tuple[Windows | Blend, ...]
    shares: tuple[float, ...]
    block: int = 1

    def __len__(self) -> int:
        return int(self._ends[-1])

    @property
    def sequence(self) -> int:
        return self.parts[0].sequence

    @cached_property
    def _ends(self) -> Ints:
        longest = max(len(part) / share for part, share in zip(self.parts, self.shares, strict=True))
        blocks = np.ceil(np.rint(longest * np.array(self.shares)) / self.block).astype(np.int64)
        ends: Ints = np.cumsum(np.maximum(1, blocks)) * self.block
        return ends

    @property
    def numbers(self) -> list[range]:
        """The sample numbers of each part."""
        ends = self._ends.tolist()
        return [range(first, end) for first, end in pairwise([0, *ends])]

    def take(self, samples: Ints) -> Ints:
        """Return the tokens of the given samples, int64 of shape (samples, sequence + 1)."""
        owners = np.searchsorted(self._ends, samples, side="right")
        taken = np.empty((len(samples), self.sequence + 1), dtype=np.int64)
        for number, part in enumerate(self.parts):
            own = owners == number
            start = self._ends[number - 1] if number else 0
            blocks, inside = np.divmod(samples[own] - start, self.block)
            apart = (self._ends[number] - start) // self.block
            taken[own] = part.take((inside * apart + blocks) % len(part))
        return taken


class Source(NamedTuple):
    """A source of a blend.

    Attributes:
        share: its samples for each sample of the blend.
        training: its sample numbers.
        held_out: the numbers of its held-out samples, each of them once.
        held_out_bytes_per_token: as a corpus's.
    """

    name: str
    share: float
    training: range
    held_out: range
    held_out_bytes_per_token: float | None


@dataclass(frozen=True)
class Corpus:
    """Both sides of a source of text, or of several.

    Attributes:
        fingerprint: a hash of the tokens of both sides.
        held_out_bytes_per_token: of the held-out text; None where only tokens are known.
        repaired: the number of documents with bytes that are not UTF-8, read as U+FFFD, and the first one.
        sources: those of a blend.
    """

    training: Windows | Blend
    held_out: Windows | Blend
    fingerprint: str
    held_out_bytes_per_token: float | None
    repaired: tuple[int, str]
    sources: tuple[Source, ...] = ()


def open_blend(
    sources: Mapping[str, float], sequence: int, tokenizer: Tokenizer, cache: Path, block: int = 1
) -> Corpus:
    """Return the tokens of sources that count by their weights, whatever the sum of these.

    Args:
        block: training samples of one source that follow each other.

    Raises:
        InputError, RunError: as `open_corpus`; also if an epoch would have more than `MOST_SAMPLES`.
    """
    corpora = [open_corpus(source, sequence, tokenizer, cache) for source in sources]
    if len(corpora) == 1:
        return corpora[0]
    shares = tuple(weight / sum(sources.values()) for weight in sources.values())
    for source, corpus, share in zip(sources, corpora, shares, strict=True):
        if len(corpus.training) > MOST_SAMPLES * share:
            problem = (
                f"{source!r}: weight {sources[source]:g} is too small beside the others to be read whole"
            )
            raise InputError(Violation("task.data", problem))
    prints = json.dumps([[corpus.fingerprint for corpus in corpora], shares, *([block] if block > 1 else [])])
    rates = [corpus.held_out_bytes_per_token for corpus in corpora]
    known = [share * rate for share, rate in zip(shares, rates, strict=True) if rate is not None]
    training = Blend(tuple(corpus.training for corpus in corpora), shares, block)
    left = Blend(tuple(corpus.held_out for corpus in corpora), shares)
    once = [
        range(own.start, own.start + len(part)) for own, part in zip(left.numbers, left.parts, strict=True)
    ]
    return Corpus(
        training,
        left,
        hashlib.sha256(prints.encode()).hexdigest()[:16],
        sum(known) if len(known) == len(rates) else None,
        (
            sum(corpus.repaired[0] for corpus in corpora),
            next((corpus.repaired[1] for corpus in corpora if corpus.repaired[0]), ""),
        ),
        tuple(map(Source, sources, shares, training.numbers, once, rates)),
    )


def open_corpus(source: str, sequence: int, tokenizer: Tokenizer, cache: Path) -> Corpus:
    """Return the tokens of `source` (see `weft.training.data.sources`), from the cache or built into it.

    Raises:
        InputError: if the source is missing, empty, unreadable, or too short for one training sample and
            one held-out sample of `sequence` tokens.
        RunError: if a document changes during the read.
    """
    if (name := indexed_name(source)) is not None:
        return _indexed(source, open_indexed(name), sequence, tokenizer)
    texts = open_texts(source, cache)
    sizes = texts.sizes()
    # A split needs at least two windows; the check comes before the build.
    if sizes.sum() < 2 * (sequence + 1):
        raise _too_short(source, f"{sizes.sum()} bytes", sequence)
    share = share_bytes(sizes, sequence)
    record = [FORMAT, tokenizer.key, share, texts.key]
    entry = cache / "tokens" / hashlib.sha256(json.dumps(record).encode()).hexdigest()[:32]
    contents = cached(entry, partial(_build, texts=texts, sizes=sizes, share=share, tokenizer=tokenizer))
    dtype = ids_type(tokenizer)
    training, left = (
        Windows(np.memmap(entry / f"{side}.tokens", dtype=dtype, mode="r"), sequence) for side in SIDES
    )
    _require_samples(source, training, left)
    return Corpus(
        training,
        left,
        contents["fingerprint"],
        contents["bytes"]["held-out"] / len(left.tokens),
        (contents["repaired"], contents["first_repaired"]),
    )


def _indexed(source: str, found: IndexedTokens, sequence: int, tokenizer: Tokenizer) -> Corpus:
    least = len(found.tokens) - share_bytes(np.array([len(found.tokens)]), sequence)
    ends = found.ends[found.ends <= least]
    # Of a single document, or a long last one, the end is held out.
    edge = max(int(ends[-1]) if len(ends) else 0, least - (len(found.tokens) - least))
    training, left = (
        Windows(tokens, sequence, tokenizer.vocabulary) for tokens in np.split(found.tokens, [edge])
    )
    _require_samples(source, training, left)
    found.require_vocabulary(tokenizer.vocabulary, source)
    return Corpus(training, left, found.fingerprint, None, (0, ""))


def _require_samples(source: str, training: Windows, left: Windows) -> None:
    if not (len(training) and len(left)):
        given = f"{len(training.tokens)} training and {len(left.tokens)} held-out tokens"
        raise _too_short(source, given, training.sequence)


def _too_short(source: str, given: str, sequence: int) -> InputError:
    needed = f"training and held-out text need {sequence + 1} tokens each for one sample of {sequence}"
    return InputError(Violation("task.data", f"{source!r} has {given}; {needed}"))


def _build(building: Path, texts: Texts, sizes: Ints, share: int, tokenizer: Tokenizer) -> Mapping[str, Any]:
    dtype = ids_type(tokenizer)
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
