"""Tables of text: one document per row, from `.jsonl` and `.parquet` files or a table of `datasets`.

Rows are read twice, once for their sizes and once for their tokens; they are never in memory together.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from weft.errors import InputError, RunError, Violation, nearest
from weft.program.arrays import Ints
from weft.program.codes import GOLDEN, mix
from weft.training.data.cache import cached
from weft.training.data.pieces import Pieces, block
from weft.training.data.sampler import Words

FORMAT = 1
JSON_LINES = frozenset({".jsonl", ".ndjson"})
PARQUET = ".parquet"
TABLE_SUFFIXES = JSON_LINES | {PARQUET}
TEXT = "text"
ROWS_PER_BATCH = 1024


class Rows(Protocol):
    """The texts of a table in the order of its rows.

    Attributes:
        key: a JSON value that changes when a row does.
        where: the table's name.
    """

    @property
    def key(self) -> object: ...

    @property
    def where(self) -> str: ...

    def texts(self) -> Iterator[bytes]:
        """Yield the text of every row, in UTF-8; it is empty if the row has none."""
        ...


@dataclass(frozen=True)
class TableTexts:
    """Rows of a table as documents; their sizes are kept in `cache`."""

    rows: Rows
    cache: Path

    @property
    def key(self) -> object:
        return [FORMAT, self.rows.key]

    def sizes(self) -> Ints:
        """Return the bytes of every row; raise InputError if no row holds any text."""
        entry = self.cache / "tables" / hashlib.sha256(json.dumps(self.key).encode()).hexdigest()[:32]
        cached(entry, self._build)
        sizes: Ints = np.load(entry / "sizes.npy", mmap_mode="r", allow_pickle=False)
        return sizes

    def _build(self, building: Path) -> Mapping[str, Any]:
        sizes = np.fromiter((len(text) for text in self.rows.texts()), dtype=np.int64)
        if not sizes.any():
            problem = f"{self.rows.where} holds no text in {len(sizes)} rows"
            raise InputError(Violation("task.data", problem))
        np.save(building / "sizes.npy", sizes, allow_pickle=False)
        return {"rows": len(sizes)}

    def order(self, pieces: Pieces) -> Words:
        rows = mix(pieces.document.astype(np.uint64) + GOLDEN)
        return mix(rows + pieces.start.astype(np.uint64) * GOLDEN)

    def name(self, document: int) -> str:
        return f"{self.rows.where}: row {document + 1}"

    def read(self, pieces: Pieces) -> Iterator[bytes]:
        sizes = self.sizes()
        rows = enumerate(self.rows.texts())
        number, text = -1, b""
        columns = (pieces.document.tolist(), pieces.start.tolist(), pieces.end.tolist())
        for document, start, end in zip(*columns, strict=True):
            while number < document:
                number, text = next(rows, (document, b""))
            size = int(sizes[document])
            if len(text) != size:
                raise RunError(f"{self.name(document)} changed while it was read; start again")
            yield block(text, start, end, first=start == 0, last=end == size)


@dataclass(frozen=True)
class FileRows:
    """Rows of `.jsonl` and `.parquet` files; `files` are path, size and time of the last change."""

    files: Sequence[tuple[Path, int, int]]
    column: str

    @classmethod
    def open(cls, files: Sequence[tuple[Path, int, int]], column: str = "") -> FileRows:
        """Open files with the text in `column`, or in a column found in the first file.

        Raises:
            InputError: if there is no such column, or none or several fit.
        """
        path = files[0][0]
        parquet = path.suffix.lower() == PARQUET
        found = _parquet_columns(path) if parquet else _json_columns(path, column or TEXT)
        return cls(files, text_column(str(path), found, column))

    @property
    def key(self) -> object:
        return [self.column, [[str(path), size, modified] for path, size, modified in self.files]]

    @property
    def where(self) -> str:
        more = f" and {len(self.files) - 1} more" if len(self.files) > 1 else ""
        return f"{self.files[0][0]}{more}"

    def texts(self) -> Iterator[bytes]:
        for path, _, _ in self.files:
            read = _parquet_texts if path.suffix.lower() == PARQUET else _json_texts
            yield from read(path, self.column)


def rows_of(files: Sequence[tuple[Path, int, int]]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the name and the values of every row of `.jsonl` and `.parquet` files."""
    for path, _, _ in files:
        if path.suffix.lower() == PARQUET:
            yield from _parquet_rows(path)
        else:
            yield from ((f"{path}: line {number}", row) for number, row in _json_rows(path))


