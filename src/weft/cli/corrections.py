"""`weft corrections`: corrections of predictions by measured steps, to show, extend and draw."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from weft.cli.output import Json, WrittenFile, print_json, say_written, write_asked
from weft.files import weft_home
from weft.planning.residuals import Lesson, lessons_in
from weft.predict.corrections import count_text
from weft.timeline.figures import error_text
from weft.training.directory.learning import learn_from_run
from weft.web.pages.calibration import lessons_page


def lesson_text(lesson: Lesson) -> str:
    """Return a lesson as four lines for a terminal, or five with measured peaks of memory."""
    low, high = _interval(lesson)
    count, inside = len(lesson.observations), sum(one.inside for one in lesson.left_out)
    return "\n".join(
        [
            f"{lesson.subject}: error of predictions {error_text(lesson.error)} "
            f"(median of {count_text(count)})",
            f"  corrected now: 90 % interval {low - 1.0:+.1%} to {high - 1.0:+.1%}; predicted by the others, "
            f"{inside} of {count} inside",
            f"  {_factors(lesson)}",
            *_memory(lesson),
            f"  {lesson.path}",
        ]
    )


def lesson_record(lesson: Lesson) -> dict[str, Any]:
    """Return a lesson as plain figures; `interval` is relative to the corrected step."""
    correction = lesson.correction
    return {
        "file": str(lesson.path),
        "model": lesson.residuals.model,
        "precision": lesson.residuals.precision,
        "hardware": lesson.residuals.hardware,
        "sources": dict(correction.sources),
        "count": correction.count,
        "error": lesson.error,
        "factors": {" ".join(key).strip(): factor for key, factor in correction.factors.items()},
        "step_factor": correction.step,
        "interval": list(_interval(lesson)),
        "shared": correction.shared,
        "memory": asdict(correction.memory),
        "left_out": [
            {
                "plan_id": one.observation.plan_id,
                "predicted_step_s": one.observation.predicted_step_s,
                "measured_step_s": one.observation.measured_step_s,
                "corrected_step_s": one.step_s,
                "low_s": one.low_s,
                "high_s": one.high_s,
            }
            for one in lesson.left_out
        ],
    }


def _interval(lesson: Lesson) -> tuple[float, float]:
    """Return the corrected interval, from the median declared interval of the measured plans."""
    half = median(one.half_width for one in lesson.observations)
    return lesson.correction.interval(1.0 - half, 1.0 + half)


def _factors(lesson: Lesson) -> str:
    found = [f"{' '.join(key).strip()} {factor:.2f}" for key, factor in lesson.correction.factors.items()]
    return f"times longer: {', '.join([*found, f'all of them {lesson.correction.step:.2f}'])}"


def _memory(lesson: Lesson) -> list[str]:
    memory = lesson.correction.memory
    words = f"  peaks of memory {memory.factor:.2f} of predicted, {memory.in_words()}"
    return [words] if memory.count else []


def corrections(*runs: Path, report: WrittenFile | None = None, json: Json = False) -> None:
    """Show how measured steps correct later predictions.

    `weft plan --measure` and every finished run named here add measured steps.

    - `weft corrections`
    - `weft corrections runs/demo --report corrections.html`

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
    write_asked([(report, lambda: lessons_page(lessons))])
    if json:
        print_json({"corrections": [lesson_record(one) for one in lessons]})
        return
    if not lessons:
        print(f"{home}: no plan was measured yet; weft plan RUN.toml --measure 4 does it")
    for one in lessons:
        print(lesson_text(one))
    say_written(report)
