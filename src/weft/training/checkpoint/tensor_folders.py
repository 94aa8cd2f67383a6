"""Folders of named tensors, read one tensor at a time.

A folder of safetensors files holds whole tensors or pieces of tensors; `SafetensorsFolder` reads both.
Hugging Face writes whole tensors in one file, or in several files named by an index. Runs of weft and
torchtitan hold pieces, as torch's distributed checkpointing writes them. They have one file per rank; its
header holds the offsets of each piece. A folder opens with its headers alone; `read` reads a tensor.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from weft.errors import InputError, Violation
from weft.training.interchange.weight_files import weight_files

# The key under which torch's storage keeps the offsets of a file's pieces, and the offsets' own key.
_SHARDING = "DCP_SHARDING_INFO"
_OFFSETS = "saved_offsets"

# No tensor is this long, and the sum of two such numbers is still a 64-bit integer.
_LARGEST = 1 << 60

Shape = tuple[int, ...]


class NamedTensors(Protocol):
    """Named tensors: `shapes` by name are known at once, `read` reads values."""

    @property
    def shapes(self) -> Mapping[str, Shape]: ...

    def read(self, name: str) -> torch.Tensor:
        """Return a whole tensor, in host memory and in its stored precision.

        Raises:
            InputError: if its bytes are broken.
        """
        ...


class TensorFolder(NamedTensors, Protocol):
    """Named tensors on disk."""

    path: Path


@dataclass(frozen=True, slots=True)
class FilePiece:
    """A box of a tensor: its offsets, its sizes and its file."""

    offsets: Shape
    sizes: Shape
    file: Path


class SafetensorsFolder:
    """Tensors of a folder of safetensors files.

    The files are those of the index; without an index, `model.safetensors`; without both, all files.

    Raises:
        InputError: if there are none (pickled weights are not read), a file is broken or missing, or the
            pieces of a tensor overlap or leave gaps; one line each.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        problems: list[Violation] = []
        self._pieces: dict[str, list[FilePiece]] = {}
        for file in weight_files(path):
            try:
                for name, piece in _pieces_of(file):
                    self._pieces.setdefault(name, []).append(piece)
            except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
                problems.append(Violation(str(file), f"not a whole safetensors file: {error}"))
        if problems:
            raise InputError(problems)
        self.shapes: Mapping[str, Shape] = whole_shapes(str(path), self._pieces)

    def read(self, name: str) -> torch.Tensor:
        pieces = self._pieces[name]
        try:
            if len(pieces) == 1:
                return _read_piece(pieces[0], name)
            return assembled(self.shapes[name], [(piece, _read_piece(piece, name)) for piece in pieces])
        except (SafetensorError, OSError) as error:
            raise InputError(Violation(str(self.path), f"{name} cannot be read: {error}")) from None


class DrawnWeights:
    """Tensors in memory by name."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.shapes: Mapping[str, Shape] = {name: tuple(one.shape) for name, one in tensors.items()}
        self._tensors = tensors

    def read(self, name: str) -> torch.Tensor:
        return self._tensors[name]


class CompletedFolder:
    """The tensors of a folder, and those of `others` that it lacks."""

    def __init__(self, folder: TensorFolder, others: NamedTensors) -> None:
        self.path = folder.path
        self.shapes: Mapping[str, Shape] = {**others.shapes, **folder.shapes}
        self._folder = folder
        self._others = others

    def read(self, name: str) -> torch.Tensor:
        return (self._folder if name in self._folder.shapes else self._others).read(name)


def assembled(shape: Shape, pieces: Sequence[tuple[FilePiece, torch.Tensor]]) -> torch.Tensor:
    """Return a tensor of shape `shape`, assembled from its pieces."""
    whole = torch.empty(shape, dtype=pieces[0][1].dtype)
    for piece, value in pieces:
        box = tuple(
            slice(start, start + size) for start, size in zip(piece.offsets, piece.sizes, strict=True)
        )
        whole[box] = value
    return whole


def whole_shapes(where: str, pieces: Mapping[str, Sequence[FilePiece]]) -> dict[str, Shape]:
    """Return the shapes of whole tensors by name, from their pieces.

    Raises:
        InputError: one line for every tensor with pieces that overlap or leave gaps.
    """
    problems, shapes = [], {}
    for name, parts in pieces.items():
        ranks = {len(part.sizes) for part in parts} | {len(part.offsets) for part in parts}
        numbers = {number for part in parts for number in (*part.offsets, *part.sizes)}
        if len(ranks) == 1 and all(0 <= number <= _LARGEST for number in numbers) and _exact_cover(parts):
            ends = np.array([part.offsets for part in parts]) + np.array([part.sizes for part in parts])
            shapes[name] = tuple(int(end) for end in ends.max(axis=0)) if ranks != {0} else ()
        else:
            problems.append(
                Violation(where, f"the {len(parts)} pieces of {name} overlap or do not make up a whole")
            )
    if problems:
        raise InputError(problems)
    return shapes


def _exact_cover(parts: Sequence[FilePiece]) -> bool:
    """Return True if boxes fill the box from zero to their farthest end exactly once, on the border grid."""
    starts = np.array([part.offsets for part in parts], dtype=np.int64)
    ends = starts + np.array([part.sizes for part in parts], dtype=np.int64)
    if len(parts) == 1:
        return not starts.any()
    borders = [np.unique([0, *starts[:, axis], *ends[:, axis]]) for axis in range(starts.shape[1])]
    filled = (ends > starts).all(axis=1)
    starts, ends = starts[filled], ends[filled]
    count = np.zeros([len(border) - 1 for border in borders], dtype=np.int32)
    for start, end in zip(starts, ends, strict=True):
        first = [np.searchsorted(border, value) for border, value in zip(borders, start, strict=True)]
        last = [np.searchsorted(border, value) for border, value in zip(borders, end, strict=True)]
        count[tuple(slice(low, high) for low, high in zip(first, last, strict=True))] += 1
    return bool((count == 1).all())


def _pieces_of(file: Path) -> list[tuple[str, FilePiece]]:
    with safe_open(file, framework="pt") as tensors:
        sharding = json.loads((tensors.metadata() or {}).get(_SHARDING, "{}"))
        found = []
        for name in tensors.keys():  # noqa: SIM118  (it is no mapping)
            sizes = tuple(int(size) for size in tensors.get_slice(name).get_shape())
            offsets = (
                tuple(int(start) for start in sharding[name][_OFFSETS]) if sharding else (0,) * len(sizes)
            )
            found.append((name, FilePiece(offsets, sizes, file)))
        return found


def _read_piece(piece: FilePiece, name: str) -> torch.Tensor:
    with safe_open(piece.file, framework="pt") as tensors:
        value: torch.Tensor = tensors.get_tensor(name)
        return value
