"""Laws: exposed codecs cover the gain of codecs that take no time; one piece alone changes its codec."""

from __future__ import annotations

from dataclasses import replace

import pytest
from timeline.timelines import timeline_of

from weft.describe.plan import Choice
from weft.describe.reading import parse_toml
from weft.describe.run_file import parse_run
from weft.methods.clan.options import ClanOptions
from weft.planning.exposed_codecs import codec_change, codec_rows, exposed_codecs
from weft.planning.planned import plan_run
from weft.planning.planned_job import PlannedJob
from weft.planning.sync_comparison import sync_figures
from weft.program.kinds import KINDS

RUN = (
    '[model]\npreset = "gpt-1m"\n[train]\nglobal_batch = 8\n[cluster]\nuse = "4xa100-80gb"\n'
    '[goal]\ncontract = "empirical"\n[plan]\n{plan}\n[sync]\nmethod = "clan"\nminimum_bytes = 4096\n'
    "piece_bytes = 1000000\n{sync}\n"
)
CELLS = [
    ("dp = 4\nloops = 1", 'codec = "top-k"\nratio = 100'),
    ("dp = 4\nloops = 1", 'codec = "natural-dithering"'),
    ("dp = 2\npp = 2\nloops = 1", 'codec = "top-k"\npiece_codecs = "1.0 fp16"'),
]


def job_of(plan: str, sync: str) -> PlannedJob:
    """A job whose devices compute so fast that codecs are exposed: hosts launch captured graphs."""
    job = plan_run(parse_run(parse_toml(RUN.format(plan=plan, sync=sync), "run.toml")))
    return replace(job, plan=job.plan.model_copy(update={"launch": "captured"}), chosen_for=None)


@pytest.mark.parametrize(("plan", "sync"), CELLS)
def test_the_change_is_of_the_most_exposed_piece_alone_and_shortens_the_step(plan: str, sync: str) -> None:
    job = job_of(plan, sync)
    found = exposed_codecs(job)
    seconds = [one.seconds for one in found]
    assert seconds == sorted(seconds, reverse=True)
    assert sum(seconds) <= job.prediction.step_s
    figures = sync_figures(job.problem.cost_model, job.plan)
    # Without these codecs, another path may be the longest.
    assert sum(seconds) >= figures.codecs.exposed_s - 1e-9 > 0.0
    change = codec_change(job, found)
    assert change is not None
    assert change.prediction.step_s < change.former_step_s
    options, changed = (ClanOptions.model_validate(dict(one.sync.options)) for one in (job.plan, change.plan))
    pieces = {(one.stage, one.piece) for one in found} | {(9, 9)}
    first = (change.exposed.stage, change.exposed.piece)
    assert change.exposed in found
    for piece in pieces:
        before, after = options.of_piece(*piece), changed.of_piece(*piece)
        assert (before.codec != after.codec) == (piece == first)
        assert after.block_bytes >= before.block_bytes
        assert after.keeps_errors == before.keeps_errors
    assert change.plan.model_copy(update={"sync": job.plan.sync}) == job.plan
    words = dict(codec_rows(job))
    assert f"most in {found[0]}" in words["exposed codecs, predicted"]
    assert words["a shorter step"].startswith(f'[sync] piece_codecs = "{changed.piece_codecs}": predicted')


def test_changes_go_on_until_no_piece_has_a_better_codec() -> None:
    job, steps, changed = job_of(*CELLS[1]), [], []
    while (change := codec_change(job, exposed_codecs(job))) is not None:
        assert change.former_step_s == pytest.approx(job.predicted.prediction.step_s)
        steps.append(change.prediction.step_s)
        changed.append(change.exposed)
        job = replace(job, plan=change.plan, chosen_for=None)
    assert len(steps) >= 2
    assert steps == sorted(steps, reverse=True)
    assert len({(one.stage, one.piece) for one in changed}) == len(changed)


def test_no_codec_is_better_than_numbers_as_they_are_and_dense_has_none() -> None:
    job = job_of(CELLS[0][0], 'codec = "fp32"')
    assert codec_change(job, exposed_codecs(job)) is None
    dense = replace(job, plan=job.plan.model_copy(update={"sync": Choice(name="dense")}))
    assert exposed_codecs(dense) == ()
    assert codec_change(dense, ()) is None
    assert codec_rows(dense) == []


def test_a_measured_piece_whose_codec_takes_long_is_named() -> None:
    job = job_of(CELLS[0][0], CELLS[0][1])
    columns = job.program.columns
    slow = (columns.kind == KINDS.code("aggregate")) & (columns.part == 1)

    def durations(row: int, step: int) -> int:
        return 10**9 if slow[row] else 1000

    first, *_ = exposed_codecs(job, timeline_of(job.program, durations, steps=4, clock="monotonic"))
    assert (first.stage, first.piece, round(first.seconds, 3)) == (0, 1, 1.0)
