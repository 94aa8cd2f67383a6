"""Timelines as Parquet files, readable by any tool.

The files hold kinds and streams by name, because their codes are valid only inside a process.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from weft.errors import InputError, Violation, nearest
from weft.files import replacing
from weft.program.arrays import Ints
from weft.program.kinds import all_kinds
from weft.timeline.timeline import TIMELINE_COLUMNS, Timeline, stream_names

_VERSION = "1"
_NAMED = ("kind", "stream")


def write_timeline(path: Path, timeline: Timeline) -> None:
    """Write `timeline` to `path`; a reader sees the old file or the whole new one, never a part."""
    names = _names()
    columns = {
        column: pa.DictionaryArray.from_arrays(
            _integers(getattr(timeline, column).astype(np.int32)), _words(names[column])
        )
        if column in _NAMED
        else _integers(getattr(timeline, column))
        for column in TIMELINE_COLUMNS
    }
    metadata = {
        "weft.version": _VERSION,
        "weft.run": timeline.run,
        "weft.plan_id": timeline.plan_id,
        "weft.clock": timeline.clock,
        "weft.clock_error_ns": str(timeline.clock_error_ns),
    }
    table = pa.table(columns).replace_schema_metadata(metadata)
    with replacing(path) as unfinished:
        pq.write_table(table, unfinished, write_page_checksum=True)


# `pa.array`, `pq.read_table` and `to_numpy` import pandas where it is installed, though no value is pandas'.
# Nothing here calls them, because the import takes far longer than a file.
def _integers(values: npt.NDArray[Any]) -> pa.Array:
    held = pa.py_buffer(np.ascontiguousarray(values))
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), [None, held])


def _words(words: Sequence[str]) -> pa.Array:
    encoded = [word.encode() for word in words]
    ends = np.cumsum([0, *map(len, encoded)], dtype=np.int32)
    return pa.StringArray.from_buffers(len(words), pa.py_buffer(ends), pa.py_buffer(b"".join(encoded)))


def read_timeline(path: Path) -> Timeline:
    """Read a file of `write_timeline`.

    Raises:
        InputError: when there is no such file, or it is not a timeline of this version.
    """
    if not path.is_file():
        raise InputError(Violation(str(path), "no such timeline file"))
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            return _timeline(path, file.read())
    except InputError:
        raise
    except (pa.ArrowException, OSError, ValueError, TypeError, IndexError, KeyError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(Violation(str(path), f"not a timeline file: {reason}")) from None


def _timeline(path: Path, table: pa.Table) -> Timeline:
    metadata = {
        key.decode(): value.decode()
        for key, value in (table.schema.metadata or {}).items()
        if key.startswith(b"weft.")
    }
    _require_timeline(path, table, metadata)
    columns = {column: _numbers(path, column, table.column(column)) for column in TIMELINE_COLUMNS}
    return Timeline(
        run=metadata["weft.run"],
        plan_id=metadata["weft.plan_id"],
        clock=metadata["weft.clock"],
        clock_error_ns=int(metadata.get("weft.clock_error_ns", 0)),
        **columns,
    )


def _numbers(path: Path, column: str, values: pa.ChunkedArray) -> Any:
    if column in _NAMED:
        return _codes(path, column, values, _names()[column])
    numbers = np.from_dlpack(values.combine_chunks())
    return numbers.astype(np.uint64 if column == "id" else np.int64, casting="safe")


def _names() -> dict[str, Sequence[str]]:
    return {"kind": [kind.name for kind in all_kinds()], "stream": stream_names()}


def _require_timeline(path: Path, table: pa.Table, metadata: dict[str, str]) -> None:
    problems = [
        Violation(str(path), f"is no timeline file: it has no {key}")
        for key in ("weft.version", "weft.run", "weft.plan_id", "weft.clock")
        if key not in metadata
    ]
    if metadata.get("weft.version", _VERSION) != _VERSION:
        problems.append(Violation(str(path), f"has version {metadata['weft.version']}", _VERSION))
    problems += [
        Violation(str(path), f"has no column {column!r}")
        for column in TIMELINE_COLUMNS
        if column not in table.column_names
    ]
    problems += [
        Violation(str(path), f"column {column!r} has empty cells")
        for column in TIMELINE_COLUMNS
        if column in table.column_names and table.column(column).null_count
    ]
    if problems:
        raise InputError(problems)


def _codes(path: Path, column: str, names: pa.ChunkedArray, known: Sequence[str]) -> Ints:
    """Return the code of each name in this process."""
    encoded = names.combine_chunks()
    if not pa.types.is_dictionary(encoded.type):
        encoded = encoded.dictionary_encode()
    code = {name: index for index, name in enumerate(known)}
    words = encoded.dictionary.to_pylist()
    indices = np.from_dlpack(encoded.indices)
    used = np.unique(indices)
    unknown = [str(words[index]) for index in used if words[index] not in code]
    if unknown:
        raise InputError(
            [
                Violation(str(path), f"{column} {word!r} is not known here", nearest(word, known))
                for word in unknown
            ]
        )
    table = np.array([code.get(word, -1) for word in words], dtype=np.int64)
    codes: Ints = table[indices]
    return codes
