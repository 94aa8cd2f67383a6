"""JSON Schema: one per kind of file, and weft's own files use only keys that it has."""

import json
import tomllib

import pytest

from weft.cli.files import SCHEMAS, json_schema
from weft.describe.run_file import commented_run_file
from weft.errors import InputError


@pytest.mark.parametrize("kind", list(SCHEMAS))
def test_every_schema_is_json_and_refuses_unknown_keys(kind):
    schema = json_schema(kind)
    assert json.loads(json.dumps(schema)) == schema
    assert schema["additionalProperties"] is False
    assert schema["$schema"].endswith("2020-12/schema")


def test_the_commented_run_file_uses_keys_of_the_schema():
    schema = json_schema("run")
    for name, table in tomllib.loads(commented_run_file()).items():
        definition = schema["$defs"][schema["properties"][name]["$ref"].rpartition("/")[2]]
        assert set(table) <= set(definition["properties"])


def test_tables_of_methods_are_known_beside_the_others():
    head = json_schema("run")["properties"]["auxiliary-head"]
    assert set(head["properties"]) == set(head["required"]) == {"after_block", "weight"}
    assert head["additionalProperties"] is False


def test_a_plan_file_may_carry_its_id():
    assert "plan_id" in json_schema("plan")["properties"]
    assert "plan_id" not in json_schema("plan")["required"]


def test_the_summary_names_what_is_promised():
    promised = {
        "predicted_step_s",
        "measured_step_s",
        "first_loss",
        "final_loss",
        "steps",
        "tokens_per_s",
        "world_size",
        "plan",
    }
    assert promised <= set(json_schema("summary")["required"])


def test_another_kind_is_refused_with_the_nearest():
    with pytest.raises(InputError, match="nearest valid: cluster"):
        json_schema("clusters")
