"""A file is replaced whole, or stays as it was and leaves nothing beside it; so does a folder."""

import errno
import os
import stat

import pytest
from recorded_files import Told, recorded, require_flushed_before_named

from weft.files import building_folder, naming, replacing, write_whole


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


def test_a_folder_gets_its_name_when_it_is_whole(tmp_path):
    remains = tmp_path / ".folder.unfinished"
    remains.mkdir()
    (remains / "torn").write_text("by a kill")
    with building_folder(tmp_path / "folder") as folder:
        (folder / "inner").mkdir()
        (folder / "inner" / "file").write_text("text")
        assert not (tmp_path / "folder").exists()
    assert list(tmp_path.iterdir()) == [tmp_path / "folder"]
    assert sorted((tmp_path / "folder").rglob("*"))[1].read_text() == "text"


def test_a_folder_is_on_the_disk_before_it_gets_its_name(tmp_path):
    with recorded() as told, building_folder(tmp_path / "folder") as folder:
        (folder / "inner").mkdir()
        (folder / "inner" / "file").write_text("text" * 99)
        (folder / "other").write_text("text")
    require_flushed_before_named(told, tmp_path / ".folder.unfinished", tmp_path / "folder")


@pytest.mark.parametrize("files", [True, False])
def test_a_disk_that_does_not_take_a_file_is_an_error_but_not_one_that_takes_no_folder(
    tmp_path, monkeypatch, files
):
    flushing = os.fsync

    def refusing(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode) != files:
            raise OSError(errno.EIO, "input/output error")
        flushing(descriptor)

    def build() -> None:
        with building_folder(tmp_path / "folder") as folder:
            (folder / "file").write_text("text")

    monkeypatch.setattr(os, "fsync", refusing)
    if files:
        with pytest.raises(OSError, match="input/output"):
            build()
        assert list(tmp_path.iterdir()) == []
    else:
        build()
        assert (tmp_path / "folder" / "file").read_text() == "text"


def test_a_file_gets_its_name_in_one_step(tmp_path):
    """A kill may come at any time; only a loss of power may cost the new text."""
    with recorded() as told:
        write_whole(tmp_path / "file.txt", "text")
    assert told == [Told("name", str(tmp_path / "file.txt"))]


def test_a_failure_leaves_no_folder_and_spares_what_is_there(tmp_path):
    def fill(path, fails: bool) -> None:
        with building_folder(path) as folder:
            (folder / "file").write_text("new")
            if fails:
                raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        fill(tmp_path / "folder", fails=True)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "mine").write_text("old")
    with pytest.raises(OSError, match="not empty"):
        fill(tmp_path / "folder", fails=False)
    assert [path.read_text() for path in tmp_path.rglob("*") if path.is_file()] == ["old"]


def test_an_error_that_names_no_file_gets_the_name_of_the_one_that_is_written(tmp_path):
    with pytest.raises(OSError, match="No space left") as caught, replacing(tmp_path / "a"):
        raise OSError(28, "No space left on device")
    assert caught.value.filename == str(tmp_path / "a")
    with pytest.raises(FileNotFoundError) as caught, naming(tmp_path / "a"):
        (tmp_path / "absent").read_text()
    assert caught.value.filename == str(tmp_path / "absent")
