"""What a plan can say and the runtime does not execute is named before anything starts, one line each."""

import pytest
from small_jobs import make_plan, make_program, tiny

from weft.errors import InputError
from weft.run.runtime import require_runnable
from weft.run.supported import unsupported

PLAN = make_plan(tiny(), pp=2)


def recomputing():
    return tuple(stage.model_copy(update={"recompute": "full"}) for stage in PLAN.stages)


def doubled():
    def wide(stage):
        copies = tuple(
            copy.model_copy(update={"ranks": (2 * copy.ranks[0], 2 * copy.ranks[0] + 1)})
            for copy in stage.replicas
        )
        return stage.model_copy(update={"replicas": copies})

    return tuple(wide(stage) for stage in PLAN.stages)


def test_what_the_runtime_executes_is_not_refused():
    assert unsupported(PLAN) == []
    assert unsupported(PLAN.model_copy(update={"stages": recomputing()})) == []
    assert [unsupported(PLAN.model_copy(update={"sharding": level})) for level in ("zero-1", "zero-2")] == [
        [],
        [],
    ]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"sharding": "zero-3"}, "sharding 'zero-3'"),
        ({"blocking": ("messages", "reductions")}, "blocking messages and reductions"),
        ({"stages": doubled()}, "tensor parallelism (2 ranks to a stage's replica)"),
    ],
)
def test_everything_else_is(changes, expected):
    (violation,) = unsupported(PLAN.model_copy(update=changes))
    assert f"plan: {expected} is not supported by this runtime yet" in str(violation)


def test_the_runtime_refuses_it_before_any_process_group_starts():
    shared = make_plan(tiny(), pp=1, dp=2).model_copy(update={"sharding": "zero-3"})
    with pytest.raises(InputError, match="sharding 'zero-3' is not supported by this runtime yet"):
        require_runnable(shared, make_program(tiny(), shared))


def test_all_of_it_is_listed_at_once():
    changes = {"sharding": "zero-3", "blocking": ("messages",), "stages": doubled()}
    assert len(unsupported(PLAN.model_copy(update=changes))) == 3
