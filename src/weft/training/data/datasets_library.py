"""Tables that the `datasets` library reads: from the Hugging Face hub, its cache, files and folders.

    hf:NAME                      a data set of the hub or of the local cache
    hf:PATH                      a .parquet, .jsonl, .json, .csv, .arrow or .txt file, a folder of such files,
                                 or a folder that `save_to_disk` wrote
    hf:NAME:CONFIG@SPLIT#COLUMN  each of the last three may be left out

SPLIT is the library's own notation, such as `train[:10%]`; the default is `train` or the only split.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from weft.errors import InputError, Violation, nearest
from weft.installed import remedy
from weft.training.data.conversations import Conversations
from weft.training.data.sources import LIBRARY
from weft.training.data.tables import ROWS_PER_BATCH, arrow_row, is_text, text_column, texts_of

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict

TRAIN = "train"
LABEL = "label"
_BUILDERS = {
    ".arrow": "arrow",
    ".csv": "csv",
    ".json": "json",
    ".jsonl": "json",
    ".ndjson": "json",
    ".parquet": "parquet",
    ".txt": "text",
}
# The files of `save_to_disk`, for one table and for several.
_SAVED = ("state.json", "dataset_dict.json")
_SHOWN = 300


@dataclass(frozen=True, slots=True)
class TableName:
    """The parts of a source's name; an empty part stands for the library's default or its only choice."""

    path: str
    config: str = ""
    split: str = ""
    column: str = ""

    @classmethod
    def parse(cls, source: str) -> TableName:
        text = source.removeprefix(LIBRARY)
        if Path(text).expanduser().exists():
            return cls(text)
        # The longest notation is NAME:CONFIG@SPLIT#COLUMN; a split may hold colons: train[:10%].
        match = re.fullmatch(r"([^:@#]*)(?::([^@#]*))?(?:@([^#]*))?(?:#(.*))?", text)
        assert match is not None, "every part may be empty"
        return cls(*(part or "" for part in match.groups()))


@dataclass(frozen=True)
class LibraryRows:
    """Texts of one column of a table."""

    table: Dataset
    source: str
    column: str

    @property
    def where(self) -> str:
        return self.source

    @property
    def key(self) -> object:
        return [self.column, table_key(self.source, self.table)]

    def texts(self) -> Iterator[bytes]:
        values = self.table.select_columns([self.column]).with_format("arrow")
        for batch in values.iter(batch_size=ROWS_PER_BATCH):
            yield from texts_of(batch.column(0))


def open_text_rows(source: str) -> LibraryRows:
    """Return the rows that `source` names.

    Raises:
        InputError: if the library is missing or does not read it, or no one column fits.
    """
    name = TableName.parse(source)
    table = open_table(source, name)
    schema = table.features.arrow_schema
    columns = {column: is_text(schema.field(column).type) for column in schema.names}
    return LibraryRows(table, source, text_column(source, columns, name.column))


def open_conversation_rows(source: str) -> Conversations:
    """Return the conversations of the table that `source` names.

    Raises:
        InputError: if the library is missing or does not read it.
    """
    name = TableName.parse(source)
    table = open_table(source, name)
    rows = partial(_named_rows, table, source)
    return Conversations(rows, [name.column, table_key(source, table)], name.column)


def _named_rows(table: Dataset, source: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    return ((f"{source}: row {number}", arrow_row(row)) for number, row in enumerate(table, 1))


@dataclass(frozen=True, slots=True)
class LabelledRows:
    """Images and classes of a table, by row; labels count from 0 in the order of `classes`.

    Attributes:
        key: a JSON value that changes when a row does.
        open_image: a function that decodes the image of a row, a `PIL.Image`.
    """

    key: object
    classes: tuple[str, ...]
    labels: Sequence[int]
    open_image: Callable[[int], Any]


def open_image_rows(source: str) -> LabelledRows:
    """Return the images and labels of the table that `source` names.

    Images are in the named column or the only one of images; labels in that of classes or `label`.

    Raises:
        InputError: if the library is missing or cannot read it, a column is unclear, or a row has no label.
    """
    name = TableName.parse(source)
    table = open_table(source, name)
    kinds = {column: type(kind).__name__ for column, kind in table.features.items()}
    image = _only(source, "images", [column for column in kinds if kinds[column] == "Image"], name.column)
    labels = [column for column in kinds if kinds[column] == "ClassLabel"]
    label = _only(source, "class labels", labels or [column for column in kinds if column == LABEL])
    values = list(table.select_columns([label])[label])
    if None in values:
        problem = f"{source}: row {values.index(None) + 1} has no {label!r}"
        raise InputError(Violation("task.data", problem))
    classes, numbers = _classes(table.features[label], values)
    key = [image, label, table_key(source, table)]
    return LabelledRows(key, classes, numbers, partial(_image, table, image))


def _image(table: Dataset, column: str, row: int) -> Any:
    image = table[row][column]
    if image is None:
        raise ValueError("the row has no image")
    return image


def _classes(kind: Any, values: Sequence[Any]) -> tuple[tuple[str, ...], list[int]]:
    """Return the class names, declared by the table or all values in order, and the class of every row."""
    if hasattr(kind, "names"):
        return tuple(kind.names), [int(value) for value in values]
    words = sorted(set(values))
    number = {word: index for index, word in enumerate(words)}
    return tuple(str(word) for word in words), [number[value] for value in values]


def _only(source: str, what: str, columns: Sequence[str], given: str = "") -> str:
    """Return the given column, or the only one; raise InputError if there is no such column."""
    found = ", ".join(columns) or "none"
    if given and given not in columns:
        problem = f"{source}: no column {given!r} of {what}; there are: {found}"
        raise InputError(Violation("task.data", problem, nearest(given, columns)))
    if not given and len(columns) != 1:
        problem = f"{source}: one column of {what} is needed; there are: {found}"
        raise InputError(Violation("task.data", problem))
    return given or columns[0]


def table_key(source: str, table: Dataset) -> object:
    """Return a JSON key that changes with the table: its files, or the library's own hash."""
    files = [Path(file["filename"]) for file in table.cache_files]
    listing = [[str(file), file.stat().st_size, file.stat().st_mtime_ns] for file in files]
    return [source, len(table), listing or table._fingerprint]


