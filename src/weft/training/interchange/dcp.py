"""Checkpoints in the format of torch's distributed checkpointing (DCP), read as untrusted files.

Their `.metadata` is a pickle, and a pickle may call any function of any module. This reader accepts only the
few names that the format needs. Even these are not torch's classes: each stands for an inert record that
keeps its arguments. So a read calls only this module's code. Entries that are no tensors
(`BytesStorageMetadata`, also pickles) are never opened. torch's loader with `weights_only` reads the tensors.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch

from weft.describe.units import shown
from weft.errors import InputError, Violation
from weft.training.checkpoint.tensor_folders import FilePiece, Shape, assembled, whole_shapes

METADATA = ".metadata"
_CHECKPOINTING = "torch.distributed.checkpoint.metadata"
_RECORDS = frozenset(
    {
        *(
            (_CHECKPOINTING, name)
            for name in ("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties")
        ),
        *((_CHECKPOINTING, f"{kind}StorageMetadata") for kind in ("Tensor", "Bytes", "Chunk")),
        (_CHECKPOINTING, "_MEM_FORMAT_ENCODING"),
        # Python 3.11.0 to 3.11.3 pickle members of enumerations with it; it is a record here like the others.
        ("builtins", "getattr"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
        *(
            (module, name)
            for module in ("pathlib", "pathlib._local")
            for name in ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")
        ),
    }
)
_PRECISIONS = frozenset(
    str(value).removeprefix("torch.") for value in vars(torch).values() if isinstance(value, torch.dtype)
)


class _PickledCall:
    """A pickle's object of an admitted name: the name, the arguments and the state."""

    name = ""

    def __init__(self, *arguments: object) -> None:
        self.arguments = arguments
        self.state: object = None

    def __setstate__(self, state: object) -> None:
        self.state = state


class _RefusedName(pickle.UnpicklingError):
    pass


class _MetadataUnpickler(pickle.Unpickler):
    """An unpickler with inert records for the format's names; it refuses all other names.

    Every file gets new record classes: attributes that a pickle sets on a class must not reach the next file.
    """

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self._classes: dict[tuple[str, str], type[_PickledCall]] = {}

    def find_class(self, module: str, name: str) -> type[_PickledCall]:
        key = (module, name)
        if key not in _RECORDS and not (module == "torch" and name in _PRECISIONS):
            raise _RefusedName(
                f"it names {shown(f'{module}.{name}')}, which is no part of a checkpoint's metadata"
            )
        if key not in self._classes:
            self._classes[key] = type("Record", (_PickledCall,), {"name": name})
        return self._classes[key]

    def persistent_load(self, pid: object) -> NoReturn:
        raise _RefusedName("it refers to objects outside the file")


class DcpFolder:
    """Tensors of a folder that torch's distributed checkpointing wrote in its own format.

    Attributes:
        others: the number of entries that are no tensors; they are not read.

    Raises:
        InputError: if the metadata names anything but the format's own classes, is broken, or does not
            describe whole tensors in files of the folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        metadata = _load_metadata(path / METADATA)
        self._places: dict[tuple[str, Shape], tuple[int, int]] = {}
        self._pieces: dict[str, list[FilePiece]] = {}
        try:
            self.others = self._read(metadata)
        except InputError:
            raise
        except (AttributeError, KeyError, TypeError, ValueError, IndexError) as error:
            raise _broken(path, f"not the metadata of a checkpoint ({type(error).__name__})") from None
        self.shapes: Mapping[str, Shape] = whole_shapes(str(path), self._pieces)

    def read(self, name: str) -> torch.Tensor:
        parts = [(piece, self._read_piece(name, piece)) for piece in self._pieces[name]]
        return assembled(self.shapes[name], parts)

    def _read(self, metadata: _PickledCall) -> int:
        """Collect the pieces of all tensors; return the number of entries that are no tensors."""
        state = _state(metadata, "Metadata")
        entries: dict[str, _PickledCall] = dict(state["state_dict_metadata"])
        files: dict[tuple[str, Shape], str] = {}
        for index, info in dict(state["storage_data"]).items():
            key, place = _state(index, "MetadataIndex"), _state(info, "_StorageInfo")
            if key.get("offset") is None:
                continue
            where = (str(key["fqn"]), _size(key["offset"]))
            if place.get("transform_descriptors"):
                raise _broken(self.path, f"{where[0]} is compressed, which is not supported")
            files[where] = _plain_name(self.path, place["relative_path"])
            self._places[where] = (int(place["offset"]), int(place["length"]))
        others = 0
        for name, entry in entries.items():
            if not isinstance(name, str) or entry.name == "BytesStorageMetadata":
                others += 1
                continue
            self._pieces[name] = [
                FilePiece(offsets, _size(chunk["sizes"]), self.path / files[name, offsets])
                for chunk in (
                    _state(chunk, "ChunkStorageMetadata")
                    for chunk in _state(entry, "TensorStorageMetadata")["chunks"]
                )
                for offsets in (_size(chunk["offsets"]),)
            ]
        return others

    def _read_piece(self, name: str, piece: FilePiece) -> torch.Tensor:
        offset, length = self._places[name, piece.offsets]
        try:
            with open(piece.file, "rb") as file:
                file.seek(offset)
                content = file.read(length)
            value = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        except OSError as error:
            raise InputError(Violation(str(piece.file), error.strerror or str(error))) from None
        except Exception as error:  # torch's loader raises many kinds for broken and for refused content
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise InputError(Violation(str(piece.file), f"{name} cannot be read: {reason}")) from None
        if not isinstance(value, torch.Tensor) or tuple(value.shape) != piece.sizes:
            raise InputError(
                Violation(str(piece.file), f"{name} is not the tensor that the metadata announces")
            )
        return value


def _load_metadata(path: Path) -> _PickledCall:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InputError(Violation(str(path), error.strerror or str(error))) from None
    try:
        _refuse_far_memos(content)
        record = _MetadataUnpickler(io.BytesIO(content)).load()
    except _RefusedName as error:
        raise InputError(Violation(str(path), f"refused: {error}")) from None
    except Exception as error:  # broken bytes can raise any error in the unpickler
        raise _broken(path, f"a damaged pickle ({type(error).__name__})") from None
    if not isinstance(record, _PickledCall):
        raise _broken(path, "not the metadata of a checkpoint")
    return record


def _refuse_far_memos(content: bytes) -> None:
    """Refuse a pickle that stores an object under a number larger than itself.

    The unpickler reserves a table up to that number: five bytes could claim 64 GiB of memory.
    """
    for opcode, number, _ in pickletools.genops(content):
        if opcode.name in ("PUT", "BINPUT", "LONG_BINPUT") and number is not None and number > len(content):
            raise _RefusedName(f"it stores an object under number {number}")


def _state(record: Any, name: str) -> dict[str, Any]:
    if not isinstance(record, _PickledCall) or record.name != name or not isinstance(record.state, dict):
        raise TypeError(name)
    return record.state


def _size(record: Any) -> Shape:
    """Return the integers of a `torch.Size`."""
    if not isinstance(record, _PickledCall) or record.name != "Size":
        raise TypeError("Size")
    (values,) = record.arguments
    if not isinstance(values, tuple) or not all(type(value) is int and value >= 0 for value in values):
        raise TypeError("Size")
    return values


def _plain_name(path: Path, name: Any) -> str:
    if not isinstance(name, str) or name in ("", ".", "..") or Path(name).name != name:
        raise _broken(path, f"{shown(name)} is not the name of a file in the folder")
    return name


def _broken(path: Path, reason: str) -> InputError:
    return InputError(Violation(str(path), reason))
