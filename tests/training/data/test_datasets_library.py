"""Tables that `datasets` reads, built on disk: texts, labelled images, splits, and what is refused."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from weft.errors import InputError
from weft.training.data.datasets_library import TableName
from weft.training.data.images import ImageSet, open_images
from weft.training.data.text import open_corpus
from weft.training.data.tokenizers import ByteTokenizer

datasets = pytest.importorskip("datasets", reason="the extra weft[data] is not installed")

TEXTS = [f"row {number}: " + "warp and weft " * (number % 7) for number in range(80)]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "library")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


def table(**columns: list[object]) -> datasets.Dataset:
    return datasets.Dataset.from_dict(columns)


def fingerprint(source: Path | str, cache: Path) -> str:
    return open_corpus(str(source), 8, ByteTokenizer(), cache).fingerprint


def refusal(source: str, cache: Path) -> str:
    with pytest.raises(InputError) as refused:
        fingerprint(source, cache)
    assert len(refused.value.violations) == 1
    assert "\n" not in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("hf:org/name", TableName("org/name")),
        ("hf:org/name:config", TableName("org/name", "config")),
        ("hf:name@test#body", TableName("name", "", "test", "body")),
        ("hf:org/name:config@train[:10%]#body", TableName("org/name", "config", "train[:10%]", "body")),
        ("hf:name#a@b:c", TableName("name", "", "", "a@b:c")),
    ],
)
def test_a_source_names_a_table_a_config_a_split_and_a_column(source: str, name: TableName) -> None:
    assert TableName.parse(source) == name


def test_the_same_rows_are_the_same_corpus_wherever_they_are(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    rows = table(id=list(range(80)), body=TEXTS)
    rows.save_to_disk(str(tmp_path / "saved"))
    rows.to_parquet(str(tmp_path / "rows.parquet"))
    rows.to_json(str(tmp_path / "rows.jsonl"))
    rows.to_csv(str(tmp_path / "rows.csv"))
    datasets.DatasetDict({"train": rows, "test": rows.select([0])}).save_to_disk(str(tmp_path / "splits"))
    (tmp_path / "folder").mkdir()
    rows.to_json(str(tmp_path / "folder" / "train.jsonl"))
    expected = fingerprint(tmp_path / "rows.jsonl", cache)
    for name in ("saved", "rows.parquet", "rows.jsonl", "rows.csv#body", "splits", "folder@train#body"):
        assert fingerprint(f"hf:{tmp_path}/{name}", cache) == expected


def test_a_split_may_be_a_part_and_a_changed_file_is_read_again(tmp_path: Path) -> None:
    cache, path = tmp_path / "cache", tmp_path / "rows.jsonl"
    table(text=TEXTS[:40]).to_json(str(path))
    half = fingerprint(f"hf:{path}", cache)
    table(text=TEXTS).to_json(str(path))
    assert fingerprint(f"hf:{path}@train[:50%]", cache) == half
    assert fingerprint(f"hf:{path}", cache) != half


def test_what_the_library_cannot_read_is_refused_in_one_line(tmp_path: Path) -> None:
    cache, path = tmp_path / "cache", tmp_path / "rows.jsonl"
    table(text=TEXTS, title=TEXTS).to_json(str(path))
    datasets.DatasetDict({"a": table(text=TEXTS), "b": table(text=TEXTS)}).save_to_disk(str(tmp_path / "ab"))
    (tmp_path / "broken.parquet").write_bytes(b"no")
    (tmp_path / "notes.pdf").write_bytes(b"no")
    for source, problem in (
        (f"hf:{tmp_path}/absent", "not readable: Couldn't find any data file"),
        (f"hf:{path}@test", 'not readable: Unknown split "test"'),
        (
            f"hf:{path}#txt",
            "column 'txt' does not exist; columns of strings: text, title (nearest valid: text)",
        ),
        (f"hf:{tmp_path}/ab", "has the splits a, b; name one as in NAME@SPLIT (nearest valid: a)"),
        (f"hf:{tmp_path}/broken.parquet", "not readable: "),
        (f"hf:{tmp_path}/notes.pdf", "a file of a table is one of .arrow, .csv"),
        (f"hf:{path}@train[:0]", "corresponds to no data"),
    ):
        assert problem in refusal(source, cache)


def test_a_missing_library_is_refused_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    line = 'needs the datasets library: pip install ".[data]" in the folder of weft'
    assert line in refusal("hf:name", tmp_path)


def pictures(count: int = 20, sizes: int = 3) -> list[Image.Image]:
    draw = np.random.default_rng(0).integers
    return [
        Image.fromarray(draw(0, 256, (8 + number % sizes, 9, 3), dtype=np.uint8)) for number in range(count)
    ]


def image_table(labels: list[object], kind: object) -> datasets.Dataset:
    features = datasets.Features({"image": datasets.Image(), "label": kind})
    return datasets.Dataset.from_dict({"image": pictures(len(labels)), "label": labels}, features=features)


def opened(source: str, cache: Path, classes: int = 2) -> ImageSet:
    return open_images(source, size=4, channels=3, classes=classes, cache=cache)


def test_images_of_many_sizes_and_their_labels(tmp_path: Path) -> None:
    cat_and_dog = datasets.ClassLabel(names=["cat", "dog"])
    image_table([number % 2 for number in range(20)], cat_and_dog).save_to_disk(str(tmp_path / "saved"))
    words = image_table([["cat", "dog"][number % 2] for number in range(20)], datasets.Value("string"))
    words.to_parquet(str(tmp_path / "words.parquet"))
    for name, picture in enumerate(pictures()):
        (tmp_path / "folder" / ["cat", "dog"][name % 2]).mkdir(parents=True, exist_ok=True)
        picture.save(tmp_path / "folder" / ["cat", "dog"][name % 2] / f"{name:02}.png")
    cache = tmp_path / "cache"
    saved, again = (opened(f"hf:{tmp_path}/{name}", cache) for name in ("saved", "words.parquet#image"))
    assert saved.classes == again.classes == ("cat", "dog")
    assert saved.fingerprint == again.fingerprint
    assert (len(saved.training), len(saved.held_out)) == (18, 2)
    plain = opened(str(tmp_path / "folder"), cache)
    known = {
        (pixels.tobytes(), int(label))
        for side in (plain.training, plain.held_out)
        for pixels, label in zip(side.pixels, side.labels, strict=True)
    }
    for pixels, label in zip(saved.training.pixels, saved.training.labels, strict=True):
        assert (pixels.tobytes(), int(label)) in known


def test_tables_that_are_not_of_labelled_images_are_refused(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    table(text=TEXTS).save_to_disk(str(tmp_path / "text"))
    table(image=[0], label=[0]).cast_column("image", datasets.Value("int32")).save_to_disk(
        str(tmp_path / "no")
    )
    image_table([0, None, 1], datasets.Value("int32")).save_to_disk(str(tmp_path / "unlabelled"))
    image_table([0, 1, 2], datasets.Value("int32")).save_to_disk(str(tmp_path / "three"))
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int32")})
    datasets.Dataset.from_dict(
        {"image": [None, *pictures(2)], "label": [0, 1, 0]}, features=features
    ).save_to_disk(str(tmp_path / "gap"))
    for name, problem in (
        ("text", "one column of images is needed; there are: none"),
        ("three#label", "no column 'label' of images; there are: image"),
        ("unlabelled", "row 2 has no 'label'"),
        ("three", "has 3 classes, the model tells 2 apart"),
        ("gap", "row 1: not a readable image: the row has no image"),
    ):
        with pytest.raises(InputError) as refused:
            opened(f"hf:{tmp_path}/{name}", cache)
        assert problem in str(refused.value)