def text_column(where: str, columns: Mapping[str, bool], column: str) -> str:
    """Return the column of the text: the given one, the only one of strings, or the one called `text`.

    Args:
        columns: True by name for columns of strings.

    Raises:
        InputError: if there is no such column, or none or several fit.
    """
    strings = [name for name, is_text in columns.items() if is_text]
    allowed = f"columns of strings: {', '.join(strings) or 'none'}"
    if column:
        if column not in strings:
            why = "holds no strings" if column in columns else "does not exist"
            problem = f"{where}: column {column!r} {why}; {allowed}"
            raise InputError(Violation("task.data", problem, nearest(column, strings)))
        return column
    if len(strings) != 1 and TEXT not in strings:
        problem = f"{where}: name the column that holds the text, as in DATA#COLUMN; {allowed}"
        raise InputError(Violation("task.data", problem, strings[0] if strings else ""))
    return strings[0] if len(strings) == 1 else TEXT


def texts_of(values: pa.Array | pa.ChunkedArray) -> Iterator[bytes]:
    """Yield the UTF-8 bytes of a column of strings; a missing string gives empty bytes."""
    for value in values.cast(pa.large_binary()).to_pylist():
        yield value or b""


def arrow_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of Arrow without the keys that its objects lack: Arrow fills those in with None."""
    return {column: _without_none(value) for column, value in row.items()}


def _without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_none(one) for key, one in value.items() if one is not None}
    return [_without_none(one) for one in value] if isinstance(value, list) else value


def is_text(kind: pa.DataType) -> bool:
    """Return True for a column of strings."""
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def _parquet_columns(path: Path) -> dict[str, bool]:
    return {field.name: is_text(field.type) for field in _open_parquet(path).schema_arrow}


def _parquet_texts(path: Path, column: str) -> Iterator[bytes]:
    file = _open_parquet(path)
    # Another file of the table may lack the column.
    text_column(str(path), {field.name: is_text(field.type) for field in file.schema_arrow}, column)
    for batch in _batches(path, file, [column]):
        yield from texts_of(batch.column(0))


def _parquet_rows(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    rows = (arrow_row(row) for batch in _batches(path, _open_parquet(path)) for row in batch.to_pylist())
    return ((f"{path}: row {number}", row) for number, row in enumerate(rows, 1))


def _batches(path: Path, file: pq.ParquetFile, columns: list[str] | None = None) -> Iterator[pa.RecordBatch]:
    try:
        yield from file.iter_batches(ROWS_PER_BATCH, columns=columns)
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(path, error) from None


def _open_parquet(path: Path) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(path, memory_map=True)
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: Exception) -> InputError:
    return InputError(Violation("task.data", f"{path}: not a readable parquet file: {error}"))


def _json_columns(path: Path, wanted: str) -> dict[str, bool]:
    """Return the first row's columns: True by name for those whose first value that is not null is a string.

    Reading ends where column `wanted` is one of strings: no other column can change the choice.
    """
    values: dict[str, Any] | None = None
    for _, row in _json_rows(path):
        values = {name: row.get(name) if old is None else old for name, old in (values or row).items()}
        if None not in values.values() or isinstance(values.get(wanted), str):
            break
    if values is None:
        raise InputError(Violation("task.data", f"{path}: holds no text in 0 rows"))
    return {name: isinstance(value, str) for name, value in values.items()}


def _json_texts(path: Path, column: str) -> Iterator[bytes]:
    for number, row in _json_rows(path):
        if column not in row:
            known = ", ".join(row) or "none"
            problem = f"{path}: line {number}: no column {column!r}; columns: {known}"
            raise InputError(Violation("task.data", problem, nearest(column, row)))
        value = "" if row[column] is None else row[column]
        if not isinstance(value, str):
            problem = f"{path}: line {number}: {column!r} is no string but {type(value).__name__}"
            raise InputError(Violation("task.data", problem))
        # JSON can hold half of a surrogate pair, which is no character; a tokenizer gets it as other bytes.
        yield value.encode("utf-8", "surrogatepass")


def _json_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the number and the object of every line that is not empty."""
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                if not line.isspace():
                    yield number, _json_row(path, number, line)
    except OSError as error:
        raise InputError(Violation("task.data", f"{path}: cannot be read: {error.strerror}")) from None


def _json_row(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(Violation("task.data", f"{path}: line {number}: not JSON: {error}")) from None
    if not isinstance(row, dict):
        raise InputError(Violation("task.data", f"{path}: line {number}: not an object of columns"))
    return row
