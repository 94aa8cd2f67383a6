"""Sources of text: files, rows of tables, or Python's own standard library.

`python-stdlib` is text on every machine with Python: the sources of the standard library, some 31 MB. It
leaves out installed packages. A file, a folder or a glob of text has one document per file. `.jsonl` and
`.parquet` have one per row; `hf:NAME` is a table for `datasets` (`weft.training.data.datasets_library`).
"""

from __future__ import annotations

import glob
import hashlib
import os
import stat
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from weft.errors import InputError, RunError, Violation, nearest
from weft.program.arrays import Ints
from weft.training.data.conversations import Conversations
from weft.training.data.pieces import BORDER_BYTES, Pieces, Texts, block
from weft.training.data.sampler import Words
from weft.training.data.tables import TABLE_SUFFIXES, FileRows, TableTexts, rows_of

PYTHON_STDLIB = "python-stdlib"
LIBRARY = "hf:"
_KINDS = " and ".join(sorted(TABLE_SUFFIXES))
_INSTALLED = {"site-packages", "dist-packages"}
_ALLOWED = f"{PYTHON_STDLIB}, a file, a folder, a glob or {LIBRARY}NAME"


@dataclass(frozen=True, slots=True)
class Document:
    """A listed file; `name` is its path relative to the source, with forward slashes."""

    name: str
    path: Path
    size: int
    modified_ns: int


def open_texts(source: str, cache: Path) -> Texts:
    """Return the documents that `source` names; `FILE#COLUMN` names the column of a table.

    Raises:
        InputError: if there are none, or the column of the text is unclear.
    """
    if source.startswith(LIBRARY):
        # Not at the top: the library is an extra, and takes a second to import.
        from weft.training.data.datasets_library import open_text_rows

        return TableTexts(open_text_rows(source), cache)
    named, column = _named(source)
    documents = list_documents(named)
    tables = _tables(documents)
    if tables and len(tables) < len(documents):
        problem = f"{source!r} holds tables ({tables[0].name}) and text; name one kind by a glob such as"
        raise InputError(Violation("task.data", f"{problem} folder/**/*.jsonl; tables are {_KINDS}"))
    if tables:
        return TableTexts(FileRows.open(_files(tables), column), cache)
    if column:
        problem = f"{source!r} names a column of text; tables are {_KINDS}"
        raise InputError(Violation("task.data", problem, named))
    return FileTexts(documents)


def open_conversations(source: str) -> Conversations:
    """Return the conversations of the table that `source` names; `FILE#COLUMN` names their column.

    Raises:
        InputError: if there is no such table, or its first row is no conversation.
    """
    if source.startswith(LIBRARY):
        from weft.training.data.datasets_library import open_conversation_rows

        table = open_conversation_rows(source)
    else:
        named, column = _named(source)
        documents = list_documents(named)
        tables = _tables(documents)
        if len(tables) < len(documents):
            other = next(one.name for one in documents if one not in tables)
            problem = f"{source!r} holds no conversations: {other} is no table; tables are {_KINDS}"
            raise InputError(Violation("task.data", problem))
        files = _files(tables)
        table = Conversations(partial(rows_of, files), FileRows(files, column).key, column)
    table.require()
    return table


def _named(source: str) -> tuple[str, str]:
    """Return the place and the column that a source names."""
    named, _, column = (source, "", "") if Path(source).expanduser().exists() else source.partition("#")
    return named, column


def _tables(documents: Sequence[Document]) -> list[Document]:
    return [document for document in documents if document.path.suffix.lower() in TABLE_SUFFIXES]


def _files(documents: Sequence[Document]) -> list[tuple[Path, int, int]]:
    return [(document.path, document.size, document.modified_ns) for document in documents]


