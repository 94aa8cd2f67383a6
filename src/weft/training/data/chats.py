"""Conversations as memory-mapped tokens, with the targets among them, split once into training and held-out.

One sample is one conversation: its first `sequence + 1` tokens, filled up with the end token. The filling is
never a target, and causal attention keeps it from all that is. A packed sample has several conversations.
Each has the same tokens and targets as alone.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from weft.errors import InputError, Violation
from weft.program.arrays import Ints
from weft.program.codes import GOLDEN, mix
from weft.training.data.cache import cached
from weft.training.data.chat_template import CHATML, ChatTemplate, MarkedText, TemplateError
from weft.training.data.conversations import Conversations
from weft.training.data.packing import Packs, best_fit
from weft.training.data.pieces import HELD_OUT_SHARE, Pieces, held_out
from weft.training.data.sources import open_conversations
from weft.training.data.tokenizers import Ids, Tokenizer, ids_type

FORMAT = 3
ROWS_PER_BATCH = 1024
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class ChatRows:
    """Samples as a model reads them.

    Attributes:
        inputs, targets, asked: tokens, the tokens after them, and which of these are targets, each of shape
            (samples, sequence).
        documents: of packed samples, the lengths of their conversations, and of the filling.
    """

    inputs: Ints
    targets: Ints
    asked: Flags
    documents: Sequence[Sequence[int]] = ()

    @classmethod
    def joined(cls, rows: Sequence[ChatRows]) -> Self:
        return cls(
            np.concatenate([one.inputs for one in rows]),
            np.concatenate([one.targets for one in rows]),
            np.concatenate([one.asked for one in rows]),
            [documents for one in rows for documents in one.documents],
        )


@dataclass(frozen=True)
class Chats:
    """The conversations of one side, one sample each.

    Attributes:
        tokens, targets: of all conversations of both sides, shape (tokens,), memory-mapped.
        starts: where each conversation begins in them, and the end of the last one.
        own: the conversations of this side.
        counts: the targets of each of them, shape (samples,).
        sequence: tokens that a model reads per sample.
        filler: the id that fills a sample up.
    """

    tokens: npt.NDArray[np.unsignedinteger]
    targets: Flags
    starts: Ints
    own: Ints
    counts: Ints
    sequence: int
    filler: int

    def __len__(self) -> int:
        return len(self.own)

    def rows(self, samples: Ints) -> ChatRows:
        tokens, asked = self.take(samples)
        return ChatRows(tokens[:, :-1], tokens[:, 1:], asked[:, 1:])

    def take(self, samples: Ints) -> tuple[Ints, Flags]:
        """Return the tokens of samples and which of them are targets, shape (samples, sequence + 1)."""
        rows = self.own[samples]
        places = self.starts[rows][:, None] + np.arange(self.sequence + 1)
        inside = places < self.starts[rows + 1][:, None]
        places = np.minimum(places, len(self.tokens) - 1)
        tokens = np.where(inside, self.tokens[places].astype(np.int64), self.filler)
        return tokens, inside & self.targets[places]

    def side(self, own: Ints) -> Chats:
        """Return the samples of some of the conversations."""
        return replace(self, own=own, counts=self.counts[own])

    @cached_property
    def read(self) -> Ints:
        """The tokens of each conversation that a model reads, shape (samples,)."""
        lengths: Ints = np.minimum(self.starts[self.own + 1] - self.starts[self.own] - 1, self.sequence)
        return lengths

    @property
    def filled(self) -> float:
        """The share of the samples' tokens that are of conversations."""
        return float(self.read.mean()) / self.sequence


