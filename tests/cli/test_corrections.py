"""`weft corrections`: what was learned, as text, as JSON and as a page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from web.lessons import learned

from weft.cli.corrections import lesson_record, lesson_text
from weft.cli.main import run
from weft.files import weft_home
from weft.web.pages.calibration import lessons_page

pytestmark = pytest.mark.usefixtures("own_home")


def test_the_command_shows_what_is_there(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    lessons = learned()
    page = tmp_path / "page.html"
    assert run(["corrections", "--report", str(page)]) == 0
    shown = capsys.readouterr().out
    assert shown == "".join(f"{lesson_text(one)}\n" for one in lessons) + f"wrote {page}\n"
    assert page.read_text() == lessons_page(lessons)
    assert run(["corrections", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "corrections": [json.loads(json.dumps(lesson_record(one))) for one in lessons]
    }


def test_the_command_says_where_nothing_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["corrections"]) == 0
    assert capsys.readouterr().out == (
        f"{weft_home()}: no plan was measured yet; weft plan RUN.toml --measure 4 does it\n"
    )


def test_what_is_no_finished_run_is_a_clear_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run(["corrections", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"weft: {tmp_path}: not a run directory: it has no run.toml\n"