def open_table(source: str, name: TableName) -> Dataset:
    """Return the one table that `source` names.

    Raises:
        InputError: if the library is missing or cannot read it, or there are several tables, none named.
    """
    try:
        import datasets
    except ImportError:
        problem = f"{source!r} needs the datasets library: {remedy('data')}"
        raise InputError(Violation("task.data", problem)) from None
    datasets.disable_progress_bars()  # they would fill the log of a rank
    try:
        opened = _opened(datasets, name)
    # The library passes on the errors of its readers and of the network.
    except Exception as error:
        cause = error.__cause__ if isinstance(error, datasets.exceptions.DatasetBuildError) else None
        reason = " ".join(str(cause or error).split())[:_SHOWN] or type(error).__name__
        raise InputError(Violation("task.data", f"{source!r}: not readable: {reason}")) from None
    if isinstance(opened, datasets.DatasetDict):
        splits = list(opened)
        if len(splits) != 1 and TRAIN not in splits:
            problem = f"{source!r} has the splits {', '.join(splits)}; name one as in NAME@SPLIT"
            raise InputError(Violation("task.data", problem, splits[0] if splits else ""))
        opened = opened[TRAIN if TRAIN in splits else splits[0]]
    return opened


def _opened(datasets: ModuleType, name: TableName) -> Dataset | DatasetDict:
    path, split = Path(name.path).expanduser(), name.split or None
    if any((path / file).is_file() for file in _SAVED):
        saved = datasets.load_from_disk(str(path))
        return saved[split] if split else saved
    if path.is_file():
        builder = _BUILDERS.get(path.suffix.lower())
        if builder is None:
            raise ValueError(f"a file of a table is one of {', '.join(_BUILDERS)}")
        return datasets.load_dataset(builder, data_files=str(path), split=split)
    place = str(path) if path.is_dir() else name.path
    return datasets.load_dataset(place, name.config or None, split=split)
