"""Commands answer in text and in JSON; users' mistakes end in one line each and exit code 2."""

import json
import re
import subprocess
import sys

import pytest
from installing import install_method

from weft.cli.files import json_schema
from weft.cli.main import app, run
from weft.describe.plan_file import load_plan
from weft.planning.planned import DEFAULT_PLANNER
from weft.planning.planners import PLANNERS

RUN = """
[model]
preset = "gpt-1m"
[task]
sequence = 64
[train]
global_batch = 8
[cluster]
use = "4xa100-80gb"
"""


pytestmark = pytest.mark.usefixtures("own_home")


@pytest.fixture
def run_toml(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(RUN)
    return path


def answer(capsys, *arguments):
    assert run([str(argument) for argument in arguments]) == 0
    return capsys.readouterr().out


def refusal(capsys, *arguments):
    assert run([str(argument) for argument in arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err
    lines = captured.err.splitlines()
    assert all(line.startswith("weft: ") for line in lines)
    return lines


def test_plan_of_a_preset_ranks_layouts_with_reasons(capsys):
    record = json.loads(answer(capsys, "plan", "llama-1b", "--on", "8xa100-80gb", "--json"))
    best = record["candidates"][0]
    assert best["verdict"] == "fits"
    assert best["step_low_s"] < best["step_s"] < best["step_high_s"]
    assert all(candidate["reason"] for candidate in record["candidates"])


def test_plan_shows_a_table_with_memory(capsys, run_toml):
    text = answer(capsys, "plan", run_toml)
    assert "why it stands here" not in text
    assert "of 85.9 GB" in text
    text = answer(capsys, "plan", run_toml, "--all")
    assert "why it stands here" in text
    assert "\n12  " in text
    assert "\n3  " in answer(capsys, "plan", run_toml, "--top", "3")
    (line,) = refusal(capsys, "plan", run_toml, "--top", "0")
    assert "--top: 0: a list has at least one candidate" in line


def test_plan_says_what_the_contract_keeps_out(capsys, run_toml, weft_example):
    kept_out = json.loads(answer(capsys, "plan", run_toml, "--json"))["kept_out"]
    assert kept_out["schedule in-twos"] == "unbiased"
    text = " ".join(answer(capsys, "plan", run_toml).split())
    assert "not within the contract exact: schedule in-twos (unbiased)" in text
    run_toml.write_text(RUN + '[goal]\ncontract = "empirical"\n')
    assert json.loads(answer(capsys, "plan", run_toml, "--json"))["kept_out"] == {}


def test_a_method_of_others_that_fails_is_told_in_one_line(capsys, run_toml, packages):
    pure = (
        "from weft.bundles import Bundle\n"
        "from weft.program.passes import Pass\n"
        "def apply(pipeline, layout, options):\n"
        "    return pipeline.columns.ranks\n"
        "BUNDLE = Bundle(name='other', parts=(Pass(name='other', options=lambda *_: 1, apply=apply),))\n"
    )
    install_method(packages, "weft_other", "other", pure, "")
    assert run(["plan", str(run_toml)]) == 1
    assert capsys.readouterr().err == (
        "weft: weft_other, line 4, fails: AttributeError: 'Columns' object has no attribute 'ranks'\n"
    )


def test_a_pin_that_keeps_less_than_the_goal_is_refused(capsys, run_toml, tmp_path, weft_example):
    run_toml.write_text(RUN + '[sync]\nmethod = "rounded"\n')
    reason = "goal.contract: 'exact' keeps out sync.method 'rounded', which is empirical"
    for command in (("plan",), ("simulate",), ("train", "--directory", tmp_path / "run")):
        [line] = refusal(capsys, command[0], run_toml, *command[1:])
        assert line == f"weft: {reason} (nearest valid: empirical)"
    assert not (tmp_path / "run").exists()
    assert run(["check", str(run_toml)]) == 2
    assert reason in capsys.readouterr().out


def test_plan_options_pin_decisions(capsys, run_toml):
    record = json.loads(answer(capsys, "plan", run_toml, "--pp", "2", "--schedule", "gpipe", "--json"))
    assert {(item["pp"], item["schedule"]) for item in record["candidates"]} == {(2, "gpipe")}


def test_plan_takes_tensor_ranks_sharding_and_recomputation(capsys, run_toml):
    pins = ("--tp", "2", "--sharding", "zero-1", "--recompute", "full")
    record = json.loads(answer(capsys, "plan", run_toml, *pins, "--json"))
    given = {(item["tp"], item["sharding"], item["recompute"]) for item in record["candidates"]}
    assert given == {(2, "zero-1", "full")}
    assert record["candidates"][0]["verdict"] == "fits"


def test_plan_takes_the_recomputation_of_each_stage(capsys, run_toml):
    record = json.loads(answer(capsys, "plan", run_toml, "--pp", "2", "--recompute", "full,none", "--json"))
    assert {(item["pp"], item["loops"]) for item in record["candidates"]} == {(2, 1)}
    assert {tuple(item["recompute_per_stage"]) for item in record["candidates"]} == {("full", "none")}
    assert "recompute full in stage 0" in record["candidates"][0]["layout"]


def test_plan_takes_context_ranks(capsys, run_toml):
    for tp in (1, 2):
        record = json.loads(answer(capsys, "plan", run_toml, "--cp", "2", "--tp", tp, "--json"))
        assert {(item["cp"], item["tp"]) for item in record["candidates"]} == {(2, tp)}
        assert record["candidates"][0]["verdict"] == "fits"


@pytest.mark.parametrize(
    ("model", "pins", "reason"),
    [
        (
            "gpt2",
            ("--cp", "3", "--tp", "1"),
            "cp 3: sequence 1024 is not a multiple of 2 x cp = 6; nearest sequence: 1020",
        ),
        (
            "gpt2",
            ("--cp", "3", "--tp", "2"),
            "cp 3: sequence 1024 is not a multiple of 2 x cp = 6; nearest sequence: 1020",
        ),
        (
            "vit-base",
            ("--cp", "2", "--tp", "1"),
            "cp 2: no ranks can divide the tokens of this model; nearest cp: 1",
        ),
    ],
)
def test_tokens_that_cannot_be_divided_are_refused(capsys, model, pins, reason):
    options = ("--on", "8xa100-80gb", "--global-batch", "12", "--pp", "1", "--dp", "1")
    for line in refusal(capsys, "plan", model, *options, *pins):
        assert line.endswith(reason)


def test_plan_takes_islands(capsys):
    pins = ("--sharding", "zero-3", "--island", "8", "--pp", "1", "--tp", "1", "--top", "1")
    shown = answer(capsys, "plan", "gpt2", "--on", "16xa100-80gb", "--global-batch", "32", *pins)
    assert "zero-3 in islands of 8" in " ".join(shown.split())


def test_a_plan_that_the_runtime_does_not_execute_starts_nothing(capsys, run_toml, tmp_path):
    norms = 'precision = "fp16"\n[report]\nmicro_batch_norms = true\n[cluster]'
    run_toml.write_text(RUN.replace("[cluster]", norms))
    [line] = refusal(capsys, "train", run_toml, "--directory", tmp_path / "run")
    assert "not supported by this runtime yet" in line
    assert not (tmp_path / "run").exists()


def test_layers_that_cannot_be_divided_are_refused_before_any_process(capsys, run_toml, tmp_path):
    run_toml.write_text(RUN + "[plan]\npp = 1\ndp = 1\ntp = 3\n")
    for command in (("plan",), ("train", "--directory", tmp_path / "run")):
        lines = refusal(capsys, command[0], run_toml, *command[1:])
        reason = "tp 3 does not divide 4 heads, 512 feed-forward columns; nearest tp: 2"
        assert {line.rpartition(": tp 3")[2] for line in lines} == {reason.removeprefix("tp 3")}
    assert not (tmp_path / "run").exists()


def test_a_plan_file_can_be_written_checked_and_simulated(capsys, run_toml, tmp_path):
    plan = tmp_path / "plan.json"
    answer(capsys, "plan", run_toml, "--out", plan)
    assert "good" in answer(capsys, "check", plan)
    record = json.loads(answer(capsys, "simulate", plan, "--json"))
    assert record["step_s"] > 0
    assert record["plan_id"] == json.loads(plan.read_text())["plan_id"]


def test_an_edited_plan_is_verified(capsys, run_toml, tmp_path):
    plan = tmp_path / "plan.json"
    answer(capsys, "plan", run_toml, "--out", plan)
    record = json.loads(plan.read_text())
    record["stages"][0]["layers"] = record["stages"][0]["layers"][1:]
    plan.write_text(json.dumps(record))
    assert "layer" in refusal(capsys, "simulate", plan)[0]


def test_simulate_gives_the_figures_of_the_contract(capsys, run_toml):
    record = json.loads(answer(capsys, "simulate", run_toml, "--json"))
    for key in ("step_s", "first_step_s", "bubble_fraction", "peak_bytes", "gathers", "reduces", "breakdown"):
        assert key in record
    assert len(record["peak_bytes"]) == len(record["peak_instruction"])


def test_simulate_more_ranks_than_there_are(capsys, run_toml):
    record = json.loads(answer(capsys, "simulate", run_toml, "--ranks", "8", "--json"))
    assert len(record["peak_bytes"]) == 8


def test_schedule_gives_the_closed_form(capsys):
    words = ("schedule", "breadth-first", "--ranks", 4, "--loops", 2, "--micro-batches", 8, "--json")
    record = json.loads(answer(capsys, *words))
    assert record["bubble_overhead"] == pytest.approx(3 / (8 * 2))
    assert record["peak_in_flight"] == [16] * 4


def test_schedule_leaves_the_backwards_of_frozen_stages_out(capsys):
    words = ("schedule", "1f1b", "--ranks", 4, "--micro-batches", 8, "--frozen-stages")
    record = json.loads(answer(capsys, *words, 2, "--json"))
    assert record["peak_in_flight"] == [0, 0, 2, 1]
    assert record["breakdown"]["backward"] == record["breakdown"]["forward"]
    assert refusal(capsys, *words, 4) == [
        "weft: frozen stages: 4 is not one of 0..3; one stage must train (nearest valid: 3)"
    ]


def test_schedule_refuses_at_once_what_is_too_long_to_draw(capsys, monkeypatch):
    monkeypatch.setattr("weft.cli.schedules.simulate_schedule", None)
    (line,) = refusal(capsys, "schedule", "gpipe", "--ranks", 100_000, "--micro-batches", 8)
    assert line.startswith("weft: --ranks: 800,000 forward passes")
    assert line.endswith("(nearest valid: 8192)")


def test_schedule_draws_two_paths(capsys):
    words = ("schedule", "chimera", "--ranks", 4, "--micro-batches")
    record = json.loads(answer(capsys, *words, 4, "--json"))
    assert record["makespan_s"] == 16
    assert record["peak_in_flight"] == [3, 4, 4, 3]
    assert "nearest: 8 micro-batches" in refusal(capsys, *words, 9)[0]


def test_schedule_takes_the_options_of_the_schedules(capsys):
    words = ("schedule", "--ranks", 4, "--loops", 2, "--micro-batches", 8, "--json")
    grouped = json.loads(answer(capsys, *words, "depth-first", "--group-size", 8))
    assert grouped["peak_in_flight"] == [15, 13, 11, 9]
    rounds = json.loads(answer(capsys, *words, "hybrid", "--depth", 2))
    assert rounds["bubble_overhead"] == pytest.approx(2 * 3 / (8 * 2))
    diamond = ("schedule", "graph-1f1b", "--edges", "0-1,0-2,1-3,2-3", "--ranks", 4, "--json")
    for k, kept in ((1, [3, 2, 2, 1]), (2, [6, 4, 4, 2])):
        assert json.loads(answer(capsys, *diamond, "--k", k))["peak_in_flight"] == kept
    split = json.loads(answer(capsys, *words, "zb-v", "--weight-share", 0.4))
    assert split["makespan_s"] == pytest.approx(25.8)


def test_schedule_reads_stage_times_and_dumps(capsys, tmp_path):
    path = tmp_path / "stages.csv"
    path.write_text("forward,backward\n1,2\n1,2\n3,3\n")
    words = ("schedule", "breadth-first", "--ranks", 2, "--micro-batches", 4, "--stage-times", path)
    record = json.loads(answer(capsys, *words, "--json", "--dump"))
    assert record["breakdown"]["forward"] == pytest.approx(4 * 5)
    forwards = [row for row in record["instructions"] if row["kind"] == "forward"]
    assert sorted({row["stage"] for row in forwards}) == [0, 1, 2]
    assert "receive_activation" in answer(capsys, *words, "--dump")
    assert "loops" in refusal(capsys, *words, "--loops", 2)[0]


def test_schedule_draws_an_svg(capsys, tmp_path):
    path = tmp_path / "picture.svg"
    answer(capsys, "show", "schedule", "gpipe", "--svg", path)
    assert path.read_text().startswith("<svg")


def test_a_plan_file_and_a_run_file_are_shown_whole(capsys, tmp_path, run_toml):
    plan, page, picture = tmp_path / "plan.json", tmp_path / "plan.html", tmp_path / "step.svg"
    answer(capsys, "plan", run_toml, "--out", plan)
    text = answer(capsys, "show", plan, "--report", page, "--svg", picture)
    head = json.loads(plan.read_text())
    assert f"on {head['cluster']}, plan {load_plan(plan).plan_id}" in text
    assert "1 node of 4 a100-80gb" in text
    assert "embedding ..." in text
    assert "F forward" in text
    assert page.read_text().startswith("<!doctype html>")
    assert picture.read_text().startswith("<svg")
    assert answer(capsys, "show", run_toml) == text.split("wrote ")[0]


def test_init_writes_a_run_file_that_checks_and_never_overwrites(capsys, tmp_path):
    path = tmp_path / "new.toml"
    answer(capsys, "init", path)
    assert "good" in answer(capsys, "check", path)
    before = path.read_bytes()
    assert "exists already" in refusal(capsys, "init", path)[0]
    assert path.read_bytes() == before


@pytest.mark.parametrize("kind", ["run", "cluster", "plan", "summary"])
def test_schema_prints_the_schema_that_validates(capsys, kind):
    assert json.loads(answer(capsys, "schema", kind)) == json.loads(json.dumps(json_schema(kind)))


def test_check_says_everything_at_once(capsys, tmp_path):
    path = tmp_path / "bad.toml"
    path.write_text('[model]\npresett = "gpt-1m"\n[train]\nstps = 3\nprecision = "fp31"\n')
    assert run(["check", str(path)]) == 2
    text = capsys.readouterr().out
    assert "preset" in text
    assert "steps" in text
    assert "fp31" in text


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("plan", "llama-13c"), "llama-13b"),
        (("plan", "llama-13b", "--on", "64xa100-81gb"), "a100-80gb"),
        (("plan", "llama-13b", "--on", "64xa100-80gb", "--schedule", "1f1c"), "1f1b"),
        (("plan", "llama-13b", "--on", "64xa100-80gb", "--micro-batch-size", "0"), "micro_batch_size"),
        (("plan", "llama-13b", "--on", "64xa100-80gb", "--sharding", "zero-4"), "zero-3"),
        (("plan", "llama-13b", "--on", "64xa100-80gb", "--recompute", "half"), "full"),
        (("plan", "llama-13b", "--on", "8xa100-80gb", "--recompute", "full,half"), "for stage 1"),
        (
            ("plan", "gpt2", "--on", "4xa100-80gb", "--recompute", "full,none,none"),
            "no layout of all 4 devices in nodes of 4 has recompute full none none",
        ),
        (("plan", "gpt2", "--on", "16xa100-80gb", "--dp", "16", "--island", "3"), "nearest island: 2"),
        (
            ("plan", "llama-13b", "--on", "64xa100-80gb", "--tp", "7", "--pp", "1", "--dp", "1"),
            "nearest tp: 8",
        ),
        (("plan", "llama-7b", "--on", "1xt4"), "no layout fits"),
        (
            ("plan", "gpt-52b", "--on", "64xv100-32gb", "--tp", "3"),
            "no layout of all 64 devices in nodes of 8 has tp 3",
        ),
        (("plan", "missing.toml"), "missing.toml"),
        (("plan", "gpt-1m", "--on", "missing-cluster.toml"), "missing-cluster.toml"),
        (("plan", "gpt-1m", "--on", "4xv100-16gb", "--precision", "bf16"), "bf16"),
        (("schedule", "gpipe", "--loops", "2"), "gpipe"),
        (("schedule", "gpipe", "--ranks", "0"), "ranks"),
        (("schedule", "gpipe", "--depth", "2"), "no such option"),
        (("schedule", "depth-first", "--loops", "2", "--micro-batches", "6"), "group_size: 6"),
        (("schedule", "zb-v", "--weight-share", "1.5"), "weight share"),
        (("schedule", "graph-1f1b", "--edges", "0-1,2"), "'2' is no edge of two stages"),
        (("schedule", "graph-1f1b", "--edges", "0-1,3-2"), "edge (3, 2) must go from a stage to a later one"),
        (("schedule", "zb-v", "--loops", "2", "--stage-times", "missing.csv"), "missing.csv"),
        (("schedule", "gpipe", "--ranks", "many"), "many"),
        (("show", "schedule"), "which one"),
        (("show", "/nowhere"), "nowhere"),
        (("show", "schedule", "gpipe", "--report", "page.html"), "--report: a schedule alone has no model"),
        (("show", "schedule", "gpipe", "--on", "8xt4"), "--on: a schedule alone has no model"),
        (("show", "plan.json", "extra"), "NAME: only with the word schedule"),
        (("show", "plan.json", "--micro-batches", "4"), "--micro-batches: only with the word schedule"),
        (("simulate", "/nowhere/plan.json"), "plan.json"),
        (("train", "/nowhere/run.toml"), "nowhere"),
        (("compare", "/nowhere"), "not a run directory"),
        (("runs", __file__), "a file, not a folder of runs"),
        (("watch", __file__), "a file, not a run directory"),
        (("check",), "no file"),
        (("measure", "gpt-1n"), "gpt-1m"),
        (("fly",), "fly"),
        (("plan", "gpt-1m", "--fast"), "--fast"),
    ],
)
def test_a_mistake_is_one_clear_line(capsys, arguments, expected):
    assert any(expected in line for line in refusal(capsys, *arguments))


