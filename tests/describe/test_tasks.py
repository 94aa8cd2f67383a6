"""Which task trains which model, and on what when nobody says."""

from dataclasses import replace

import pytest
from described_decoders import described

from weft.describe.families.own import FAMILY
from weft.describe.models import PRESETS
from weft.describe.run_file import changed, load_run, naming, parse_run, run_of_keywords
from weft.describe.tasks import KNOWN_TASKS, default_task, packing_problems, task_problems
from weft.errors import InputError
from weft.planning.problem import problem_of_run


def test_a_tokenizer_of_images_is_refused() -> None:
    task = {"kind": "image-classification", "tokenizer": "tokenizer.json"}
    with pytest.raises(InputError, match=r"task: tokenizer: image-classification reads no text"):
        parse_run({"model": {"preset": "vit-digits"}, "task": task})


def test_every_preset_has_a_task_that_trains_it():
    for config in PRESETS.values():
        assert not task_problems(default_task(config), config)


@pytest.mark.parametrize("model", PRESETS)
def test_a_run_file_without_a_task_has_that_of_its_preset(model):
    kind = default_task(PRESETS[model])
    for task in ({}, {"task": {"sequence": 16}}):
        run = parse_run({"model": {"preset": model}, **task})
        assert (run.task.kind, run.task.data) == (kind, KNOWN_TASKS[kind].data)


def test_a_run_file_without_a_task_has_that_of_the_model_in_its_folder(tmp_path):
    described(tmp_path, "t5", d_model=32, d_ff=48, d_kv=8, num_layers=2, num_heads=4)
    (tmp_path / "run.toml").write_text('[model]\nhf = "config.json"')
    task = load_run(tmp_path / "run.toml").task
    assert (task.kind, task.data) == ("sequence-to-sequence", "synthetic")


@pytest.mark.parametrize("kind", KNOWN_TASKS)
@pytest.mark.parametrize("model", ["gpt-1m", "llama-1m", "bert-1m", "vit-digits", "resnet-tiny"])
def test_a_task_that_cannot_train_the_model_is_refused_with_the_one_that_can(kind, model):
    run = parse_run({"model": {"preset": model}, "task": {"kind": kind, "data": "mine"}})
    if PRESETS[model].family in KNOWN_TASKS[kind].families:
        assert problem_of_run(run).model.name == model
        return
    with pytest.raises(InputError, match=f"nearest valid: {default_task(PRESETS[model])}") as refused:
        problem_of_run(run)
    assert len(refused.value.violations) == 1


def test_a_task_of_ones_own_is_taken_at_its_word():
    assert not task_problems("package.module:Task", PRESETS["vit-digits"])


@pytest.mark.parametrize("kind", [kind for kind, task in KNOWN_TASKS.items() if task.data])
def test_data_left_out_is_the_tasks_default(kind):
    left_out = parse_run({"model": {"preset": "gpt-1m"}, "task": {"kind": kind}})
    assert left_out.task.data == KNOWN_TASKS[kind].data


@pytest.mark.parametrize("kind", KNOWN_TASKS)
def test_data_that_is_given_is_kept(kind):
    given = parse_run({"model": {"preset": "gpt-1m"}, "task": {"kind": kind, "data": "mine"}})
    assert given.task.data == "mine"


def test_an_unknown_task_is_refused_with_the_nearest():
    with pytest.raises(InputError, match="nearest valid: image-classification"):
        parse_run({"model": {"preset": "gpt-1m"}, "task": {"kind": "image-clasification"}})


def test_a_few_words_mean_the_models_own_task():
    run = run_of_keywords(
        model="vit-base", on="this-machine", global_batch=8, sequence=None, precision=None, pins={}
    )
    assert (run.task.kind, run.task.data) == ("image-classification", "digits")


@pytest.mark.parametrize("model", ["vit-digits", "gpt-1m", "dlrm-tiny"])
@pytest.mark.parametrize("other", ["vit-digits", "gpt-1m", "mmt-tiny"])
def test_a_task_that_nobody_chose_follows_the_model(model, other):
    run = naming(parse_run({"model": {"preset": model}}), model=other)
    own = default_task(PRESETS[other])
    assert (run.task.kind, run.task.data) == (own, KNOWN_TASKS[own].data)
    chosen = parse_run({"model": {"preset": model}, "task": {"kind": "causal-lm", "data": "mine"}})
    assert naming(chosen, model=other).task == chosen.task


def test_the_task_of_a_folder_follows_its_model_and_stays_unchosen(tmp_path, monkeypatch):
    for name, sizes in (("llama", {}), ("t5", {"d_model": 32, "d_ff": 48, "d_kv": 8, "num_layers": 2})):
        (tmp_path / name).mkdir()
        described(tmp_path / name, name, **sizes, num_heads=4)
    (tmp_path / "run.toml").write_text('[model]\nhf = "llama"\n[train]\nglobal_batch = 4\n')
    run = load_run(tmp_path / "run.toml")
    assert (run.task.kind, run.chose("task", "kind")) == ("causal-lm", False)
    monkeypatch.chdir(tmp_path)
    moved = naming(run, model="t5")
    assert (moved.task.kind, moved.task.data) == ("sequence-to-sequence", "synthetic")
    assert changed(moved, {"train": {"steps": 3}}).task == moved.task
    assert naming(parse_run({"model": {"preset": "gpt-1m"}}), model="t5").task == moved.task
    assert naming(moved, model="gpt-1m").task.kind == "causal-lm"
    chosen = parse_run({"model": {"preset": "gpt-1m"}, "task": {"kind": "causal-lm", "data": "mine"}})
    assert naming(chosen, model="t5").task == chosen.task


def test_attention_stays_inside_documents_in_all_models_but_ones_own(tmp_path):
    # Also of a decoder that is planned only.
    assert not packing_problems(described(tmp_path, "mixtral"))
    assert not packing_problems(PRESETS["gpt2"])
    [problem] = packing_problems(replace(PRESETS["gpt2"], family=FAMILY))
    assert str(problem).startswith("task.packing: gpt2 is a model of your own")
