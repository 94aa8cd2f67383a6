"""`[plan]`: what stages recompute is one word, or one for each of them."""

import pytest

from weft.describe.reading import parse_toml
from weft.describe.run_file import parse_run
from weft.errors import InputError

LEAST = {"model": {"preset": "gpt-1m"}}


@pytest.mark.parametrize("given", ["full", ["full", "none"], ["none", "none"]])
def test_recompute_is_one_word_or_one_for_each_stage(given):
    run = parse_run({**LEAST, "plan": {"recompute": given}})
    assert run.plan.recompute == (given if isinstance(given, str) else tuple(given))
    assert parse_run(parse_toml(run.to_toml(), "run")) == run


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        (
            {"recompute": "ful"},
            "run: plan.recompute: 'ful': must be 'none', 'selective' or 'full' (nearest valid: full)",
        ),
        (
            {"recompute": ["full", "some"]},
            "run: plan.recompute: 'some' for stage 1: must be 'none', 'selective' or 'full' "
            "(nearest valid: none)",
        ),
        (
            {"recompute": [["full"]]},
            "run: plan.recompute: ['full'] for stage 0: must be 'none', 'selective' or 'full'",
        ),
        (
            {"recompute": []},
            "run: plan.recompute: an empty list; one word for all stages, or one for each "
            "(nearest valid: none)",
        ),
        (
            {"recompute": ["full", "none", "none"], "pp": 2},
            'run: plan: recompute: 3 words for the 2 stages of pp 2 (nearest valid: ["full", "none"])',
        ),
        (
            {"recompute": ["full", "none"], "pp": 2, "loops": 2},
            "run: plan: recompute: 2 words for the 4 stages of pp 2 x loops 2 "
            '(nearest valid: ["full", "none", "none", "none"])',
        ),
    ],
)
def test_recompute_that_is_no_word_for_each_stage_is_one_line(plan, expected):
    with pytest.raises(InputError) as refused:
        parse_run({**LEAST, "plan": plan})
    assert str(refused.value) == expected


def test_words_of_stages_may_leave_the_loops_open():
    words = ["full", "none", "none", "none"]
    assert parse_run({**LEAST, "plan": {"recompute": words, "pp": 2}}).plan.loops is None