@dataclass(frozen=True)
class PackedChats:
    """The conversations of one side, several in each sample.

    Attributes:
        counts: the targets of each sample, shape (samples,).
    """

    chats: Chats
    packs: Packs
    counts: Ints

    @classmethod
    def of(cls, chats: Chats) -> Self:
        packs = best_fit(chats.read, chats.sequence)
        return cls(chats, packs, packs.sums(chats.counts))

    def __len__(self) -> int:
        return len(self.packs)

    def rows(self, samples: Ints) -> ChatRows:
        return ChatRows.joined([self._row(self.packs.of(int(sample))) for sample in samples])

    def _row(self, conversations: Ints) -> ChatRows:
        """Return one sample; its filling is a document of its own."""
        chats, each = self.chats, self.chats.rows(conversations)
        lengths = chats.read[conversations]
        inside = np.arange(chats.sequence) < lengths[:, None]
        left = chats.sequence - int(lengths.sum())
        inputs, targets = (
            np.concatenate([one[inside], np.full(left, chats.filler)])[None]
            for one in (each.inputs, each.targets)
        )
        asked = np.concatenate([each.asked[inside], np.zeros(left, dtype=np.bool_)])[None]
        documents = [*lengths.tolist(), left] if left else lengths.tolist()
        return ChatRows(inputs, targets, asked, [documents])

    @property
    def filled(self) -> float:
        """The share of the samples' tokens that are of conversations."""
        return float(self.chats.read.sum()) / (len(self) * self.chats.sequence)


@dataclass(frozen=True)
class ChatCorpus:
    """Both sides of a table of conversations.

    Attributes:
        fingerprint: a hash of all tokens and targets.
        warnings: what the samples leave out.
    """

    training: Chats | PackedChats
    held_out: Chats | PackedChats
    fingerprint: str
    warnings: tuple[str, ...]