def test_a_deadline_that_no_plan_meets_is_refused_with_the_time_needed(capsys, run_toml):
    run_toml.write_text(RUN + "[goal]\ndeadline_hours = 1e-9\n")
    (line,) = refusal(capsys, "plan", run_toml)
    assert "goal.deadline_hours" in line
    assert "hours" in line
    run_toml.write_text(RUN + "[goal]\ndeadline_hours = 100\n")
    assert "simulated and fitting" in " ".join(answer(capsys, "plan", run_toml).split())


def test_every_command_has_help_with_an_example(capsys):
    for name in [name for name in app if not name.startswith("-")]:
        assert run([name, "--help"]) == 0
        text = capsys.readouterr().out
        assert "Usage" in text
        if name in {"init", "doctor", "measure", "plan", "show", "simulate", "schedule", "check", "train"}:
            assert f"\u2022 weft {name}" in text


def test_the_help_of_plan_names_every_planner(capsys):
    assert run(["plan", "--help-all"]) == 0
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    found = re.search(r"The planner of the search: ([^.]+)\. By placing single layers: ([^.]+)\.", text)
    assert found is not None
    names = re.split(r", | or ", f"{found[1]}, {found[2]}")
    assert f"{DEFAULT_PLANNER} (default)" in names
    assert {name.removesuffix(" (default)") for name in names} == set(PLANNERS)


