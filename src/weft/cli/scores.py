"""`weft score`: the errors of the cost model on measured steps, and of its predictions on this machine."""

from __future__ import annotations

from pathlib import Path

from weft.cli.job_traces import score_trace
from weft.cli.output import (
    Flag,
    Json,
    WrittenFile,
    console,
    named_table,
    plain_table,
    print_json,
    progressing,
    refuse_options,
    say_written,
    write_asked,
)
from weft.errors import InputError, Violation
from weft.predict.ledger import STEP, Ledger
from weft.scoring.score import score as score_file
from weft.timeline.figures import error_text
from weft.web.pages.calibration import ledger_page
from weft.web.pages.score import SCORE_HEAD, score_page, score_rows

# Columns left out of a table of 80 characters.
_WIDE_ONLY = ("median", "worst", "kendall", "interval")


def score(
    file: Path | None = None,
    /,
    *,
    cluster: str | None = None,
    profile: Path | None = None,
    output: WrittenFile | None = None,
    report: WrittenFile | None = None,
    ledger: Flag = False,
    trace: Path | None = None,
    json: Json = False,
) -> None:
    """Score predictions against measured steps.

    - `weft score examples/score/korthikanti.csv --report report.html`
    - `weft score --ledger`

    Parameters
    ----------
    file
        A CSV file, one measured training step per row; docs/score.md lists the columns.
    cluster
        An expression or CLUSTER.toml that replaces the devices of every row.
    profile
        A layer profile that replaces the profile of every row.
    output
        Write a copy of the file with predicted_step_s, low, high, peak_bytes, fits and chance_to_fit.
    report
        Write a page that shows every prediction next to its measurement.
    ledger
        Score the measured predictions of this machine.
    trace
        Score the simulator on a trace of a job, with the trace's own times of operations.
    """
    if ledger + (file is not None) + (trace is not None) != 1:
        raise InputError(Violation("score", "give one of a CSV file, --ledger and --trace"))
    of_rows = {"--cluster": cluster, "--profile": profile, "--output": output}
    if trace is not None:
        refuse_options(
            {**of_rows, "--report": report},
            "not with --trace, which has all times; `weft explain TRACE --report` makes a page",
        )
        score_trace(trace, json=json)
        return
    if file is None:
        refuse_options(of_rows, "only with a CSV file")
        _score_ledger(report, json=json)
        return
    for written in (output, report):
        if written is not None and written.resolve() == file.resolve():
            raise InputError(Violation(str(written), "the scored file itself; give another path"))
    with progressing("scoring") as progress:
        scores = score_file(file, cluster=cluster, profile=profile, report=progress)
    write_asked([(output, scores.to_csv), (report, lambda: score_page(scores))])
    if json:
        print_json(scores.as_record())
        return
    out = console()
    shown = [place for place, name in enumerate(SCORE_HEAD) if name not in _WIDE_ONLY]
    table = named_table([SCORE_HEAD[place] for place in shown])
    for row in score_rows(scores):
        table.add_row(*(row[place] for place in shown))
    out.print(table)
    for number, problem in scores.problems.items():
        out.print(f"row {number}: {problem}", markup=False, soft_wrap=True)
    if scores.file.ignored:
        out.print(f"ignored columns: {', '.join(scores.file.ignored)}", markup=False, soft_wrap=True)
    say_written(output, report)


def _score_ledger(report: Path | None, *, json: bool) -> None:
    with Ledger() as ledger:
        honesty, entries = ledger.honesty(), ledger.scored()
    write_asked([(report, lambda: ledger_page([one for one in entries if one.quantity == STEP]))])
    if json:
        record = {
            quantity: {"scored": one.scored, "inside": one.inside, "median_error": one.median_error}
            for quantity, one in honesty.items()
        }
        print_json({"ledger": record})
        return
    if not honesty:
        print(f"{ledger.path}: nothing has been predicted and measured yet; weft train does both")
        return
    table = plain_table()
    for place, name in enumerate(("quantity", "scored", "inside the interval", "median error")):
        table.add_column(name, justify="right" if place else "left")
    for quantity, one in honesty.items():
        table.add_row(quantity, str(one.scored), f"{one.inside:.0%}", error_text(one.median_error))
    console().print(table)
    say_written(report)
