"""Sources and token files: what is read, how it is split, what is refused."""

import os
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.errors import InputError, RunError
from weft.training.data.pieces import cut
from weft.training.data.sources import FileTexts, list_documents
from weft.training.data.text import Corpus, Windows, open_corpus
from weft.training.data.tokenizers import ByteTokenizer

TOKENIZER = ByteTokenizer()


def corpus_of(source: Path | str, tmp_path: Path, sequence: int = 8) -> Corpus:
    return open_corpus(str(source), sequence, TOKENIZER, tmp_path / "cache")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "text"
    (root / "deep").mkdir(parents=True)
    for number in range(60):
        (root / "deep" / f"{number:02}.txt").write_text(f"document {number} " * 20)
    return root


@given(st.binary())
def test_bytes_come_back_from_their_tokens(content: bytes) -> None:
    content = content.replace(b"\0", b"")
    (tokens,) = TOKENIZER.encode([content])
    assert TOKENIZER.decode(tokens) == content
    assert len(tokens) == len(content) + 1
    assert tokens.max() < TOKENIZER.vocabulary


@given(st.integers(1, 9), st.lists(st.integers(0, 255), max_size=60))
def test_windows_cover_the_tokens_and_overlap_by_the_last_target(sequence: int, values: list[int]) -> None:
    windows = Windows(np.array(values, dtype=np.uint8), sequence)
    taken = windows.take(np.arange(len(windows)))
    assert taken.shape == (len(windows), sequence + 1)
    assert taken[:, :-1].ravel().tolist() == values[: len(windows) * sequence]
    assert taken[:, 1:].ravel().tolist() == values[1 : len(windows) * sequence + 1]
    assert len(values) - 1 - len(windows) * sequence < sequence


@pytest.mark.parametrize(("odd", "tokens"), [(-3, [1, 2, -3, 9]), (10, [1, 2, 10, 9]), (-3, [1, -3, 10, 9])])
def test_windows_name_a_token_outside_the_vocabulary(odd: int, tokens: list[int]) -> None:
    windows = Windows(np.array(tokens), 3, vocabulary=10)
    with pytest.raises(ValueError, match=f"^token {odd} is not one of the tokenizer's 10"):
        windows.take(np.array([0]))


def test_both_sides_together_are_the_documents(folder: Path, tmp_path: Path) -> None:
    corpus = corpus_of(folder, tmp_path)
    sides = [TOKENIZER.decode(side.tokens) for side in (corpus.training, corpus.held_out)]
    training, held_out = (
        {f"document {n} " for n in range(60) if f"document {n} ".encode() in s} for s in sides
    )
    assert len(training) + len(held_out) == 60
    assert not training & held_out
    assert held_out


def test_a_single_file_is_split_by_blocks(tmp_path: Path) -> None:
    text = tmp_path / "one.txt"
    text.write_bytes(os.urandom(10_000).replace(b"\0", b"x"))
    corpus = corpus_of(text, tmp_path)
    assert len(corpus.held_out.tokens) == pytest.approx(200, abs=30)
    assert len(corpus.training.tokens) + len(corpus.held_out.tokens) == 10_000 + 50


