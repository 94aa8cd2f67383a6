"""Plans are compared with plans, with themselves elsewhere, and with runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import weft
from weft.cli.main import run


def saved(path: Path, on: str = "4xa100-80gb", **pins: int) -> Path:
    return weft.plan(model="gpt-1m", on=on, global_batch=16, **pins).save(path)


def answer(capsys: pytest.CaptureFixture[str], *words: object) -> dict:
    assert run([*(str(word) for word in words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refusal(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert run([str(word) for word in words]) == 2
    [line] = capsys.readouterr().err.splitlines()
    return line


def test_two_plans_stand_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = saved(tmp_path / "a.json", pp=1), saved(tmp_path / "b.json", pp=4)
    found = answer(capsys, "compare", first, second)
    one, two = found["plans"]
    assert found["step_ratio"] == two["step_s"] / one["step_s"]
    for side in (one, two):
        assert sum(side["breakdown"].values()) == pytest.approx(side["step_s"], rel=1e-6)
    assert one["layout"] != two["layout"]
    assert run(["compare", str(first), str(second)]) == 0
    table = capsys.readouterr().out
    assert "time of a step" in table
    assert "chance to fit" in table


def test_a_plan_is_compared_with_itself_elsewhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = saved(tmp_path / "a.json")
    found = answer(capsys, "compare", plan, "--on", "4xh100-80gb")
    one, two = found["plans"]
    assert (one["cluster"], two["cluster"]) == ("4xa100-80gb", "4xh100-80gb")
    assert one["layout"] == two["layout"]
    assert found["step_ratio"] < 1.0
    same = answer(capsys, "compare", plan, plan)
    assert same["step_ratio"] == 1.0
    assert same["plans"][0] == same["plans"][1]


def test_what_cannot_be_compared_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = saved(tmp_path / "a.json")
    assert "with what?" in refusal(capsys, "compare", plan)
    assert "only with plans" in refusal(capsys, "compare", tmp_path, "--on", "1xt4")
    assert "not a run directory" in refusal(capsys, "compare", plan, tmp_path)


def test_plans_and_run_files_need_no_usual_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = saved(tmp_path / "a.json", pp=1).rename(tmp_path / "kept")
    assert answer(capsys, "simulate", plan)["step_s"] > 0
    assert answer(capsys, "compare", plan, plan)
    (tmp_path / "mine").write_text('[model]\npreset = "gpt-1m"\n[cluster]\nuse = "2xa100-80gb"\n')
    assert answer(capsys, "plan", tmp_path / "mine")
    assert answer(capsys, "simulate", tmp_path / "mine")["step_s"] > 0
    (tmp_path / "notes").write_text("dear diary")
    for command in ("plan", "simulate", "show", "train"):
        assert "neither TOML, as run files, nor a JSON object" in refusal(capsys, command, tmp_path / "notes")


def test_the_fullest_rank_uses_the_largest_share_of_its_memory() -> None:
    most = []
    for cluster in ("2xa100-80gb+2xt4", "2xt4+2xa100-80gb"):
        job = weft.plan(model="gpt-1m", on=cluster, global_batch=16, planner="uniform", pp=2, dp=2).job
        peaks = job.predicted.prediction.peak_bytes
        shares = [peak / memory for peak, memory in zip(peaks, job.memory_bytes, strict=True)]
        assert shares[job.fullest_rank] == max(shares)
        most.append(peaks[job.fullest_rank] == max(peaks))
    # The other stage has more bytes on the larger device.
    assert not all(most)


def test_another_json_file_is_no_plan_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"model_type": "llama", "hidden_size": 8}')
    assert refusal(capsys, "simulate", path) == (
        f"weft: {path}: no plan file: it has neither plan_id, stages nor mesh"
    )
    path.write_text('{"layers": [], "edges": []}')
    assert refusal(capsys, "train", path).startswith(
        f"weft: {path}: a graph of layers, which weft plan takes"
    )


def test_a_stack_without_the_model_is_refused_before_the_search(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weft.cli.plans.planned_visibly", None)
    asked = ("plan", "bert-1m", "--on", "4xa100-80gb", "--emit")
    assert "files of Megatron-LM for models of gpt and llama" in refusal(capsys, *asked, "megatron")
    assert "files of torchtitan for models of llama" in refusal(capsys, *asked, "torchtitan-toml")
    assert "(nearest valid: megatron)" in refusal(capsys, *asked, "megatro")


@pytest.mark.parametrize("stack", ["megatron", "torchtitan", "accelerate", "slurm"])
def test_the_plan_of_a_file_is_written_as_after_its_search(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], stack: str
) -> None:
    path, asked = tmp_path / "kept", ("plan", "llama-1b", "--on", "4xa100-80gb", "--global-batch", "16")
    assert run([*asked, "--out", str(path)]) == 0
    capsys.readouterr()
    written = []
    for words in (asked, ("plan", str(path))):
        assert run([*words, "--emit", stack]) == 0
        written.append(capsys.readouterr())
    assert written[0] == written[1]
    assert "4xa100-80gb" in written[0].out


def test_a_plan_file_is_not_searched_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = saved(tmp_path / "a.json", pp=1)
    assert f"(nearest valid: weft show {path})" in refusal(capsys, "plan", path)
    line = f"weft: --tp: not with the plan of {path}, which is written as it is"
    assert refusal(capsys, "plan", path, "--emit", "megatron", "--tp", 2) == line
