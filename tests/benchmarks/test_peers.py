"""The command of the benchmark of peers; small scripts stand for them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.peer_programs.stand_ins import (
    ANSWER,
    FIRST,
    HEADING,
    SECOND,
    UNLIKE,
    calculon,
    metis,
    writing,
)

from benchmarks.peer_programs.command import run

pytestmark = pytest.mark.usefixtures("own_home")

SCRIPTS = Path(__file__).parents[2] / "benchmarks"
CLONES = ("WEFT_CALCULON", "WEFT_METIS")
EQUAL = ("gpt-1m", "--on", "4xa100-80gb", "--precision", "fp16", "--global-batch", "16")
MIXED = ("gpt-1m", "--on", "4xa100-80gb+4xt4", "--precision", "fp16", "--global-batch", "16")


def test_a_peers_step_and_peak_stand_beside_wefts(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    calculon(tmp_path, writing(ANSWER))
    asked = [*EQUAL, "--compare", "uniform,megatron", "--calculon", str(tmp_path)]
    assert run(asked) == 0
    shown = capsys.readouterr().out
    assert max(len(line) for line in shown.splitlines()) <= 80
    words = " ".join(shown.split())
    assert "step step peak peak weft calculon weft calculon plan, and remarks" in words
    assert "6.00 s" in words
    assert "12.0 GB" in words
    assert "simulated plans: too few to compare the order" in words
    assert "calculon leaves out: neither embeddings nor logits" in words
    assert run([*asked, "--json"]) == 0
    (told,) = json.loads(capsys.readouterr().out)["peers"]
    assert told["peer"] == "calculon"
    assert 0 < told["said"] <= told["asked"] == len(told["plans"])
    assert {name for plan in told["plans"] for name in plan["best_of"]} == {"uniform", "megatron"}
    said = next(plan for plan in told["plans"] if not plan["reason"])
    assert (said["peer_step_s"], said["peer_peak_bytes"]) == (6.0, 12e9)
    assert sum(said["peer_breakdown"].values()) == 6.0


def test_a_peer_that_plans_is_one_of_the_planners(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    metis(tmp_path, HEADING, FIRST, SECOND, UNLIKE)
    asked = [*MIXED, "--compare", "amp", "--metis", str(tmp_path)]
    assert run(asked) == 0
    words = " ".join(capsys.readouterr().out.split())
    assert "weft can say 2 of the first 3 plans of metis" in words
    assert (
        "not 1 of them: stages of one plan of weft have the same degrees over the 2 simulated ones:" in words
    )
    assert run([*asked, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    (order,) = told["peers"]
    assert (order["peer"], order["considered"], order["said"], order["simulated"]) == ("metis", 3, 2, 2)
    assert abs(order["spearman"]) == pytest.approx(1.0)
    found = next(one for one in told["answers"] if one["planner"] == "metis")
    assert found["fits"]
    assert found["considered"] == 3
    assert found["best"]["estimate_s"] == 12.5e-3
    assert found["best"]["layout"] == "pp 2 x dp 4, 1f1b, micro-batch size 2, layers 3+3"


def test_a_problem_that_a_peer_cannot_plan_is_an_answer(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    metis(tmp_path, HEADING, FIRST)
    asked = [*MIXED, "--compare", "amp", "--metis", str(tmp_path), "--sharding", "zero-1"]
    assert run([*asked, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert "peers" not in told
    found = next(one for one in told["answers"] if one["planner"] == "metis")
    assert found["reason"] == "metis: its replicas share nothing out, and zero-1 is pinned"


@pytest.mark.parametrize(
    ("options", "code", "expected"),
    [
        (["--compare", ""], 2, "--compare: names no planner (nearest valid: homogeneous,amp)"),
        (
            ["--calculon", "/nowhere"],
            2,
            "--calculon: /nowhere has no bin/calculon; it must be a clone of the program's repository",
        ),
        (
            ["--compare", "amp", "--metis", "CLONE"],
            2,
            "--metis: CLONE has no cost_het_cluster.py; it must be a clone of the program's repository",
        ),
        (
            ["--compare", "amp", "--calculon", "CLONE"],
            1,
            "calculon: its program failed with exit code 1: RuntimeError: no numpy",
        ),
        (
            ["--compare", "amp", "--calculon", "CLONE", "--python", "/no/python"],
            1,
            "calculon: /no/python cannot be started: No such file or directory",
        ),
        (
            ["--compare", "amp", "--calculon", "HANGS", "--seconds", "0.2"],
            1,
            "calculon: no answer within 0.2 s; it was ended",
        ),
    ],
)
def test_a_mistake_or_a_failing_program_is_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, options: list[str], code: int, expected: str
) -> None:
    clone, hangs = tmp_path / "clone", tmp_path / "hangs"
    clone.mkdir()
    hangs.mkdir()
    calculon(clone, "raise RuntimeError('no numpy')")
    calculon(hangs, "import time; time.sleep(600)")
    words = [one.replace("CLONE", str(clone)).replace("HANGS", str(hangs)) for one in options]
    assert run([*EQUAL, *words]) == code
    complaint = capsys.readouterr().err.splitlines()
    assert complaint == ["benchmarks/peers.py: " + expected.replace("CLONE", str(clone))]


def test_one_script_takes_a_question_and_one_leaves_out_what_is_not_named(tmp_path: Path) -> None:
    calculon(tmp_path, writing(ANSWER))
    environment = {name: value for name, value in os.environ.items() if name not in CLONES}

    def ran(script: str, *words: str) -> str:
        command = [sys.executable, str(SCRIPTS / script), *words]
        return subprocess.run(
            command, env=environment, cwd=tmp_path, check=True, capture_output=True, text=True
        ).stdout

    asked = (*EQUAL, "--compare", "megatron", "--calculon", str(tmp_path), "--json")
    (told,) = json.loads(ran("peers.py", *asked))["peers"]
    assert told["peer"] == "calculon"
    left_out = [
        line.split()[0] for line in ran("peer_figures.py").splitlines() if "is left out: git clone" in line
    ]
    assert left_out == ["calculon", "metis"]
