"""Run files: round trips, defaults, and every violation at once with the nearest valid key."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.describe.reading import parse_toml
from weft.describe.run_file import (
    RunFile,
    commented_run_file,
    load_run,
    parse_run,
)
from weft.errors import InputError

LEAST = {"model": {"preset": "gpt-1m"}}
words = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=10)
counts = st.integers(1, 10**9)


def optional(**keys):
    return st.fixed_dictionaries({}, optional=keys)


runs = st.fixed_dictionaries(
    {"model": st.one_of(*(st.fixed_dictionaries({key: words}) for key in ("preset", "hf")))},
    optional={
        "task": optional(data=words, sequence=counts, kind=st.sampled_from(["causal-lm", "a.b:Task"])),
        "train": optional(steps=counts, precision=st.sampled_from(["fp64", "fp32", "bf16"]), seed=counts),
        "optimizer": optional(
            learning_rate=st.floats(min_value=1e-9, max_value=10),
            betas=st.lists(st.floats(0, 0.999), min_size=2, max_size=2),
            weight_decay=st.floats(0, 1),
        ),
        "cluster": optional(use=words),
        "goal": optional(
            minimise=st.sampled_from(["time", "memory", "cost"]), deadline_hours=st.floats(0.1, 1e6)
        ),
        "plan": optional(schedule=words, loops=counts, pp=counts, dp=counts, planner=words),
        "checkpoint": optional(every=counts, keep=counts),
    },
)


@given(runs)
def test_a_run_reads_back_from_its_file(record):
    run = parse_run(record)
    assert parse_run(parse_toml(run.to_toml(), "run")) == run
    assert parse_run(run.model_dump(exclude_none=True)) == run


def test_the_commented_file_is_valid_and_so_is_everything_it_comments_out():
    text = commented_run_file()
    assert parse_run(parse_toml(text, "run")).model.preset == "gpt-10m"
    lines = [
        line.removeprefix("# ") if line.startswith("# ") and " = " in line else line
        for line in text.splitlines()
    ]
    complete = parse_run(parse_toml("\n".join(lines), "run"))
    assert set(complete.methods) == {"auxiliary-head", "attention-window", "offload", "fp8-linears", "lora"}
    # These go with another value of another key, and are named there.
    named_there = {"hf", "build", "momentum", "matrix_scale", "state_bytes"}
    named_there |= {"final_learning_rate", "decay_steps"}
    for name in set(RunFile.model_fields) - {"methods"}:
        table = getattr(complete, name)
        absent = {key for key in type(table).model_fields if getattr(table, key) is None}
        # What a method takes stands beside its word, and not under this name.
        assert absent - {"options"} <= named_there, name


def test_what_is_left_out_is_open_or_has_its_default():
    run = parse_run(LEAST)
    assert run.train.global_batch is run.train.precision is run.plan.schedule is None
    assert (run.cluster.use, run.goal.contract, run.sync.method) == ("this-machine", "exact", None)


def test_every_violation_is_one_line_with_the_nearest_key():
    with pytest.raises(InputError) as refused:
        parse_run(
            {
                "model": {},
                "trian": {},
                "task": {"kind": "causal-ml", "sequnce": 3},
                "train": {"global_batch": True, "steps": 0, "seed": "1", "sharding": "zero-3"},
                "optimizer": {"betas": [1, 0.5, 0.5], "learning_rate": float("nan")},
                "goal": {"minimise": "beauty", "deadline_hours": 0},
                "sync": {"method": ""},
            },
            "RUN.toml",
        )
    lines = str(refused.value).splitlines()
    assert all(line.startswith("RUN.toml: ") for line in lines)
    for key in (
        "model:",
        "trian:",
        "task.kind",
        "task.sequnce",
        "train.global_batch",
        "train.steps",
        "train.seed",
        "train.sharding",
        "optimizer.betas",
        "optimizer.learning_rate",
        "goal.minimise",
        "goal.deadline_hours",
        "sync.method",
    ):
        assert any(key in line for line in lines), key
    assert any("trian" in line and "nearest valid: train" in line for line in lines)
    assert any("sequnce" in line and "nearest valid: sequence" in line for line in lines)
    assert any("steps" in line and "nearest valid: 1" in line for line in lines)


def test_a_misspelt_table_of_a_method_is_told_the_right_one():
    with pytest.raises(InputError) as refused:
        parse_run({"model": {"preset": "gpt-1m"}, "lroa": {"rank": 4}}, "RUN.toml")
    assert str(refused.value) == "RUN.toml: lroa: unknown table (nearest valid: lora)"


def test_mistakes_of_methods_are_listed_behind_those_of_other_tables():
    tables = {"lroa": {"rank": 4}, "clip": 3, "train": {"stpes": 3}, "methods": [1]}
    with pytest.raises(InputError) as refused:
        parse_run({"model": {"preset": "gpt-1m"}, **tables}, "RUN.toml")
    assert [line.removeprefix("RUN.toml: ").split(";")[0] for line in str(refused.value).splitlines()] == [
        "train.stpes: unknown key",
        "methods: [1]: must be a table",
        "clip: 3: must be a table",
        "lroa: unknown table (nearest valid: lora)",
    ]


@given(asked=st.integers(0, 30), steps=st.integers(1, 30))
def test_a_chosen_warm_up_that_the_run_does_not_end_is_told(asked, steps):
    run = parse_run({**LEAST, "train": {"steps": steps}, "optimizer": {"warm_up_steps": asked}})
    assert len(run.warnings) == (asked > steps and asked != 10)
    assert parse_run(parse_toml(run.to_toml(), "run")).warnings == run.warnings
    assert parse_run({**LEAST, "train": {"steps": steps}}).warnings == ()


@pytest.mark.parametrize(
    "model", [{}, {"preset": "a", "hf": "b"}, {"build": "no-colon"}, {"preset": ""}, {"preset": 3}]
)
def test_a_model_is_given_in_exactly_one_way(model):
    with pytest.raises(InputError):
        parse_run({"model": model})


@pytest.mark.parametrize(("batch", "near"), [(31, 32), (33, 32), (3, 8), (37, 40)])
def test_an_indivisible_batch_gets_the_nearest(batch, near):
    record = {**LEAST, "train": {"global_batch": batch}, "plan": {"micro_batch_size": 4, "dp": 2}}
    with pytest.raises(InputError, match=f"nearest valid: {near}"):
        parse_run(record)


def test_broken_toml_names_the_line(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('[model]\npreset = "gpt-1m"\nsteps = = 3\n')
    with pytest.raises(InputError, match="line 3") as refused:
        load_run(path)
    assert len(refused.value.violations) == 1


@pytest.mark.parametrize("content", [b"\xff\xfe", b"[" * 10000, b"a = " + b"[" * 10000, b"a=" + b"9" * 5000])
def test_what_is_not_a_text_file_of_tables_is_refused(tmp_path, content):
    path = tmp_path / "run.toml"
    path.write_bytes(content)
    with pytest.raises(InputError):
        load_run(path)


@pytest.mark.parametrize("name", [".", "missing.toml", "nul\0byte", "x" * 5000])
def test_what_is_not_a_file_is_refused(tmp_path, name):
    with pytest.raises(InputError) as refused:
        load_run(f"{tmp_path}/{name}")
    assert len(refused.value.violations) == 1


def test_paths_beside_the_file_become_absolute_and_the_rest_stays(tmp_path):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "one.txt").write_text("text")
    (tmp_path / "cluster.toml").write_text("")
    path = tmp_path / "run.toml"
    path.write_text('[model]\nhf = "texts"\n[task]\ndata = "texts/*.txt"\n[cluster]\nuse = "cluster.toml"\n')
    run = load_run(path)
    assert run.model.hf == str(tmp_path / "texts")
    assert run.task.data == str(tmp_path / "texts/*.txt")
    assert run.cluster.use == str(tmp_path / "cluster.toml")
    path.write_text('[model]\npreset = "texts"\n[task]\ndata = "other/*"\n[cluster]\nuse = "8xl4"\n')
    run = load_run(path)
    assert (run.model.preset, run.task.data, run.cluster.use) == ("texts", "other/*", "8xl4")