@dataclass(frozen=True, slots=True)
class FileTexts:
    """Files, each of them a document."""

    documents: Sequence[Document]

    @property
    def key(self) -> object:
        return [[str(one.path), one.size, one.modified_ns] for one in self.documents]

    def sizes(self) -> Ints:
        return np.array([one.size for one in self.documents], dtype=np.int64)

    def order(self, pieces: Pieces) -> Words:
        """Return the first 64-bit word of a hash of the document's name and the piece's start."""
        places = zip(pieces.document.tolist(), pieces.start.tolist(), strict=True)
        names = (f"{self.documents[document].name}\0{start}" for document, start in places)
        digests = (hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest() for name in names)
        return np.fromiter((int.from_bytes(digest[:8]) for digest in digests), np.uint64, len(pieces))

    def name(self, document: int) -> str:
        return str(self.documents[document].path)

    def read(self, pieces: Pieces) -> Iterator[bytes]:
        columns = (pieces.document.tolist(), pieces.start.tolist(), pieces.end.tolist())
        for number, start, end in zip(*columns, strict=True):
            document = self.documents[number]
            until = min(document.size, end + BORDER_BYTES)
            try:
                with open(document.path, "rb") as file:
                    size = os.fstat(file.fileno()).st_size
                    file.seek(start)
                    content = file.read(until - start)
            except OSError as error:
                problem = f"{document.path}: cannot be read: {error.strerror}"
                raise InputError(Violation("task.data", problem)) from None
            if size != document.size or len(content) != until - start:
                problem = "the file changed while it was read; start again when it is complete"
                raise RunError(f"{document.path}: {problem}")
            yield block(content, 0, end - start, first=start == 0, last=end == document.size)


def list_documents(source: str) -> list[Document]:
    """Return the non-empty files of `source`, sorted by name.

    A folder means every file below it, except paths with a part that starts with a dot.

    Raises:
        InputError: if the source does not exist or holds no text.
    """
    root, paths = _paths(source)
    documents = sorted(_documents(root, paths), key=lambda document: document.name)
    if not documents:
        raise InputError(Violation("task.data", f"{source!r} holds no text; allowed: {_ALLOWED}"))
    return documents


def _paths(source: str) -> tuple[Path, Iterable[Path]]:
    """Return the base folder of the names, and the files."""
    if source == PYTHON_STDLIB:
        root = Path(sysconfig.get_path("stdlib"))
        return root, _below(root, lambda name: name not in _INSTALLED, lambda name: name.endswith(".py"))
    path = Path(source).expanduser()
    if source and path.is_dir():
        return path, _below(path, _is_shown, _is_shown)
    if path.is_file():
        return path.parent, (path,)
    if glob.has_magic(source):
        return _glob_root(path), (Path(found) for found in glob.iglob(str(path), recursive=True))
    raise InputError(Violation("task.data", f"{source!r} does not exist; allowed: {_ALLOWED}", _near(source)))


def _documents(root: Path, paths: Iterable[Path]) -> Iterator[Document]:
    for path in paths:
        try:
            status = path.stat()
        except OSError:
            continue  # a dangling link, or a file removed since it was listed
        if stat.S_ISREG(status.st_mode) and status.st_size:
            name = path.relative_to(root).as_posix()
            yield Document(name, path.absolute(), status.st_size, status.st_mtime_ns)


def _below(root: Path, enters: Callable[[str], bool], takes: Callable[[str], bool]) -> Iterator[Path]:
    """Yield the files below a folder, by the names of the folders that it enters and of the files."""
    for folder, folders, files in os.walk(root):
        # Packages installed beside the standard library are often far larger than it.
        folders[:] = filter(enters, folders)
        yield from (Path(folder, name) for name in files if takes(name))


def _is_shown(name: str) -> bool:
    return not name.startswith(".")


def _glob_root(pattern: Path) -> Path:
    """Return the longest leading part of a pattern without wildcards."""
    root = pattern
    while glob.has_magic(str(root)):
        root = root.parent
    return root


def _near(source: str) -> str:
    """Return the name closest to a missing one: a word of weft or a neighbour in its folder."""
    if near := nearest(source, [PYTHON_STDLIB]):
        return near
    path = Path(source).expanduser()
    try:
        neighbours = {entry.name: str(entry) for entry in path.parent.iterdir()}
    except OSError:
        return ""
    return neighbours.get(nearest(path.name, neighbours), "")
