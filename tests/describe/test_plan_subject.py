"""A plan file's subject is read as it was written: run file, model and cluster."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from describe.test_cluster_tables import clusters
from hypothesis import given, settings
from hypothesis import strategies as st
from small_plans import make_plan, tiny

from weft.describe.cluster import Cluster
from weft.describe.cluster_file import parse_cluster
from weft.describe.models import PRESETS
from weft.describe.plan_file import PlanFile, parse_plan_file
from weft.describe.plan_subject import PlanSubject, subject_of
from weft.describe.run_file import parse_run
from weft.errors import InputError

PLAN = make_plan(tiny(), pp=2, dp=2)
RUN = parse_run(
    {
        "model": {"preset": "gpt-1m"},
        "cluster": {"use": "4xh100-80gb"},
        "sync": {"method": "diloco", "every": 8},
        "attention-window": {"tokens": 64},
        "goal": {"contract": "empirical"},
    }
)


def read_again(subject: PlanSubject) -> PlanSubject:
    found = parse_plan_file(json.loads(PlanFile(PLAN, subject=subject).to_json()))
    assert found.plan == PLAN
    assert found.subject is not None
    return found.subject


@settings(max_examples=60, deadline=None)
@given(cluster=clusters(), model=st.sampled_from(sorted(PRESETS)))
def test_what_is_written_is_read_again(cluster: Cluster, model: str) -> None:
    subject = PlanSubject(run=RUN, model=PRESETS[model], cluster=cluster)
    again = read_again(subject)
    assert again == subject
    assert again.cluster.fingerprint == cluster.fingerprint


def test_a_decoder_with_experts_and_windows_is_read_again(tmp_path: Path) -> None:
    config = {
        "model_type": "mixtral",
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 128,
        "vocab_size": 256,
        "max_position_embeddings": 128,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 32,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    run = RUN.model_copy(update={"model": type(RUN.model)(hf=str(tmp_path))})
    subject = subject_of(run)
    assert subject.model.decoder is not None
    assert subject.model.decoder.experts is not None
    (tmp_path / "config.json").unlink()
    assert read_again(subject) == subject


def test_another_model_and_cluster_replace_the_names_of_the_run_too() -> None:
    subject = subject_of(RUN)
    other = subject.changed(model="llama-7b", on="2xt4")
    assert (other.model.name, other.cluster.name) == ("llama-7b", "2xt4")
    assert (other.run.model.preset, other.run.cluster.use) == ("llama-7b", "2xt4")
    assert other.run.sync == RUN.sync
    assert subject.changed() == subject


@pytest.mark.parametrize(
    ("part", "value", "line"),
    [
        ("cluster", {"name": "x", "node": []}, "plan: subject.cluster"),
        ("cluster", 7, "plan: subject.cluster: 7: must be an object"),
        ("model", {"name": "x"}, "plan: subject.model.family: missing"),
        ("run", {"model": {"preset": "gpt-1m"}, "trian": {}}, "plan: subject.run.trian: unknown key"),
    ],
)
def test_a_damaged_subject_is_refused_by_the_name_of_its_key(part: str, value: object, line: str) -> None:
    record = json.loads(PlanFile(PLAN, subject=subject_of(RUN)).to_json())
    record["subject"][part] = value
    with pytest.raises(InputError) as refused:
        parse_plan_file(record)
    assert any(str(one).startswith(line) for one in refused.value.violations), refused.value


def test_the_same_devices_under_another_name_are_the_same_cluster() -> None:
    named = replace(parse_cluster("8xt4"), name="ours")
    again = read_again(PlanSubject(run=RUN, model=tiny(), cluster=named))
    assert (again.cluster.name, again.cluster.fingerprint) == ("ours", parse_cluster("8xt4").fingerprint)
