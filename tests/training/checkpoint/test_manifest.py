"""A manifest is read in the one form in which it is written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from weft.errors import RunError
from weft.training.checkpoint.manifest import MANIFEST, digest_of, manifest, verify


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    """A checkpoint of two files and their manifest."""
    for name in ("a.safetensors", "state.json"):
        (tmp_path / name).write_text(f"the content of {name}")
    files = {file.name: (file.stat().st_size, digest_of(file)) for file in sorted(tmp_path.iterdir())}
    (tmp_path / MANIFEST).write_bytes(manifest(files))
    return tmp_path


def refused(folder: Path, content: bytes) -> bool:
    (folder / MANIFEST).write_bytes(content)
    try:
        verify(folder)
    except RunError as error:
        assert str(error) == f"{folder / MANIFEST}: damaged"  # noqa: PT017
        return True
    return False


def test_what_is_written_is_read(whole: Path) -> None:
    verify(whole)
    assert not refused(whole, (whole / MANIFEST).read_bytes())


def test_the_same_record_in_another_form_is_damaged(whole: Path) -> None:
    content = (whole / MANIFEST).read_bytes()
    record = json.loads(content)
    names = list(reversed(record["files"]))
    forms = [
        json.dumps(record).encode(),
        json.dumps(record, indent=2, sort_keys=True).encode() + b"\n",
        content.rstrip(),
        content + b"\n",
        b" " + content,
        content.replace(b"state.json", b"\\u0073tate.json"),
        json.dumps({"files": {name: record["files"][name] for name in names}, "format": 2}, indent=1).encode()
        + b"\n",
    ]
    assert all(json.loads(form) == record for form in forms)
    assert [form for form in forms if not refused(whole, form)] == []


def test_white_space_for_white_space_is_damage_too(whole: Path) -> None:
    """These are the flips of a byte that leave the record what it was."""
    content = (whole / MANIFEST).read_bytes()
    passed, tried = [], 0
    for place, byte in enumerate(content):
        for other in b" \t\n\r":
            if byte in b" \t\n\r" and other != byte:
                tried += 1
                flipped = content[:place] + bytes([other]) + content[place + 1 :]
                if json.loads(flipped) == json.loads(content) and not refused(whole, flipped):
                    passed.append((place, other))
    assert tried > 50
    assert passed == []