def open_chats(
    source: str, sequence: int, tokenizer: Tokenizer, cache: Path, *, packing: bool = False
) -> ChatCorpus:
    """Return the conversations of `source`, from the cache or built into it; with `packing`, packed.

    Raises:
        InputError: if the source is missing or unreadable, a row is no conversation, the template fails, or
            fewer than two conversations have a target.
    """
    table, template = open_conversations(source), _template(tokenizer)
    record = [FORMAT, tokenizer.key, template.source, dict(template.variables), table.column, table.key]
    entry = cache / "chats" / hashlib.sha256(json.dumps(record).encode()).hexdigest()[:32]
    contents = cached(entry, partial(_build, table=table, template=template, tokenizer=tokenizer))
    starts: Ints = np.load(entry / "starts.npy", allow_pickle=False)
    if not starts[-1]:
        raise InputError(Violation("task.data", f"{source!r}: its conversations have no text"))
    tokens = np.memmap(entry / "tokens", dtype=ids_type(tokenizer), mode="r")
    targets = np.memmap(entry / "targets", dtype=np.bool_, mode="r")
    counts = target_counts(targets, starts, sequence)
    every = Chats(tokens, targets, starts, np.arange(len(counts)), counts, sequence, tokenizer.end)
    useful = every.own[every.counts > 0]
    if len(useful) < 2:
        problem = f"{len(useful)} conversations have an answer within {sequence} tokens; 2 are needed"
        raise InputError(Violation("task.data", f"{source!r}: {problem}"))
    # A fiftieth of the rows, at least one, by the hash of their numbers: pieces of one size.
    rows = Pieces(useful, np.zeros_like(useful), np.ones_like(useful))
    order = mix(useful.astype(np.uint64) + GOLDEN)
    apart = held_out(rows, order, max(1, len(useful) // HELD_OUT_SHARE))
    sides = every.side(useful[~apart]), every.side(useful[apart])
    fingerprint, warnings = contents["fingerprint"], _warnings(every, tokenizer, contents["has_messages"])
    if packing:
        # The sample of a number depends on the packing.
        packed = [PackedChats.of(side) for side in sides]
        return ChatCorpus(packed[0], packed[1], f"{fingerprint} packed in {sequence}", warnings)
    return ChatCorpus(sides[0], sides[1], fingerprint, warnings)


def require_chats(source: str, tokenizer: Tokenizer) -> None:
    """Read and render the first conversation of `source`.

    Raises:
        InputError: if there is none, or the template fails.
    """
    next(_rendered(open_conversations(source), _template(tokenizer)))


def _template(tokenizer: Tokenizer) -> ChatTemplate:
    return tokenizer.chat_template or ChatTemplate(CHATML, {})


def target_counts(targets: Flags, starts: Ints, sequence: int) -> Ints:
    """Return the targets within the samples of all conversations; the first token of a sample is none."""
    before = np.concatenate([[0], np.cumsum(targets, dtype=np.int64)])
    first = starts[:-1] + 1
    last = np.minimum(starts[1:], first + sequence)
    counts: Ints = before[np.maximum(last, first)] - before[first]
    return counts


def _warnings(every: Chats, tokenizer: Tokenizer, has_messages: bool) -> tuple[str, ...]:
    cut, mute = int((np.diff(every.starts) > every.sequence + 1).sum()), int((every.counts == 0).sum())
    of, within = f"of {len(every)} conversations", f"within {every.sequence} tokens"
    no_template = has_messages and tokenizer.chat_template is None
    found = {
        f"{cut} {of} do not end {within} and are cut": cut,
        f"{mute} {of} have no answer {within} and are left out": mute,
        f"{tokenizer.name} has no chat template; ChatML takes its place": no_template,
    }
    return tuple(words for words, holds in found.items() if holds)


def _build(
    building: Path, table: Conversations, template: ChatTemplate, tokenizer: Tokenizer
) -> Mapping[str, Any]:
    digest, lengths, has_messages = hashlib.sha256(), [0], False
    dtype = ids_type(tokenizer)
    # A template of the tokenizer's own says itself what ends a conversation.
    ends = template.source == CHATML
    with open(building / "tokens", "wb") as tokens, open(building / "targets", "wb") as targets:
        rendered = _rendered(table, template)
        while rows := list(islice(rendered, ROWS_PER_BATCH)):
            has_messages = has_messages or any(templated for _, templated in rows)
            marked = [(text, ends or not templated) for text, templated in rows]
            for ids, flags in marked_tokens(marked, tokenizer):
                parts = ids.astype(dtype).tobytes(), flags.tobytes()
                for file, part in zip((tokens, targets), parts, strict=True):
                    file.write(part)
                    digest.update(part)
                lengths.append(len(ids))
    np.save(building / "starts.npy", np.cumsum(lengths, dtype=np.int64), allow_pickle=False)
    return {"fingerprint": digest.hexdigest()[:16], "has_messages": has_messages}


def _rendered(table: Conversations, template: ChatTemplate) -> Iterator[tuple[MarkedText, bool]]:
    """Yield the text of every row, and whether it is one of messages, which the template rendered."""
    for number, conversation in enumerate(table, 1):
        try:
            yield template.render(conversation), bool(conversation.messages)
        except TemplateError as error:
            raise InputError(Violation("task.data", f"row {number}: {error}")) from None


def marked_tokens(
    marked: Sequence[tuple[MarkedText, bool]], tokenizer: Tokenizer
) -> Iterator[tuple[Ids, Flags]]:
    """Yield the ids of every text, and which of them are targets: those that begin in its spans."""
    encoded = tokenizer.encode_chats([text.text for text, _ in marked])
    for (text, ends), (ids, places) in zip(marked, encoded, strict=True):
        edges = np.array(text.spans, dtype=np.int64).reshape(-1)
        # Spans rise and do not overlap: a place is inside after an odd number of edges.
        flags = np.searchsorted(edges, places, side="right") % 2 == 1
        if ends:
            last = bool(text.spans) and text.spans[-1][1] == len(text.text)
            ids, flags = np.append(ids, np.array(tokenizer.end, ids.dtype)), np.append(flags, last)
        yield ids, flags
