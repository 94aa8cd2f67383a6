"""A file is replaced whole, or stays as it was and leaves nothing beside it."""

import pytest

from weft.files import replacing, write_whole


def test_a_file_is_replaced_whole(tmp_path):
    path = tmp_path / "file.txt"
    for text in ("one", "two \u00e4"):
        write_whole(path, text)
        assert path.read_text(encoding="utf-8") == text
    assert list(tmp_path.iterdir()) == [path]


def test_a_failure_half_way_leaves_the_old_file_alone(tmp_path):
    path = tmp_path / "file.txt"
    write_whole(path, "old")

    def fail_half_way() -> None:
        with replacing(path) as unfinished:
            unfinished.write_text("ne")
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        fail_half_way()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
