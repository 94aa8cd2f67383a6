"""Labelled images: both sides of digits and of folders; every unreadable image is named before a run."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from weft.errors import InputError
from weft.training.data.images import ImageSet, open_images


def picture(path: Path, level: int, size: tuple[int, int] = (12, 12), mode: str = "RGB") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, level if mode == "L" else (level, 0, 0)).save(path)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Ten images of each of two classes; the level of red is the image's own."""
    for label, name in enumerate(("cat", "dog")):
        for number in range(10):
            picture(tmp_path / "pets" / name / f"{number}.png", 100 * label + number)
    return tmp_path / "pets"


def opened(source: Path | str, cache: Path, size: int = 4, channels: int = 3, classes: int = 2) -> ImageSet:
    return open_images(str(source), size=size, channels=channels, classes=classes, cache=cache)


def test_digits_are_scikit_learns(tmp_path: Path) -> None:
    from sklearn.datasets import load_digits

    images = opened("digits", tmp_path, size=8, channels=1, classes=10)
    digits = load_digits()
    assert images.classes == tuple("0123456789")
    assert len(images.training) + len(images.held_out) == len(digits.target) == 1797
    assert len(images.held_out) == 179
    whole = np.concatenate([images.held_out.pixels, images.training.pixels])[:, 0]
    levels = np.rint(whole * (16 / 255)).astype(np.int64)
    ours = {(pixels.tobytes(), int(label)) for pixels, label in zip(levels, labels_of(images), strict=True)}
    theirs = zip(digits.images.astype(np.int64), digits.target, strict=True)
    assert ours == {(pixels.tobytes(), int(label)) for pixels, label in theirs}


def labels_of(images: ImageSet) -> np.ndarray:
    return np.concatenate([images.held_out.labels, images.training.labels])


