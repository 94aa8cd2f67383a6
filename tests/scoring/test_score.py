"""Rows of measurements: read, predicted, reported by number where they are wrong."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scoring.rows import ROW

from weft.cli.main import run
from weft.describe.cluster_file import parse_cluster
from weft.describe.families import layer_graph
from weft.describe.job import Job
from weft.describe.layout import Layout
from weft.describe.models import resolve_model
from weft.describe.plan_file import PlanFile
from weft.errors import InputError
from weft.moves.layout import build_plan
from weft.predict.ledger import Ledger
from weft.progress import WorkDone
from weft.scoring.measurements import read_measurements
from weft.scoring.score import PREDICTED_COLUMNS, score
from weft.scoring.subject import Subjects, dealt_layers

LARGE = {"hidden": "4096", "heads": "32", "layers": "24"}


def written(path: Path, *rows: dict[str, str]) -> Path:
    columns = list(dict.fromkeys(key for row in rows for key in row))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)
    return path


def predicted_s(path: Path, **changes: str) -> float:
    return score(written(path, ROW | changes)).rows[1].step_s


def test_rows_with_errors_are_reported_by_number_and_the_others_scored(tmp_path):
    rows = [
        ROW,
        ROW | {"layers": "no"},
        ROW | {"gpu": "a100"},
        ROW | {"measured_step_s": ""},
        ROW | {"tp": "3"},
        ROW | {"status": "oom", "measured_step_s": "", "hidden": "8192", "heads": "64", "layers": "80"},
        ROW | {"status": "other", "measured_step_s": ""},
    ]
    told: list[WorkDone] = []
    scores = score(written(tmp_path / "m.csv", *rows), report=told.append)
    # Five rows can be read, whether or not they can be predicted.
    assert [(one.done, one.total) for one in told] == [(done, 5) for done in range(6)]
    assert list(scores.rows) == [1, 6, 7]
    assert list(scores.problems) == [2, 3, 4, 5]
    assert "layers: 'no'" in scores.problems[2]
    assert "a100-40gb or a100-80gb" in scores.problems[3]
    assert "measured_step_s: missing" in scores.problems[4]
    assert "tp 3" in scores.problems[5] or "dp" in scores.problems[5]
    assert scores.pooled.n == 1
    assert (scores.pooled.oom_missed, scores.pooled.oom_false) == (0, 0)


def test_missing_columns_take_the_defaults_of_the_family(tmp_path):
    plain = written(tmp_path / "plain.csv", ROW)
    explicit = {
        "kv_heads": "8",
        "ffn": "1536",
        "gated": "1",
        "vocab": "32000",
        "tied_embeddings": "0",
        "micro_batch_size": "1",
        "tp": "1",
        "pp": "1",
        "dp": "4",
        "loops": "1",
        "schedule": "1f1b",
        "recompute": "none",
        "attention": "flash2",
        "norm": "fused",
        "loss_parallel": "1",
        "sharding": "zero-0",
        "precision": "bf16",
    }
    assert score(plain).rows[1].step_s == predicted_s(tmp_path / "all.csv", **explicit)


@pytest.mark.parametrize(
    ("slower", "faster"),
    [
        ({"attention": "math"}, {"attention": "fused"}),
        ({"attention": "fused"}, {"attention": "flash1"}),
        ({"attention": "flash1"}, {"attention": "flash2"}),
        ({"norm": "unfused"}, {"norm": "fused"}),
        ({"accumulation": "separate"}, {"accumulation": "fused"}),
        ({"recompute": "full"}, {"recompute": "selective"}),
        ({"tp": "2", "loss_parallel": "0"}, {"tp": "2", "loss_parallel": "1"}),
        ({"inter_bytes_per_s": "1e9", "nodes": "2"}, {"inter_bytes_per_s": "1e10", "nodes": "2"}),
        ({"nodes": "2", "nics_per_node": "1"}, {"nodes": "2", "nics_per_node": "8"}),
        (
            {"schedule": "hybrid", "pp": "2", "loops": "2", "schedule_options": "depth=8"},
            {"schedule": "hybrid", "pp": "2", "loops": "2", "schedule_options": "depth=1"},
        ),
        ({"optimizer": "adamw"}, {"optimizer": "sgd"}),
        ({"pp": "4", "blocking": "messages"}, {"pp": "4"}),
        ({"tp": "2", "intra_bytes_per_s": "1e9"}, {"tp": "2", "intra_bytes_per_s": "1e11"}),
        ({"gpu": "v100-32gb", "precision": "fp16"}, {"gpu": "h100-80gb", "precision": "fp16"}),
    ],
    ids=str,
)
def test_what_a_row_says_changes_the_prediction(tmp_path, slower, faster):
    large = {"hidden": "2048", "heads": "16", "seq": "2048"}
    assert predicted_s(tmp_path / "s.csv", **large, **slower) > predicted_s(
        tmp_path / "f.csv", **large, **faster
    )


@pytest.mark.parametrize(
    ("more", "less"),
    [
        ({"attention": "math"}, {"attention": "fused"}),
        ({"attention": "fused"}, {"attention": "flash2"}),
        ({"norm": "unfused"}, {"norm": "fused"}),
        ({"optimizer": "lamb"}, {"optimizer": "sgd"}),
        ({"stack": "weft"}, {"stack": "megatron-lm"}),
        ({"recompute": "none"}, {"recompute": "selective"}),
        ({"recompute": "selective"}, {"recompute": "full"}),
        ({"tp": "2", "sequence_parallel": "0"}, {"tp": "2", "sequence_parallel": "1"}),
        ({"tp": "2", "loss_parallel": "0"}, {"tp": "2", "loss_parallel": "1"}),
        ({"micro_batch_size": "8"}, {"loss": "chunked", "micro_batch_size": "8"}),
        ({"loss": "chunked", "loss_chunk_tokens": "512"}, {"loss": "chunked", "loss_chunk_tokens": "64"}),
        ({"loss": "chunked"} | LARGE, {"loss": "fused"} | LARGE),
        ({"sharding": "zero-0"}, {"sharding": "zero-1"}),
        ({"sharding": "zero-1"} | LARGE, {"sharding": "zero-3"} | LARGE),
        ({"micro_batch_size": "2"}, {"micro_batch_size": "1"}),
    ],
    ids=str,
)
def test_what_a_row_says_changes_the_memory(tmp_path, more, less):
    base = ROW | {"attention": "fused"}
    rows = score(written(tmp_path / "m.csv", base | more, base | less)).rows
    assert rows[1].peak_bytes > rows[2].peak_bytes


def test_a_row_ran_with_one_loss_kernel(tmp_path):
    rows = ROW | {"loss": "auto"}, ROW | {"loss": "chunked", "tp": "2", "loss_parallel": "0"}, ROW
    scores = score(written(tmp_path / "m.csv", *rows))
    assert list(scores.rows) == [3]
    assert scores.problems[1].startswith("loss: 'auto'")
    assert scores.problems[2].startswith("loss_parallel: 0 with loss chunked")


def test_a_plan_file_and_a_layer_graph_take_the_place_of_columns(tmp_path):
    graph = layer_graph(resolve_model("gpt-1m", sequence=128))
    cluster = parse_cluster("2xa100-80gb+2xt4")
    job = Job(graph=graph, cluster=cluster, global_batch=8, sequence=128, precision="fp16")
    layout = Layout(
        pp=2,
        dp=2,
        loops=1,
        micro_batch_size=1,
        schedule="1f1b",
        layers_per_stage=(4, len(graph.layers) - 4),
    )
    (tmp_path / "plan.json").write_text(PlanFile(build_plan(job, layout, ())).to_json())
    (tmp_path / "graph.json").write_text(graph.to_json())
    row = {
        "model": "graph.json",
        "plan": "plan.json",
        "cluster": "2xa100-80gb+2xt4",
        "measured_step_s": "0.01",
    }
    scores = score(written(tmp_path / "m.csv", row))
    assert scores.rows[1].step_s > 0
    assert scores.problems == {}
    elsewhere = score(written(tmp_path / "m.csv", row, row | {"cluster": "4xt4"}))
    assert "the plan is for" in elsewhere.problems[2]


def test_a_profile_of_anyone_answers_for_layers_by_kind_or_name(tmp_path):
    kinds = {"embedding": 0.001, "block": 0.01, "head": 0.002}
    lines = ["device,layer,tp,micro_batch_size,forward_s,backward_s,update_s,activation_bytes"]
    lines += [f"a100-80gb,{kind},1,1,{s},{2 * s},0,1000" for kind, s in kinds.items()]
    (tmp_path / "kinds.csv").write_text("\n".join(lines))
    (tmp_path / "names.csv").write_text("\n".join([*lines, "a100-80gb,block.2,1,1,0.03,0.06,0,1000"]))
    alone = {"gpus_per_node": "1", "global_batch": "4"}
    by_kind = predicted_s(tmp_path / "m.csv", **alone, profile="kinds.csv")
    by_name = predicted_s(tmp_path / "m.csv", **alone, profile="names.csv")
    assert by_kind == pytest.approx(4 * 3 * (0.001 + 4 * 0.01 + 0.002), rel=1e-6)
    assert by_name - by_kind == pytest.approx(4 * 3 * 0.02, rel=1e-6)
    scores = score(written(tmp_path / "m.csv", ROW | alone), profile=tmp_path / "kinds.csv")
    assert scores.rows[1].source == "layer profile"
    # Measured at one size, so that another one is a matter of the data sheet.
    larger = score(
        written(tmp_path / "m.csv", ROW | alone | {"micro_batch_size": "2"}), profile=tmp_path / "kinds.csv"
    )
    assert larger.rows[1].source == "layer profile of another micro-batch size"
    assert 0.5 * by_kind < larger.rows[1].step_s < 1.001 * by_kind


def test_a_profile_of_divided_layers_contains_what_tensor_ranks_exchange(tmp_path):
    lines = ["device,layer,tp,micro_batch_size,forward_s,backward_s,update_s,activation_bytes"]
    lines += [f"a100-80gb,{kind},2,1,0.01,0.02,0,1000" for kind in ("embedding", "block", "head")]
    (tmp_path / "p.csv").write_text("\n".join(lines))
    pair = {"gpus_per_node": "2", "global_batch": "1", "tp": "2", "profile": "p.csv"}
    assert predicted_s(tmp_path / "m.csv", **pair) == pytest.approx(6 * 0.03, rel=1e-6)


def test_sizes_that_a_profile_lacks_are_said(tmp_path):
    lines = ["device,layer,tp,micro_batch_size,forward_s,backward_s,update_s,activation_bytes"]
    for kind in ("embedding", "block", "head"):
        lines += [f"a100-80gb,{kind},1,{size},{size},{2 * size},0,1000" for size in (1, 4)]
    (tmp_path / "p.csv").write_text("\n".join(lines))
    rows = [ROW | {"profile": "p.csv", "micro_batch_size": size} for size in ("2", "8")]
    scores = score(written(tmp_path / "m.csv", *rows))
    assert scores.rows[1].source == "layer profile, between its micro-batch sizes"
    assert scores.rows[2].source == "layer profile of another micro-batch size"
    assert not scores.problems


@given(st.integers(1, 40), st.integers(1, 12))
def test_layers_are_dealt_out_by_count(layers: int, stages: int) -> None:
    graph = layer_graph(replace(resolve_model("gpt-1m"), layers=layers))
    if stages > layers:
        with pytest.raises(InputError, match="stages"):
            dealt_layers(graph, stages)
        return
    dealt = dealt_layers(graph, stages)
    assert sum(dealt) == layers + 2
    blocks = [count - (place == 0) - (place == stages - 1) for place, count in enumerate(dealt)]
    assert max(blocks) - min(blocks) <= 1
    assert blocks[-1] == min(blocks)


def test_the_command_answers_in_text_json_csv_and_a_page(tmp_path, capsys):
    path = written(tmp_path / "m.csv", ROW | {"note": "mine"}, ROW | {"tp": "2"}, ROW | {"pp": "99"})
    output, report = tmp_path / "out.csv", tmp_path / "report.html"
    assert run(["score", str(path), "--output", str(output), "--report", str(report)]) == 0
    text = capsys.readouterr().out
    assert "row 3: " in text
    assert "ignored columns: note" in text
    with output.open() as file:
        rows = list(csv.DictReader(file))
    assert [row["note"] for row in rows] == ["mine", "", ""]
    assert [bool(row["predicted_step_s"]) for row in rows] == [True, True, False]
    assert set(PREDICTED_COLUMNS) <= set(rows[0])
    assert float(rows[0]["low"]) < float(rows[0]["predicted_step_s"]) < float(rows[0]["high"])
    page = report.read_text()
    assert page.count("<circle") == 2 + 1
    assert "row 1 small: measured 100 ms" in page
    assert run(["score", str(path), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["pooled"]["n"] == record["groups"]["all"]["n"] == 2
    assert list(record["errors"]) == ["3"]


@pytest.mark.parametrize(
    ("cells", "words"),
    [
        ({"optimizer": "adagrad"}, "optimizer: 'adagrad' is not one of adam, adamw"),
        ({"stack": "mega"}, "stack: 'mega'"),
        ({"schedule": "hybrid", "schedule_options": "depth"}, "'depth' is not a list of options"),
        ({"schedule": "hybrid", "schedule_options": "depth=two"}, "schedule_options.depth"),
        ({"schedule": "hybrid", "pp": "2", "schedule_options": "depth=5"}, "nearest depth"),
        ({"nics_per_node": "0"}, "nics_per_node"),
    ],
    ids=str,
)
def test_a_wrong_cell_is_a_clear_line(tmp_path, cells, words):
    scores = score(written(tmp_path / "m.csv", ROW, ROW | cells))
    assert words in scores.problems[2]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "empty; line 1 must be a heading, such as "),
        ("\n\n", "empty; line 1 must be a heading, such as "),
        ("family;layers\ngpt;2\n", "line 1 separates its columns by semicolons; commas are needed\n"),
        ("colour,size\n1,2\n", "line 1 is not a heading of measurements; docs/score.md lists the columns\n"),
        ("layers,hidden\n", "has no row"),
        ("layers,layers\n1,2\n", "more than once"),
        ("layers,measured_step_s\n1,2\n", "no row can be predicted; row 1: hidden: missing"),
    ],
)
def test_files_that_say_nothing_are_refused_in_one_line(tmp_path, capsys, text, words):
    path = tmp_path / "m.csv"
    path.write_text(text)
    assert run(["score", str(path)]) == 2
    answer = capsys.readouterr().err
    assert words in answer
    assert answer.count("\n") == 1


def test_one_of_file_and_ledger_is_needed(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("WEFT_HOME", str(tmp_path))
    assert run(["score"]) == 2
    assert "give one of a CSV file, --ledger and --trace" in capsys.readouterr().err
    assert run(["score", "--ledger"]) == 0
    assert "nothing has been predicted" in capsys.readouterr().out
    with Ledger() as ledger:
        entry = ledger.record_prediction(
            quantity="step_s", subject="p", predicted=1.0, low=0.9, high=1.1, source="test", time_s=0.0
        )
        ledger.score(entry, 1.05)
    page = tmp_path / "ledger.html"
    assert run(["score", "--ledger", "--report", str(page)]) == 0
    assert capsys.readouterr().out.endswith(f"wrote {page}\n")
    assert "plan p, test: measured 1.05 s, predicted 1.00 s (error -4.8%)" in page.read_text()
    assert run(["score", "--ledger", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ledger"]["step_s"]["inside"] == 1.0


def test_rows_without_a_measurement_of_their_own_number_keep_their_place(tmp_path):
    file = read_measurements(written(tmp_path / "m.csv", ROW | {"layers": "0"}, ROW))
    assert list(file.problems) == [1]
    assert list(file.rows) == [2]


def test_a_row_says_of_a_layout_what_a_run_file_does(tmp_path):
    base = ROW | {"gpu": "a100-80gb", "dp": "8", "nodes": "1", "gpus_per_node": "8", "global_batch": "32"}
    more = ({"cp": "2", "dp": "4"}, {"sharding": "zero-1", "island": "2"}, {"blocking": "messages"})
    rows = read_measurements(written(tmp_path / "m.csv", *(base | row for row in more))).rows
    plans = [Subjects(folder=tmp_path).of(row).plan for row in rows.values()]
    assert [plan.cp for plan in plans] == [2, 1, 1]
    assert [plan.island for plan in plans] == [None, 2, None]
    assert [plan.blocking for plan in plans] == [("reductions",), ("reductions",), ("messages",)]


SHARDED = ROW | {"gpu": "a100-80gb", "dp": "16", "nodes": "2", "gpus_per_node": "8", "sharding": "zero-3"}


def test_replicas_that_shard_gather_and_reduce_block_by_block_as_their_stacks_do(tmp_path):
    more = (
        {},
        {"sharding": "zero-2"},
        {"sharding": "zero-2", "stack": "fsdp2"},
        {"stack": "weft"},
        {"loops": "2", "schedule": "breadth-first"},
        {"pp": "2", "dp": "8"},
        {"sharding": "zero-1"},
        {"sharding": "zero-0", "stack": "fsdp2"},
    )
    rows = read_measurements(written(tmp_path / "m.csv", *(SHARDED | row for row in more))).rows
    plans = [Subjects(folder=tmp_path).of(row).plan for row in rows.values()]
    blocks = int(ROW["layers"])
    assert [len(plan.stages) for plan in plans] == [blocks, blocks, blocks, 1, 2, 2, 1, 1]
    assert [plan.blocking for plan in plans] == [(), ("gathers",), (), (), (), (), ("reductions",), ()]


def test_every_micro_batch_of_sharded_weights_gathers_them_anew(tmp_path):
    """Of links that decide, a step with twice the micro-batches takes nearly twice as long."""
    slow = SHARDED | {"inter_bytes_per_s": "1e8", "micro_batch_size": "1"}
    batches = [{"global_batch": str(16 * micro_batches)} for micro_batches in (2, 4)]
    weights, gradients = (
        [slow | {"sharding": level} | one for one in batches] for level in ("zero-3", "zero-1")
    )
    scores = score(written(tmp_path / "m.csv", *weights, *gradients))
    once, twice, summed, later = (scores.rows[place].step_s for place in (1, 2, 3, 4))
    assert 1.8 < twice / once < 2.0
    assert later / summed < 1.2
