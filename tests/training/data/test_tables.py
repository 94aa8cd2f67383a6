"""Rows of tables as documents: .jsonl and .parquet give what their text gives, and say what is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.errors import InputError, RunError
from weft.training.data.pieces import cut
from weft.training.data.sources import open_texts
from weft.training.data.tables import FileRows, text_column
from weft.training.data.text import open_corpus
from weft.training.data.tokenizers import ByteTokenizer

TEXTS = [f"row {number}: " + "warp and weft " * (number % 7) for number in range(80)]


def json_lines(path: Path, rows: list[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def jsonl(tmp_path: Path) -> Path:
    return json_lines(tmp_path / "rows.jsonl", [{"id": i, "body": text} for i, text in enumerate(TEXTS)])


@pytest.fixture
def parquet(tmp_path: Path) -> Path:
    table = pa.table({"id": range(len(TEXTS)), "body": TEXTS})
    pq.write_table(table, tmp_path / "rows.parquet", row_group_size=13)
    return tmp_path / "rows.parquet"


def contents(source: Path | str, cache: Path, share: int = 10**6) -> list[bytes]:
    texts = open_texts(str(source), cache)
    return list(texts.read(cut(texts.sizes(), share)))


def refusal(source: Path | str, cache: Path) -> str:
    with pytest.raises(InputError) as refused:
        contents(source, cache)
    assert len(refused.value.violations) == 1
    return str(refused.value)


def test_every_row_is_a_document(jsonl: Path, parquet: Path, tmp_path: Path) -> None:
    expected = [text.encode() for text in TEXTS]
    assert contents(jsonl, tmp_path / "cache") == contents(parquet, tmp_path / "cache") == expected


def test_both_formats_give_the_same_corpus(jsonl: Path, parquet: Path, tmp_path: Path) -> None:
    corpora = [open_corpus(str(path), 8, ByteTokenizer(), tmp_path / "cache") for path in (jsonl, parquet)]
    assert corpora[0].fingerprint == corpora[1].fingerprint
    training, held_out = (
        {text for text in bytes(side.tokens).split(b"\0") if text}
        for side in (corpora[0].training, corpora[0].held_out)
    )
    assert training | held_out == {text.encode() for text in TEXTS}
    assert held_out
    assert not training & held_out


def test_files_of_a_folder_and_of_a_glob_are_one_table(tmp_path: Path) -> None:
    folder = tmp_path / "rows"
    folder.mkdir()
    for name, part in (("b.jsonl", TEXTS[40:]), ("a.jsonl", TEXTS[:40])):
        json_lines(folder / name, [{"text": text} for text in part])
    expected = [text.encode() for text in TEXTS]
    assert contents(folder, tmp_path / "cache") == expected
    assert contents(f"{folder}/*.jsonl#text", tmp_path / "cache") == expected


@settings(max_examples=30)
@given(
    rows=st.lists(st.text(st.characters(exclude_categories=())), min_size=1, max_size=12),
    share=st.integers(1, 40),
)
def test_any_text_comes_back_in_pieces(
    tmp_path_factory: pytest.TempPathFactory, rows: list[str], share: int
) -> None:
    folder = tmp_path_factory.mktemp("rows")
    path = json_lines(folder / "rows.jsonl", [{"text": row} for row in rows])
    expected = "".join(rows).encode("utf-8", "surrogatepass")
    if not expected:
        assert "holds no text" in refusal(path, folder / "cache")
    else:
        assert b"".join(contents(path, folder / "cache", share)) == expected


def test_rows_without_text_are_left_out(tmp_path: Path) -> None:
    path = json_lines(
        tmp_path / "rows.jsonl", [{"text": "one"}, {"text": None}, {"text": ""}, {"text": "two"}]
    )
    path.write_text(path.read_text() + "\n")
    assert contents(path, tmp_path / "cache") == [b"one", b"two"]


@pytest.mark.parametrize(
    ("rows", "column"),
    [
        ([{"text": None}, {"text": None}, {"text": "one"}], ""),
        ([{"id": 1, "body": None, "note": None}, {"id": 2, "body": "one", "note": None}], ""),
        ([{"title": "a", "text": None}, {"title": "b", "text": "one"}], ""),
        ([{"text": "a", "body": None}, {"text": "b", "body": "one"}], "#body"),
    ],
)
def test_a_column_is_of_strings_by_its_first_value_that_is_not_null(
    tmp_path: Path, rows: list[dict[str, object]], column: str
) -> None:
    path = json_lines(tmp_path / "rows.jsonl", rows)
    assert contents(f"{path}{column}", tmp_path / "cache") == [b"one"]


def test_other_columns_may_be_null_and_a_table_of_nulls_has_no_text(tmp_path: Path) -> None:
    path = json_lines(tmp_path / "rows.jsonl", [{"text": "one", "note": None}])
    # The choice does not wait for a note: the broken line is not read.
    path.write_text(path.read_text() + "{")
    assert FileRows.open([(path, 0, 0)]).column == "text"
    path = json_lines(tmp_path / "rows.jsonl", [{"text": None}] * 2)
    assert "name the column that holds the text, as in DATA#COLUMN; columns of strings: none" in refusal(
        path, tmp_path / "cache"
    )


def test_sizes_are_counted_once_and_again_when_a_row_changes(jsonl: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    first = open_texts(str(jsonl), cache).sizes()
    assert first.tolist() == [len(text) for text in TEXTS]
    assert np.array_equal(open_texts(str(jsonl), cache).sizes(), first)
    assert len(list((cache / "tables").iterdir())) == 1
    json_lines(jsonl, [{"body": "another"}])
    assert open_texts(str(jsonl), cache).sizes().tolist() == [7]


def test_a_row_that_changes_while_it_is_read_fails(jsonl: Path, tmp_path: Path) -> None:
    texts = open_texts(str(jsonl), tmp_path / "cache")
    pieces = cut(texts.sizes(), 10**6)
    json_lines(jsonl, [{"body": text + ("!" if i == 2 else "")} for i, text in enumerate(TEXTS)])
    with pytest.raises(RunError, match=r"rows\.jsonl: row 3 changed while it was read"):
        list(texts.read(pieces))
    json_lines(jsonl, [{"body": text} for text in TEXTS[:5]])
    with pytest.raises(RunError, match=r"rows\.jsonl: row 6 changed while it was read"):
        list(texts.read(pieces))


@pytest.mark.parametrize(
    ("columns", "column", "chosen"),
    [
        ({"id": False, "body": True}, "", "body"),
        ({"title": True, "text": True}, "", "text"),
        ({"title": True, "text": True}, "title", "title"),
    ],
)
def test_the_column_is_the_one_named_the_only_one_or_text(
    columns: dict[str, bool], column: str, chosen: str
) -> None:
    assert text_column("t", columns, column) == chosen


@pytest.mark.parametrize(
    ("columns", "column", "problem"),
    [
        ({"title": True, "body": True}, "", "name the column that holds the text.*title, body"),
        ({"id": False}, "", "name the column .*columns of strings: none"),
        ({"id": False, "body": True}, "bodi", "'bodi' does not exist.*nearest valid: body"),
        ({"id": False, "body": True}, "id", "'id' holds no strings; columns of strings: body"),
    ],
)
def test_a_column_that_cannot_be_meant_is_refused(
    columns: dict[str, bool], column: str, problem: str
) -> None:
    with pytest.raises(InputError, match=problem):
        text_column("t", columns, column)


def test_broken_lines_are_named(tmp_path: Path) -> None:
    path, cache = tmp_path / "rows.jsonl", tmp_path / "cache"
    for line, problem in (
        ("{", "line 3: not JSON"),
        ('"text"', "line 3: not an object of columns"),
        ('{"txt": "a"}', "line 3: no column 'text'; columns: txt (nearest valid: txt)"),
        ('{"text": 5}', "line 3: 'text' is no string but int"),
    ):
        path.write_text(f'{{"text": "one"}}\n\n{line}\n')
        assert problem in refusal(path, cache)
    assert not list((cache / "tables").iterdir())


def test_empty_tables_are_refused(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    (tmp_path / "blank.jsonl").write_text("\n\n")
    assert "holds no text in 0 rows" in refusal(tmp_path / "blank.jsonl", cache)
    assert "holds no text in 1 rows" in refusal(json_lines(tmp_path / "a.jsonl", [{"text": ""}]), cache)
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / "none.parquet")
    assert "holds no text in 0 rows" in refusal(tmp_path / "none.parquet", cache)


def test_a_parquet_file_that_is_none_or_lacks_the_column_is_named(parquet: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 no")
    assert "broken.parquet: not a readable parquet file" in refusal(tmp_path / "broken.parquet", cache)
    assert "column 'text' does not exist" in refusal(f"{parquet}#text", cache)
    (tmp_path / "mixed").mkdir()
    parquet.rename(tmp_path / "mixed" / "a.parquet")
    pq.write_table(pa.table({"text": TEXTS}), tmp_path / "mixed" / "b.parquet")
    assert "b.parquet: column 'body' does not exist" in refusal(tmp_path / "mixed", cache)


def test_tables_beside_text_and_columns_of_text_are_refused(jsonl: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("some text")
    assert "holds tables (rows.jsonl) and text; name one kind by a glob" in refusal(tmp_path, tmp_path / "c")
    assert "names a column of text" in refusal(f"{tmp_path}/notes.txt#body", tmp_path / "c")
