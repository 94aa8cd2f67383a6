"""`weft corrections`: corrections of predictions by measured steps, to show, extend and draw."""

from __future__ import annotations

from pathlib import Path

from weft.cli.output import Json, print_json
from weft.cli.tables.lessons import lesson_record, lesson_text
from weft.describe.home import weft_home
from weft.files import write_whole
from weft.planning.residuals import lessons_in
from weft.training.directory.learning import learn_from_run
from weft.web.pages.calibration import lessons_page


def corrections(*runs: Path, report: Path | None = None, json: Json = False) -> None:
    """Show how measured steps correct later predictions of their model on this machine.

    `weft plan --measure` and every finished run named here add measured steps.

    Example: weft corrections

    Example: weft corrections runs/demo --report corrections.html

    Parameters
    ----------
    runs
        Directories of finished runs; their steps are added first.
    report
        Write a page that shows every prediction next to its measurement.
    """
    home = weft_home()
    for run in runs:
        learn_from_run(run, home)
    lessons = lessons_in(home)
    if report is not None:
        write_whole(report, lessons_page(lessons))
    if json:
        print_json({"corrections": [lesson_record(one) for one in lessons]})
        return
    if not lessons:
        print(f"{home}: no plan was measured yet; weft plan RUN.toml --measure 4 does it")
    for one in lessons:
        print(lesson_text(one))
    if report is not None:
        print(f"wrote {report}")


COMMANDS = (corrections,)