def test_the_split_does_not_depend_on_where_or_when(folder: Path, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere"
    before = corpus_of(folder, tmp_path).held_out.tokens.tobytes()
    folder.rename(moved)
    assert corpus_of(moved, tmp_path).held_out.tokens.tobytes() == before


def test_a_folder_a_glob_and_a_file_name_documents_alike(folder: Path) -> None:
    (folder / ".hidden").write_text("not read")
    (folder / ".git").mkdir()
    (folder / ".git" / "note.txt").write_text("not read")
    (folder / "empty.txt").write_text("")
    names = [document.name for document in list_documents(str(folder))]
    assert names == sorted(f"deep/{number:02}.txt" for number in range(60))
    assert [document.name for document in list_documents(f"{folder}/**/*.txt")] == names
    assert [document.name for document in list_documents(f"{folder}/deep/07.txt")] == ["07.txt"]


def test_the_standard_library_comes_without_installed_packages() -> None:
    documents = list_documents("python-stdlib")
    assert all(document.name.endswith(".py") for document in documents)
    assert not any("site-packages" in document.path.parts for document in documents)
    assert "json/__init__.py" in {document.name for document in documents}
    assert [document.name for document in documents] == sorted(document.name for document in documents)


@pytest.mark.parametrize("source", ["", "absent.txt", "absent/*.txt", "python-stdlb"])
def test_a_missing_source_is_refused_in_one_line(source: str, tmp_path: Path) -> None:
    with pytest.raises(InputError) as refused:
        corpus_of(tmp_path / source if "absent" in source else source, tmp_path)
    assert len(refused.value.violations) == 1
    assert "\n" not in str(refused.value)


def test_the_nearest_source_is_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nearest valid: python-stdlib"):
        corpus_of("python-stdlb", tmp_path)
    (folder / "notes.md").write_text("...")
    with pytest.raises(InputError, match=r"nearest valid: .*notes\.md"):
        corpus_of(folder / "note.md", tmp_path)


def test_an_empty_folder_and_empty_files_are_refused(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "nothing.txt").touch()
    with pytest.raises(InputError, match="holds no text"):
        corpus_of(empty, tmp_path)


@pytest.mark.parametrize("size", [1, 17])
def test_text_shorter_than_two_samples_is_refused(size: int, tmp_path: Path) -> None:
    text = tmp_path / "short.txt"
    text.write_text("x" * size)
    with pytest.raises(InputError, match="need 9 tokens each for one sample of 8"):
        corpus_of(text, tmp_path)
    assert not (tmp_path / "cache").exists()


def test_the_shortest_text_gives_one_sample_on_each_side(tmp_path: Path) -> None:
    text = tmp_path / "short.txt"
    text.write_text("x" * 18)
    corpus = corpus_of(text, tmp_path)
    assert (len(corpus.training), len(corpus.held_out)) == (1, 1)


def test_a_changed_document_is_tokenised_again(folder: Path, tmp_path: Path) -> None:
    first = corpus_of(folder, tmp_path)
    again = corpus_of(folder, tmp_path)
    (folder / "deep" / "00.txt").write_text("something else entirely")
    changed = corpus_of(folder, tmp_path)
    assert first.fingerprint == again.fingerprint != changed.fingerprint


def test_a_document_that_grows_while_it_is_read_is_no_corpus(folder: Path, tmp_path: Path) -> None:
    texts = FileTexts(list_documents(str(folder)))
    pieces = cut(texts.sizes(), 10**6)
    (folder / "deep" / "30.txt").write_text("more " * 1000)
    with pytest.raises(RunError, match=r"30\.txt: the file changed while it was read"):
        list(texts.read(pieces))


def test_a_damaged_cache_entry_is_built_again(folder: Path, tmp_path: Path) -> None:
    corpus = corpus_of(folder, tmp_path)
    expected = corpus.training.tokens.tobytes()
    (entry,) = (tmp_path / "cache" / "tokens").iterdir()
    (entry / "training.tokens").write_bytes(b"torn")
    assert corpus_of(folder, tmp_path).training.tokens.tobytes() == expected
    assert list(entry.parent.iterdir()) == [entry]


def test_many_builders_at_once_leave_one_whole_entry(folder: Path, tmp_path: Path) -> None:
    corpora: list[Corpus] = []
    start = threading.Barrier(6)

    def build() -> None:
        start.wait()
        corpora.append(corpus_of(folder, tmp_path))

    threads = [threading.Thread(target=build) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({corpus.training.tokens.tobytes() for corpus in corpora}) == 1
    assert len(corpora) == 6
    assert len(list((tmp_path / "cache" / "tokens").iterdir())) == 1


def test_held_out_bytes_and_tokens_are_those_of_the_held_out_text(folder: Path, tmp_path: Path) -> None:
    corpus = corpus_of(folder, tmp_path)
    text = TOKENIZER.decode(corpus.held_out.tokens)
    assert corpus.held_out_bytes_per_token == len(text) / len(corpus.held_out.tokens)
    assert corpus.repaired == (0, "")
