"""A plan that is edited in Python is checked like one that is read."""

from __future__ import annotations

import pytest
from small_plans import make_plan, tiny

from weft.describe.plan import Plan, Replica, Stage
from weft.describe.plan_file import parse_plan_file
from weft.errors import InputError

PLAN = make_plan(tiny(), pp=2, dp=2)
WRONG = [
    ({"micro_batch_size": 0}, "plan: micro_batch_size: 0"),
    ({"global_batch": "64"}, "plan: global_batch: '64'"),
    ({"sharding": "zero-4"}, "plan: sharding: 'zero-4'"),
    ({"stages": ()}, "plan: stages"),
    ({"mesh": {"dp": 0}}, "plan: mesh.dp: 0"),
    ({"microbatch_size": 2}, "plan: microbatch_size: unknown key"),
]


@pytest.mark.parametrize(("changes", "refusal"), WRONG)
def test_an_edit_that_makes_no_plan_is_refused_as_a_file_is(changes, refusal):
    with pytest.raises(InputError) as edited:
        PLAN.model_copy(update=changes)
    assert any(str(one).startswith(refusal) for one in edited.value.violations)
    (key,) = changes
    if isinstance(changes[key], str | int):
        with pytest.raises(InputError) as read:
            parse_plan_file({**PLAN.model_dump(mode="json"), **changes})
        # Files have two more keys, which are no decisions.
        assert str(read.value).replace("sync, prediction, subject", "sync") == str(edited.value)


def test_axes_keep_one_order_however_the_plan_was_made():
    sorted_by_name = {**PLAN.model_dump(mode="json"), "mesh": {"cp": 1, "dp": 2, "pp": 2, "tp": 1}}
    assert list(parse_plan_file(sorted_by_name).plan.mesh) == ["pp", "dp", "cp", "tp"]
    edited = PLAN.model_copy(update={"mesh": {"dp": 2, "pp": 2}})
    assert edited.words == PLAN.words
    assert edited.words.startswith("pp 2 x dp 2, ")


def test_the_nearest_key_is_named():
    with pytest.raises(InputError, match=r"nearest valid: micro_batch_size"):
        PLAN.model_copy(update={"microbatch_size": 2})


@pytest.mark.parametrize(
    ("part", "changes", "where"),
    [
        (PLAN.stages[0], {"layers": (-1,)}, "stage: layers"),
        (PLAN.stages[0], {"recompute": "half"}, "stage: recompute: 'half'"),
        (PLAN.stages[0].replicas[0], {"ranks": ()}, "replica: ranks"),
        (PLAN.stages[0].replicas[0], {"ranks": [0, 1]}, "replica: ranks"),
        (PLAN.schedule, {"options": {"depth": None}}, "choice: options.depth"),
    ],
)
def test_parts_of_a_plan_are_checked_where_they_are_edited(part, changes, where):
    with pytest.raises(InputError) as refused:
        part.model_copy(update=changes)
    assert str(refused.value).startswith(where)


def test_a_rank_has_stages_with_the_numbers_of_its_replicas():
    (first, _), (_, last) = (stage.replicas for stage in PLAN.stages)
    assert PLAN.stages_of(first.ranks[0]) == {0: 0}
    assert PLAN.stages_of(last.ranks[0]) == {1: 1}
    assert PLAN.stages_of(PLAN.ranks) == {}


def test_a_legal_edit_is_the_plan_that_says_so_from_the_start():
    edited = PLAN.model_copy(update={"sharding": "zero-1"})
    assert edited == Plan.model_validate({**PLAN.__dict__, "sharding": "zero-1"})
    assert edited.plan_id != PLAN.plan_id
    assert PLAN.sharding == "zero-0"
    # Parts that were checked when they were made are taken as they are.
    assert edited.stages[0] is PLAN.stages[0]
    assert PLAN.model_copy() == PLAN
    assert PLAN.model_copy(deep=True).stages[0] is not PLAN.stages[0]


def test_wrong_fields_of_a_new_plan_are_refused_in_a_line_each():
    with pytest.raises(InputError, match=r"^stage: layers: ") as refused:
        Stage(layers=(), replicas=(Replica(ranks=(0,), micro_batches=1),))
    assert len(refused.value.violations) == 1
    with pytest.raises(InputError, match="plan: model: missing\n"):
        Plan(version=2)