def test_every_image_of_a_folder_is_on_one_side_with_its_own_label(folder: Path, tmp_path: Path) -> None:
    images = opened(folder, tmp_path / "cache")
    assert images.classes == ("cat", "dog")
    assert (len(images.training), len(images.held_out)) == (18, 2)
    red = np.concatenate([images.held_out.pixels, images.training.pixels])[:, 0, 0, 0]
    assert sorted(red.tolist()) == [*range(10), *range(100, 110)]
    assert (labels_of(images) == red // 100).all()


def test_the_sides_depend_on_names_alone(folder: Path, tmp_path: Path) -> None:
    first = opened(folder, tmp_path / "one")
    moved = folder.rename(tmp_path / "elsewhere")
    second = opened(moved, tmp_path / "two")
    assert np.array_equal(first.held_out.pixels, second.held_out.pixels)
    assert first.fingerprint == second.fingerprint


def test_an_entry_is_built_once_and_again_when_an_image_changes(folder: Path, tmp_path: Path) -> None:
    first = opened(folder, tmp_path / "cache")
    assert opened(folder, tmp_path / "cache").fingerprint == first.fingerprint
    assert len(list((tmp_path / "cache" / "images").iterdir())) == 1
    picture(folder / "cat" / "0.png", 77, size=(13, 13))
    assert opened(folder, tmp_path / "cache").fingerprint != first.fingerprint


@settings(max_examples=15)
@given(
    size=st.integers(1, 9),
    channels=st.sampled_from([1, 3]),
    shape=st.tuples(st.integers(1, 20), st.integers(1, 20)),
    mode=st.sampled_from(["L", "RGB", "RGBA", "P", "1"]),
)
def test_images_of_any_shape_and_mode_fit_the_model(
    tmp_path_factory: pytest.TempPathFactory, size: int, channels: int, shape: tuple[int, int], mode: str
) -> None:
    root = tmp_path_factory.mktemp("images")
    for number in range(2):
        (root / "one").mkdir(exist_ok=True)
        Image.new("RGB", shape, (255, 255, 255)).convert(mode).save(root / "one" / f"{number}.png")
    images = opened(root, root / ".cache", size=size, channels=channels, classes=1)
    assert images.training.pixels.shape == images.held_out.pixels.shape == (1, channels, size, size)
    assert (images.training.pixels == 255).all()


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(
    ("suffix", "mode"), [("png", "I;16"), ("tiff", "I;16"), ("tiff", "I;16B"), ("pgm", "I;16")]
)
def test_grey_of_16_bits_is_scaled_to_8(tmp_path: Path, suffix: str, mode: str, channels: int) -> None:
    levels = np.arange(0, 256, 4, dtype=np.uint8).reshape(8, 8)
    (tmp_path / "deep" / "one").mkdir(parents=True)
    for number in range(2):
        # One level of 8 bits has 256 of 16.
        deep = (levels.astype(np.uint16) << 8) + 255 * number
        image = Image.frombytes(mode, (8, 8), deep.astype(">u2" if mode == "I;16B" else "<u2").tobytes())
        image.save(tmp_path / "deep" / "one" / f"{number}.{suffix}")
    images = opened(tmp_path / "deep", tmp_path / "cache", size=8, channels=channels, classes=1)
    for side in (images.training, images.held_out):
        assert (side.pixels == levels).all()


@pytest.mark.parametrize("mode", ["I", "F"])
def test_pixels_without_a_fixed_range_are_refused(folder: Path, tmp_path: Path, mode: str) -> None:
    for name in ("cat/a.tiff", "dog/b.tiff"):
        Image.new(mode, (12, 12), 1).save(folder / name)
    lines = refused(folder, tmp_path / "cache")
    words = f"not a readable image: pixels of mode {mode} have no fixed range; save it with 8 bits"
    assert {line.split(": ", 2)[2] for line in lines} == {f"cat/a.tiff: {words}", f"dog/b.tiff: {words}"}


def refused(source: Path | str, cache: Path, **sizes: int) -> list[str]:
    with pytest.raises(InputError) as error:
        opened(source, cache, **sizes)
    return [str(violation) for violation in error.value.violations]


def test_all_unreadable_images_are_named_and_nothing_is_left(folder: Path, tmp_path: Path) -> None:
    (folder / "cat" / "3.png").write_bytes(b"no image")
    whole = (folder / "dog" / "4.png").read_bytes()
    (folder / "dog" / "4.png").write_bytes(whole[: len(whole) // 2])
    lines = refused(folder, tmp_path / "cache")
    assert len(lines) == 2
    assert all("not a readable image" in line for line in lines)
    assert {name for name in ("cat/3.png", "dog/4.png") if any(name in line for line in lines)} == {
        "cat/3.png",
        "dog/4.png",
    }
    assert not any((tmp_path / "cache" / "images").iterdir())


def test_names_that_are_not_utf_8_are_read_and_named(folder: Path, tmp_path: Path) -> None:
    odd = folder / "cat" / os.fsdecode(b"\xff.png")
    (folder / "cat" / "0.png").rename(odd)
    images = opened(folder, tmp_path / "cache")
    assert len(images.training) + len(images.held_out) == 20
    odd.write_bytes(b"no image")
    (line,) = refused(folder, tmp_path / "cache")
    assert "cat/\udcff.png: not a readable image" in line


def test_many_unreadable_images_are_counted(tmp_path: Path) -> None:
    (tmp_path / "bad" / "one").mkdir(parents=True)
    for number in range(30):
        (tmp_path / "bad" / "one" / f"{number}.png").write_bytes(b"")
    lines = refused(tmp_path / "bad", tmp_path / "cache")
    assert len(lines) == 21
    assert "and 10 more" in lines[-1]


def test_wrong_sources_are_refused_in_one_line_each(folder: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    assert refused("digitz", cache) == [
        "task.data: 'digitz' is not a folder; allowed: digits, hf:NAME, or a folder with one sub-folder of "
        "images per class (nearest valid: digits)"
    ]
    (tmp_path / "empty").mkdir()
    assert "holds no images" in refused(tmp_path / "empty", cache)[0]
    (folder / "emu").mkdir()
    lines = refused(folder, cache)
    assert "has 3 classes, the model tells 2 apart" in lines[0]
    assert "class 'emu' holds no images" in lines[1]
    picture(tmp_path / "single" / "one" / "0.png", 1)
    assert "at least 2 are needed" in refused(tmp_path / "single", cache)[0]
    assert "2: images have 1 or 3 channels" in refused(folder, cache, channels=2)[0]
