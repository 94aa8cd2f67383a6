"""What a plan can say and the runtime does not execute is named before anything starts, one line each."""

import pytest
from small_plans import make_plan, make_program, tiny

from weft.describe.plan import Choice
from weft.errors import InputError
from weft.program.rank_program import part_of
from weft.run.runtime import require_runnable
from weft.run.supported import unsupported

PLAN = make_plan(tiny(), pp=2)
UNLIKE = make_plan(tiny(), pp=2, dp=2, unlike=((2, 2), (1, 1)))


def recomputing():
    return tuple(stage.model_copy(update={"recompute": "full"}) for stage in PLAN.stages)


def doubled(*, falling=False):
    def wide(stage):
        copies = tuple(
            copy.model_copy(update={"ranks": tuple(sorted((2 * rank, 2 * rank + 1), reverse=falling))})
            for copy in stage.replicas
            for rank in copy.ranks
        )
        return stage.model_copy(update={"replicas": copies})

    return tuple(wide(stage) for stage in PLAN.stages)


def test_what_the_runtime_executes_is_not_refused():
    assert unsupported(PLAN) == unsupported(UNLIKE) == []
    assert unsupported(PLAN.model_copy(update={"stages": recomputing()})) == []
    assert unsupported(PLAN.model_copy(update={"stages": doubled()})) == []
    for level in ("zero-1", "zero-2", "zero-3"):
        assert unsupported(PLAN.model_copy(update={"sharding": level})) == []
    for precision in ("fp32", "fp64", "bf16"):
        assert unsupported(PLAN.model_copy(update={"precision": precision})) == []
    scaled = {"precision": "fp16", "methods": (Choice(name="gradient-norm"),)}
    assert unsupported(PLAN.model_copy(update=scaled)) == []


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"precision": "fp16"}, "precision 'fp16' without the method gradient-norm"),
        (
            {
                "precision": "fp16",
                "methods": (Choice(name="gradient-norm"), Choice(name="micro-batch-norms")),
            },
            "the method micro-batch-norms in precision 'fp16', whose losses are scaled,",
        ),
        ({"blocking": ("messages", "reductions")}, "blocking messages and reductions"),
        ({"launch": "captured"}, "a plan whose layers are captured graphs"),
        ({"stages": doubled(falling=True)}, "a replica whose ranks do not rise"),
        (
            {"stages": UNLIKE.stages, "sharding": "zero-1"},
            "zero-1 among replicas with unlike tensor ranks (2|1+2|1)",
        ),
    ],
)
def test_everything_else_is(changes, expected):
    (violation,) = unsupported(PLAN.model_copy(update=changes))
    assert f"plan: {expected} is not supported by this runtime yet" in str(violation)


def test_the_runtime_refuses_it_before_any_process_group_starts():
    plan = make_plan(tiny(), pp=1, dp=2, precision="fp16")
    with pytest.raises(InputError, match="precision 'fp16' without the method gradient-norm is not"):
        require_runnable(plan, part_of(make_program(tiny(), plan), 0))


def test_all_of_it_is_listed_at_once():
    changes = {"precision": "fp16", "blocking": ("messages",)}
    assert len(unsupported(PLAN.model_copy(update=changes))) == 2
