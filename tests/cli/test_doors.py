"""`weft plan --emit` and `weft explain`: answers in text and JSON, refusals in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from doors.job_traces import even, slowed

from weft.cli.main import run

PLAN = ("plan", "gpt2", "--on", "4xa100-80gb", "--global-batch", "16", "--pp", "2", "--dp", "2", "--tp", "1")
DEEPSPEED = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 2,
    "bf16": {"enabled": True},
    "fp16": {"enabled": True},
    "zero_optimization": {"stage": 1},
}


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def deepspeed(tmp_path: Path) -> Path:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(DEEPSPEED))
    return path


def lines_of_refusal(capsys: pytest.CaptureFixture[str], *arguments: object) -> list[str]:
    assert run([str(argument) for argument in arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err.splitlines()


def test_a_plan_is_written_for_another_stack_and_losses_are_said(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "train.sh"
    assert run([*PLAN, "--schedule", "gpipe", "--emit", "megatron", "--out", str(path)]) == 0
    captured = capsys.readouterr()
    assert captured.out == f"wrote {path}\n"
    loss = "lost: schedule gpipe, which Megatron-LM does not have; nearest: 1f1b"
    first, second, last = captured.err.splitlines()
    assert (first, last) == (f"weft: {loss}", f"start: bash {path}")
    assert second.startswith("weft: as written, a step is predicted to take ")
    assert "; the plan's takes " in second
    text = path.read_text()
    assert f"# start: bash {path}\n" in text
    assert f"# {loss}\n" in text


def test_without_a_file_the_text_is_the_answer(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*PLAN, "--emit", "deepspeed"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["pipeline"]["stages"] == 2


def test_everything_is_in_the_json_answer(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*PLAN, "--schedule", "gpipe", "--emit", "accelerate", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["stack"] == "accelerate"
    assert record["launch"].startswith("accelerate launch --config_file accelerate.yaml ")
    assert {"what": "schedule gpipe, which the plugin does not have", "nearest": "1f1b"} in record["losses"]


def test_what_is_written_may_need_more_than_devices_have(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--pp", "4", "--dp", "8", "--tp", "1", "--micro-batch-size", "1", "--global-batch", "32")
    words += (
        "--sharding",
        "zero-3",
        "--recompute",
        "full",
        "--schedule",
        "breadth-first",
        "--sequence",
        "512",
    )
    assert run(["plan", "llama-65b", "--on", "32xa100-80gb", *words, "--emit", "deepspeed"]) == 0
    line = next(line for line in capsys.readouterr().err.splitlines() if "as written" in line)
    assert " more than the fullest device has; the plan's takes " in line


def test_an_unknown_stack_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    [line] = lines_of_refusal(capsys, *PLAN, "--emit", "slrm")
    assert line.endswith("(nearest valid: slurm)")


def test_a_plan_that_the_runtime_does_not_execute_is_not_written_for_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    [line] = lines_of_refusal(capsys, *PLAN, "--blocking", "messages", "--emit", "slurm")
    assert line.endswith("blocking messages is not supported by this runtime yet (nearest valid: overlapped)")


def test_a_plan_in_fp16_waits_for_the_norm_of_the_gradient(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*PLAN, "--precision", "fp16", "--emit", "slurm"]) == 0
    assert '"name": "gradient-norm"' in capsys.readouterr().out


def test_a_curve_is_not_written_for_another_stack(capsys: pytest.CaptureFixture[str]) -> None:
    [line] = lines_of_refusal(capsys, "plan", "gpt2", "--on", "4xa100-80gb", "--curve", "--emit", "slurm")
    assert line.startswith("weft: --emit: not with --curve")


def test_a_file_is_explained(capsys: pytest.CaptureFixture[str], deepspeed: Path) -> None:
    assert run(["explain", str(deepspeed), "--model", "gpt2", "--on", "4xa100-80gb"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("DeepSpeed\nlayout: devices 4, dp 4, loops 1, micro batch size 1, schedule 1f1b, ")
    assert (
        "wrong: fp16.enabled: bf16 and fp16 are both enabled; one is allowed (nearest valid: false)\n" in text
    )
    assert "assumed recompute none: " in text
    assert "this file  pp 1 x dp 4, 1f1b, micro-batch size 1, zero-1" in text
    assert "weft " in text
    assert " per step, by both predictions" in text or "weft would do no better" in text


def test_a_byte_order_mark_is_no_part_of_a_file(capsys: pytest.CaptureFixture[str], deepspeed: Path) -> None:
    deepspeed.write_text(deepspeed.read_text(encoding="utf-8"), encoding="utf-8-sig")
    assert run(["explain", str(deepspeed), "--model", "gpt2", "--on", "4xa100-80gb", "--no-search"]) == 0
    assert capsys.readouterr().out.startswith("DeepSpeed\n")


def test_a_file_is_explained_in_json(capsys: pytest.CaptureFixture[str], deepspeed: Path) -> None:
    words = ("--model", "gpt2", "--on", "4xa100-80gb", "--no-search", "--json")
    assert run(["explain", str(deepspeed), *words]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["findings"][0]["severity"] == "wrong"
    assert record["predicted"]["step_s"] > 0
    assert record["weft"] is None


def test_what_is_missing_is_asked_for(capsys: pytest.CaptureFixture[str], deepspeed: Path) -> None:
    assert run(["explain", str(deepspeed), "--on", "4xa100-80gb"]) == 0
    text = capsys.readouterr().out
    assert (
        "missing: DeepSpeed: the file does not say the model's sizes; give --model, a preset or a folder"
        in text
    )


@pytest.mark.parametrize(
    ("model", "devices", "verdict"),
    [
        ("llama-3-8b", "4xa100-80gb", "more than its fullest device has; weft's fits"),
        ("llama-65b", "2xt4", "no layout fits this cluster with this batch"),
    ],
)
def test_a_layout_that_does_not_fit(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, model: str, devices: str, verdict: str
) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"train_micro_batch_size_per_gpu": 1, "fp16": {"enabled": True}}))
    assert run(["explain", str(path), "--model", model, "--on", devices, "--sequence", "256"]) == 0
    assert capsys.readouterr().out.rstrip().endswith(verdict)
    assert run(["explain", str(path), "--model", model, "--on", devices, "--no-search"]) == 0
    assert capsys.readouterr().out.rstrip().endswith("more than its fullest device has")


def test_a_layout_that_cannot_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(DEEPSPEED | {"sequence_parallel_size": 2}))
    assert run(["explain", str(path), "--model", "gpt2", "--on", "4xa100-80gb", "--sequence", "1023"]) == 0
    assert capsys.readouterr().out.rstrip().endswith("this file's layout cannot run; weft's can")


def test_a_trace_is_explained(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    step = {
        "ph": "X",
        "cat": "user_annotation",
        "name": "ProfilerStep#3",
        "ts": 0,
        "dur": 10,
        "pid": 9,
        "tid": 9,
    }
    work = {"ph": "X", "cat": "kernel", "name": "sgemm", "ts": 0, "dur": 6, "pid": 0, "tid": 7}
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": [step, work]}))
    assert run(["explain", str(path)]) == 0
    text = capsys.readouterr().out
    assert text.startswith("trace of devices: 10.0 us\nbusy 60.0%, idle 40.0%, collectives 0.0%, ")
    assert "1 step; 3: 10.0 us\n" in text
    assert run(["explain", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["idle_share"] == pytest.approx(0.4)
    [line] = lines_of_refusal(capsys, "explain", path, "--model", "gpt2")
    assert line == f"weft: {path}: a trace is measured and needs no options; leave them out"


def test_other_files_are_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"\xff\xfe")
    assert lines_of_refusal(capsys, "explain", path) == [f"weft: {path}: not UTF-8 text (byte 0)"]
    path.write_text("hello")
    [line] = lines_of_refusal(capsys, "explain", path)
    assert line.startswith(f"weft: {path}: not recognised; can be read: ")
    assert lines_of_refusal(capsys, "explain", tmp_path / "none") == [
        f"weft: {tmp_path / 'none'}: no such file"
    ]


def test_a_job_that_weft_does_not_model_gets_no_verdict(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "qlora.yml"
    path.write_text(
        "base_model: gpt2\nadapter: qlora\nload_in_4bit: true\nmicro_batch_size: 1\nsequence_len: 256\n"
    )
    assert run(["explain", str(path), "--on", "4xa100-80gb"]) == 0
    out = capsys.readouterr().out
    assert "not comparable: adapter qlora" in out
    assert "nothing wrong was found in the rest" in out
    assert "without these" in out
    for verdict in ("weft's plan", "weft would", "faster", "fits"):
        assert verdict not in out


@pytest.fixture
def job_trace(tmp_path: Path) -> Path:
    path = tmp_path / "job.parquet"
    pq.write_table(pa.table(dict(slowed(even(), 1.5, stage=3))), path)
    return path


def test_the_trace_of_a_job_is_explained(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, job_trace: Path
) -> None:
    page = tmp_path / "job.html"
    assert run(["explain", str(job_trace), "--report", str(page)]) == 0
    text = capsys.readouterr().out
    assert text.startswith("trace of a job: 4 stages, 2 replicas, 8 ranks, order 1f1b; 3 steps of ")
    assert "stage 3, which has the loss: 45.0 ms forward and backward" in text
    assert "Give it fewer layers" in page.read_text()
    assert run(["explain", str(job_trace), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert max(record["by_stage"], key=record["by_stage"].get) == "3"
    assert len(record["says"]) == 2


def test_the_simulator_is_scored_on_a_trace(capsys: pytest.CaptureFixture[str], job_trace: Path) -> None:
    assert run(["score", "--trace", str(job_trace), "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)["trace"]
    assert figures["own times of the step"]["n"] == 3
    assert figures["own times of the step"]["max_ape"] < 1e-6
    assert run(["score", "--trace", str(job_trace)]) == 0
    assert "own times of the step" in capsys.readouterr().out


def test_options_that_say_nothing_of_a_trace_are_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, deepspeed: Path, job_trace: Path
) -> None:
    [line] = lines_of_refusal(capsys, "explain", job_trace, "--model", "gpt2")
    assert line == f"weft: {job_trace}: a trace is measured and needs no options; leave them out"
    [line] = lines_of_refusal(capsys, "explain", deepspeed, "--report", tmp_path / "page.html")
    assert line == f"weft: {deepspeed}: not the trace of a job; only these have a page"
    [line] = lines_of_refusal(capsys, "score", "--trace", job_trace, "--cluster", "8xa100-80gb")
    assert line.startswith("weft: --cluster: not with --trace")
    [line] = lines_of_refusal(capsys, "score", "--ledger", "--cluster", "8xt4")
    assert line == "weft: --cluster: only with a CSV file"
    [line] = lines_of_refusal(capsys, "score", "--trace", deepspeed)
    assert line.startswith(f"weft: {deepspeed}: no trace of a job")
    assert lines_of_refusal(capsys, "score", "--ledger", "--trace", job_trace) == [
        "weft: score: give one of a CSV file, --ledger and --trace"
    ]
