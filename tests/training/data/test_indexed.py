"""Tokens in the files of Megatron-LM: read where they lie, damaged ones refused."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.errors import InputError
from weft.training.data.indexed import indexed_name, open_indexed
from weft.training.data.text import open_corpus
from weft.training.data.tokenizers import get_tokenizer

CODES = {"u1": 1, "i1": 2, "<i2": 3, "<i4": 4, "<i8": 5, "<u2": 8}


def written(
    folder: Path, documents: Sequence[Sequence[Sequence[int]]], dtype: str = "<u2", name: str = "c"
) -> Path:
    """Write documents of sequences of ids as Megatron-LM's builder does."""
    sequences = [np.array(one, dtype=dtype) for document in documents for one in document]
    lengths = np.array([len(one) for one in sequences], "<i4")
    places = np.concatenate([[0], np.cumsum(lengths.astype("<i8") * np.dtype(dtype).itemsize)])[:-1].astype(
        "<i8"
    )
    edges = np.cumsum([0, *(len(document) for document in documents)]).astype("<i8")
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, CODES[dtype], len(sequences), len(edges))
    (folder / f"{name}.idx").write_bytes(head + lengths.tobytes() + places.tobytes() + edges.tobytes())
    (folder / f"{name}.bin").write_bytes(b"".join(one.tobytes() for one in sequences))
    return folder / name


IDS = st.lists(st.lists(st.integers(0, 100), min_size=1, max_size=9), min_size=1, max_size=3)


@given(documents=st.lists(IDS, min_size=1, max_size=6), dtype=st.sampled_from(list(CODES)))
def test_documents_are_read_with_their_ends(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[list[int]]], dtype: str
) -> None:
    name = written(tmp_path_factory.mktemp("indexed"), documents, dtype)
    for source in (str(name), f"{name}.idx", f"{name}.bin"):
        assert indexed_name(source) == name
    found = open_indexed(name)
    flat = [[id_ for sequence in document for id_ in sequence] for document in documents]
    assert found.tokens.tolist() == [id_ for document in flat for id_ in document]
    assert found.ends.tolist() == np.cumsum([len(document) for document in flat]).tolist()
    assert isinstance(found.tokens, np.memmap)


def test_the_end_of_the_documents_is_held_out_and_nothing_is_copied(tmp_path: Path) -> None:
    name = written(tmp_path, [[[number] * 10] for number in range(200)])
    corpus = open_corpus(str(name), 4, get_tokenizer("bytes"), tmp_path / "cache")
    assert set(corpus.held_out.take(np.arange(len(corpus.held_out))).flatten().tolist()) == {
        196,
        197,
        198,
        199,
    }
    assert corpus.training.take(np.arange(len(corpus.training))).max() == 195
    assert corpus.held_out_bytes_per_token is None
    assert not (tmp_path / "cache").exists()


def test_of_one_document_the_end_is_held_out(tmp_path: Path) -> None:
    name = written(tmp_path, [[list(range(200))]])
    corpus = open_corpus(str(name), 4, get_tokenizer("bytes"), tmp_path)
    assert len(corpus.training) > 40
    assert (
        corpus.held_out.take(np.array([0])).min()
        > corpus.training.take(np.arange(len(corpus.training))).max()
    )


def test_other_tokens_have_another_fingerprint(tmp_path: Path) -> None:
    prints = {
        open_indexed(written(tmp_path, [[[number, 2, 3]]], name=f"c{number}")).fingerprint
        for number in (1, 2, 1)
    }
    assert len(prints) == 2


def test_tokens_of_another_tokenizer_are_refused(tmp_path: Path) -> None:
    name = written(tmp_path, [[[700] * 50]] * 4)
    with pytest.raises(InputError, match=r"task.tokenizer: .*: token 700 is not one of the tokenizer's 256"):
        open_corpus(str(name), 4, get_tokenizer("bytes"), tmp_path)


def test_a_token_of_another_tokenizer_is_found_anywhere_in_a_small_file(tmp_path: Path) -> None:
    documents = [[[number % 200 for number in range(50)]] for _ in range(4)]
    open_indexed(written(tmp_path, documents, name="whole")).require_vocabulary(200, "c")
    documents[3][0][49] = 256
    found = open_indexed(written(tmp_path, documents, name="odd"))
    found.require_vocabulary(257, "c")
    with pytest.raises(InputError, match=r"task.tokenizer: c: token 256 is not one of the tokenizer's 256"):
        found.require_vocabulary(256, "c")


@pytest.mark.parametrize(
    ("start", "content", "line"),
    [
        (0, b"X", "c.idx: it is no index of Megatron-LM"),
        (9, b"\x02", "c.idx: version 2; weft reads version 1"),
        (17, b"\x07", "c.idx: its tokens are of type 7, no integers"),
        (18, b"\xff\xff", "c.idx: it ends before its 65535 sequences"),
        (34, b"\x09", "c.idx: its sequences do not follow one another"),
        (34 + 2 * 12 + 8, b"\x09", "c.idx: its document edges do not rise within"),
    ],
)
def test_a_damaged_index_is_refused_with_one_line(
    tmp_path: Path, start: int, content: bytes, line: str
) -> None:
    name = written(tmp_path, [[[1, 2, 3]], [[4, 5]]])
    index = tmp_path / "c.idx"
    whole = bytearray(index.read_bytes())
    whole[start : start + len(content)] = content
    index.write_bytes(whole)
    with pytest.raises(InputError, match=line) as refused:
        open_indexed(name)
    assert len(refused.value.violations) == 1


@pytest.mark.parametrize("size", [0, 1, 20, 40])
def test_a_cut_file_is_refused(tmp_path: Path, size: int) -> None:
    name = written(tmp_path, [[[1, 2, 3]], [[4, 5]]])
    index = (tmp_path / "c.idx").read_bytes()
    (tmp_path / "c.idx").write_bytes(index[:size])
    with pytest.raises(InputError, match=r"c\.idx: it"):
        open_indexed(name)
    (tmp_path / "c.idx").write_bytes(index)
    (tmp_path / "c.bin").write_bytes(b"\1\0")
    with pytest.raises(InputError, match=r"c\.bin has 2 bytes, not 10"):
        open_indexed(name)
    (tmp_path / "c.bin").unlink()
    with pytest.raises(InputError, match=r"c\.bin: cannot be read: No such file"):
        open_indexed(name)
