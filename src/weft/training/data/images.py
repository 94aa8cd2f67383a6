"""Labelled images: scikit-learn's digits, a table of `datasets`, or a folder with one sub-folder per class.

Every image is decoded once, cropped to a central square, scaled to the model's size and stored. The file is
memory-mapped. So a run finds an unreadable image before its first step, and never later.
A tenth of the images, by the hash of their names, is held out; training cannot reach them.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps

from weft.errors import InputError, Violation, nearest
from weft.program.arrays import Ints
from weft.training.data.cache import cached
from weft.training.data.sources import LIBRARY

FORMAT = 2
DIGITS = "digits"
HELD_OUT_SHARE = 10  # one image in ten
SUFFIXES = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"})
MODES = {1: "L", 3: "RGB"}
# Formats whose grey of 16 bits may come as 32-bit integers, from 0 to 65535.
_SIXTEEN_BITS = frozenset({"PNG", "PPM"})
_ALLOWED = f"{DIGITS}, {LIBRARY}NAME, or a folder with one sub-folder of images per class"
# Pillow's errors for files that are broken, cut short or far too large.
_UNREADABLE = (OSError, ValueError, SyntaxError, EOFError, struct.error, Image.DecompressionBombError)
# Enough lines to find the problem with a folder.
_LISTED_PROBLEMS = 20

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class LabelledImages:
    """One side of a set of images.

    Attributes:
        pixels: shape (images, channels, size, size), memory-mapped.
        labels: shape (images,), each from 0 to the number of classes minus one.
    """

    pixels: Bytes
    labels: Ints

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class ImageSet:
    """Both sides of a source of images; `fingerprint` is a hash of all their pixels and labels."""

    classes: tuple[str, ...]
    training: LabelledImages
    held_out: LabelledImages
    fingerprint: str


@dataclass(frozen=True, slots=True)
class Picture:
    """One image before decoding; `key` changes when the image does."""

    name: str
    label: int
    key: str
    open: Callable[[], Image.Image]


def open_images(source: str, *, size: int, channels: int, classes: int, cache: Path) -> ImageSet:
    """Return the images of `source`, scaled to `channels` x `size` x `size`, from the cache or built into it.

    Classes are the sub-folders of a folder in the order of their names, labelled 0, 1, ...

    Args:
        classes: the number of classes of the model; the data may have fewer.

    Raises:
        InputError: if the source is missing, has no images, too few to hold one out, or more classes than
            `classes`; if the model reads neither grey nor colour images; if images cannot be read.
    """
    if channels not in MODES:
        raise InputError(Violation("model.channels", f"{channels}: images have 1 or 3 channels", "3"))
    names, pictures = list_pictures(source, classes)
    listing = [[picture.name, picture.label, picture.key] for picture in pictures]
    record = json.dumps([FORMAT, size, channels, listing])
    entry = cache / "images" / hashlib.sha256(record.encode()).hexdigest()[:32]
    contents = cached(entry, partial(_build, source=source, pictures=pictures, size=size, channels=channels))
    held_out = _held_out(pictures)
    labels = np.array([picture.label for picture in pictures], dtype=np.int64)
    pixels = np.memmap(entry / "pixels", dtype=np.uint8, mode="r").reshape(-1, channels, size, size)
    border = int(held_out.sum())
    # The held-out images come first in the file.
    return ImageSet(
        classes=names,
        training=LabelledImages(pixels[border:], labels[~held_out]),
        held_out=LabelledImages(pixels[:border], labels[held_out]),
        fingerprint=contents["fingerprint"],
    )


def list_pictures(source: str, classes: int) -> tuple[tuple[str, ...], list[Picture]]:
    """Return the names of the classes, and all images, not read yet; raise as `open_images` does."""
    listing = _digits if source == DIGITS else _table if source.startswith(LIBRARY) else _folder
    names, pictures = listing(source)
    _require_enough(source, names, pictures, classes)
    return names, pictures


def _table(source: str) -> tuple[tuple[str, ...], list[Picture]]:
    # Not at the top: the library is an extra, and takes a second to import.
    from weft.training.data.datasets_library import open_image_rows

    rows = open_image_rows(source)
    key = hashlib.sha256(json.dumps(rows.key).encode()).hexdigest()[:16]
    pictures = [
        Picture(f"row {row + 1}", label, key, partial(rows.open_image, row))
        for row, label in enumerate(rows.labels)
    ]
    return rows.classes, pictures


def _digits(_: str) -> tuple[tuple[str, ...], list[Picture]]:
    """Return scikit-learn's digits, 8 x 8: UCI's test set of optically recognised handwritten digits."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    # 17 levels of grey, 0 to 16.
    pixels = np.rint(digits.images * (255 / 16)).astype(np.uint8)
    pictures = [
        Picture(f"{index:04}", int(label), "", partial(Image.fromarray, image))
        for index, (image, label) in enumerate(zip(pixels, digits.target, strict=True))
    ]
    return tuple(str(name) for name in digits.target_names), pictures


