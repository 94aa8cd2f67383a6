"""Plans of version 1: what of them cannot be converted, and the ids that they had."""

from __future__ import annotations

from typing import Any

import pytest

from weft.describe.plan import GRADIENT_NORM, Choice, Plan
from weft.describe.plan_file import parse_plan_file
from weft.describe.plan_versions import current_id, former_ids, in_this_version
from weft.errors import InputError

STAGE = {"layers": [0, 1, 2], "replicas": [{"ranks": [0, 1], "micro_batches": 2}]}
RECORD: dict[str, Any] = {
    "version": 1,
    "model": "m",
    "model_fingerprint": "f",
    "cluster": "c",
    "cluster_fingerprint": "f",
    "sequence": 8,
    "global_batch": 2,
    "micro_batch_size": 1,
    "mesh": {"pp": 1, "cp": 2},
    "context_parallel": 2,
    "stages": [STAGE],
    "schedule": {"name": "1f1b"},
}


def problems(**changes: Any) -> list[str]:
    with pytest.raises(InputError) as caught:
        parse_plan_file({**RECORD, **changes}, "plan.json")
    return [str(violation) for violation in caught.value.violations]


def test_what_version_1_said_is_said_as_today() -> None:
    plan = parse_plan_file({**RECORD, "gradient_norm": True}).plan
    assert plan.version == 2
    assert (plan.cp, plan.methods) == (2, (Choice(name=GRADIENT_NORM),))
    assert parse_plan_file({**RECORD, "gradient_norm": False}).plan == parse_plan_file(RECORD).plan
    assert parse_plan_file(RECORD).plan.methods == ()


def test_files_of_this_version_are_taken_as_they_are() -> None:
    record = parse_plan_file(RECORD).plan.record()
    assert in_this_version(record, "plan.json") is record
    found = problems(version=2)
    assert len(found) == 1
    assert found[0].startswith("plan.json: context_parallel: unknown key")


def test_other_versions_are_refused() -> None:
    without = {key: value for key, value in RECORD.items() if key != "context_parallel"}
    with pytest.raises(InputError, match=r"plan\.json: version: 3: must be 2"):
        parse_plan_file({**without, "version": 3}, "plan.json")


def test_a_degree_that_is_said_twice_must_be_the_same() -> None:
    assert problems(context_parallel=4) == [
        "plan.json: context_parallel: 4; the mesh has cp 2 (nearest valid: 2)"
    ]
    assert problems(mesh={"pp": 2}) == [
        "plan.json: context_parallel: 2; the mesh has cp 1 (nearest valid: 1)"
    ]


@pytest.mark.parametrize(
    ("changes", "begins"),
    [
        ({"context_parallel": 0}, "plan.json: context_parallel: 0: "),
        ({"context_parallel": "2"}, "plan.json: context_parallel: '2': "),
        ({"gradient_norm": "yes"}, "plan.json: gradient_norm: 'yes': "),
        ({"mesh": 3}, "plan.json: mesh: 3: "),
        ({"mesh": {"pp": 1, "cp": None}}, "plan.json: context_parallel: 2; the mesh has cp None"),
        ({"gradiant_norm": True}, "plan.json: gradiant_norm: unknown key"),
    ],
)
def test_values_that_version_1_had_not_are_refused(changes: dict[str, Any], begins: str) -> None:
    (line,) = problems(**changes)
    assert line.startswith(begins)


def test_a_plan_that_version_1_could_not_say_had_no_id() -> None:
    plan = parse_plan_file(RECORD).plan
    (former,) = former_ids(plan)
    assert current_id(former, plan) == plan.plan_id != former
    assert current_id("another", plan) == "another"
    assert current_id(plan.plan_id, plan) == plan.plan_id
    later: Plan = plan.model_copy(update={"methods": (Choice(name="another"),)})
    assert former_ids(later) == frozenset()