def test_importing_weft_is_light():
    code = (
        "import sys, weft; loaded = set(sys.modules); "
        "assert not loaded & {'torch', 'numpy', 'numba', 'pyarrow', 'pydantic'}, loaded; "
        "from weft.cli.main import app; assert 'numpy' not in sys.modules; app.resolved_commands(); "
        "assert 'weft.cli.plans' in sys.modules; "
        "assert 'torch' not in sys.modules and 'numba' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_list_of_commands_has_a_line_for_each(capsys):
    for words in ([], ["--help"], ["-h"]):
        assert run(words) == 0
        listed = re.findall(r"^(\w+) {2,}(\S.*)$", capsys.readouterr().out, re.MULTILINE)
        assert {name for name, _ in listed} >= {
            name for name in app.resolved_commands() if not name.startswith("-")
        }


def test_without_torch_a_run_is_refused_before_anything_is_written(capsys, run_toml, tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (line,) = refusal(capsys, "train", run_toml, "--directory", tmp_path / "run")
    assert 'pip install ".[torch]"' in line
    assert not (tmp_path / "run").exists()


def test_the_doctor_keeps_the_brackets_of_a_remedy(capsys, monkeypatch):
    from importlib.metadata import PackageNotFoundError

    def missing(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr("weft.capture.doctor.version", missing)
    assert run(["doctor"]) == 1
    assert '".[torch]"' in capsys.readouterr().out


def test_a_word_too_many_is_named(capsys):
    assert refusal(capsys, "watch", "runs/one", "runs/two") == ["weft: this command takes no runs/two"]