def _folder(source: str) -> tuple[tuple[str, ...], list[Picture]]:
    root = Path(source).expanduser()
    if not source or not root.is_dir():
        problem = f"{source!r} is not a folder; allowed: {_ALLOWED}"
        raise InputError(Violation("task.data", problem, nearest(source, [DIGITS])))
    folders = sorted(path for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))
    pictures = []
    for label, folder in enumerate(folders):
        for path in sorted(folder.rglob("*")):
            if path.suffix.lower() in SUFFIXES and not path.name.startswith(".") and path.is_file():
                status = path.stat()
                key = f"{path.absolute()} {status.st_size} {status.st_mtime_ns}"
                name = path.relative_to(root).as_posix()
                pictures.append(Picture(name, label, key, partial(Image.open, path)))
    return tuple(folder.name for folder in folders), pictures


def _require_enough(source: str, names: Sequence[str], pictures: Sequence[Picture], classes: int) -> None:
    counts = np.bincount([picture.label for picture in pictures], minlength=len(names))
    if not pictures:
        raise InputError(Violation("task.data", f"{source!r} holds no images; allowed: {_ALLOWED}"))
    problems = []
    if len(names) > classes:
        problem = f"{source!r} has {len(names)} classes, the model tells {classes} apart"
        problems.append(Violation("task.data", problem, f"a model with a vocabulary of {len(names)}"))
    # A table may declare classes that a part of it does not have.
    whole = not source.startswith(LIBRARY)
    empty = [name for name, count in zip(names, counts, strict=True) if whole and not count]
    problems += [Violation("task.data", f"{source!r}: class {name!r} holds no images") for name in empty]
    if len(pictures) < 2:
        problems.append(Violation("task.data", f"{source!r} has 1 image; at least 2 are needed", "2"))
    if problems:
        raise InputError(problems)


def _held_out(pictures: Sequence[Picture]) -> npt.NDArray[np.bool_]:
    """Return the mask of held-out images; it depends only on their names and their number."""
    names = [picture.name.encode("utf-8", "surrogateescape") for picture in pictures]
    order = sorted(range(len(names)), key=lambda index: hashlib.sha256(names[index]).digest())
    chosen = np.zeros(len(pictures), dtype=bool)
    chosen[order[: max(1, len(pictures) // HELD_OUT_SHARE)]] = True
    return chosen


def _build(
    building: Path, source: str, pictures: Sequence[Picture], size: int, channels: int
) -> Mapping[str, Any]:
    held_out = _held_out(pictures)
    order = np.argsort(~held_out, kind="stable")
    digest = hashlib.sha256(held_out.tobytes())
    problems: list[Violation] = []
    with open(building / "pixels", "wb") as file:
        for picture in (pictures[index] for index in order.tolist()):
            try:
                pixels = _decoded(picture, size, channels)
            except _UNREADABLE as error:
                reason = str(getattr(error, "strerror", None) or error).splitlines()[0]
                problem = f"{source!r}: {picture.name}: not a readable image: {reason}"
                problems.append(Violation("task.data", problem))
                continue
            file.write(pixels)
            digest.update(picture.label.to_bytes(8, "little") + pixels)
    if problems:
        more = len(problems) - _LISTED_PROBLEMS
        left = [Violation("task.data", f"{source!r}: and {more} more")] if more > 0 else []
        raise InputError(problems[:_LISTED_PROBLEMS] + left)
    return {"fingerprint": digest.hexdigest()[:16]}


def _decoded(picture: Picture, size: int, channels: int) -> bytes:
    """Return the pixels as uint8 bytes of shape (channels, size, size)."""
    with picture.open() as image:
        ImageOps.exif_transpose(image, in_place=True)
        fitted = ImageOps.fit(
            _of_eight_bits(image).convert(MODES[channels]), (size, size), Image.Resampling.BILINEAR
        )
        pixels: Bytes = np.asarray(fitted).reshape(size, size, channels)
        return pixels.transpose(2, 0, 1).tobytes()


def _of_eight_bits(image: Image.Image) -> Image.Image:
    """Return an image with at most 8 bits per channel; raise ValueError if its pixels have no fixed range."""
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in _SIXTEEN_BITS):
        # Pillow's own conversion makes every level above 255 white.
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise ValueError(f"pixels of mode {image.mode} have no fixed range; save it with 8 bits")
    return image
