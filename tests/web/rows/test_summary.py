"""The summary of a run in words: every figure once, and measured memory beside what predicts it."""

from __future__ import annotations

from weft.web.rows.summary import memory_rows, summary_rows

SUMMARY = {
    "max_rss_bytes": [700_000_000, 600_000_000],
    "library_bytes": [500_000_000, 450_000_000],
    "tensor_bytes": [120_000_000, 110_000_000],
}
PARTS = {"weights": 60_000_000, "activations": 40_000_000}


def test_parts_of_a_process_add_up_and_only_tensors_stand_beside_the_prediction() -> None:
    rows = {name: figures for name, *figures in memory_rows(PARTS, SUMMARY, 0)}
    assert rows == {
        "weights": ["60.0 MB", ""],
        "activations": ["40.0 MB", ""],
        "together": ["100 MB", "120 MB"],
        "interpreter and libraries": ["-", "500 MB"],
        "checkpoints and evaluation": ["-", "80.0 MB"],
        "whole process": ["-", "700 MB"],
    }


def test_an_accelerator_counts_its_tensors_itself() -> None:
    rows = memory_rows(PARTS, {**SUMMARY, "max_device_bytes": [90_000_000, 80_000_000]}, 1)
    assert rows[-1] == ("together", "100 MB", "80.0 MB")


def test_runs_of_earlier_versions_compare_nothing() -> None:
    rows = memory_rows(PARTS, {"max_rss_bytes": [700_000_000]}, 0)
    assert rows[2:] == [("together", "100 MB", "-"), ("whole process", "-", "700 MB")]


def test_figures_have_words_and_units_and_none_is_shown_twice() -> None:
    summary = {
        **SUMMARY,
        "measured_step_s": 0.1,
        "final_loss": 2.95657,
        "steps": 1200,
        "checkpoint_bytes": 10_444_394,
        "checkpoint_stall_s": 0.1929,
        "final_metrics": {"accuracy": 0.51234},
        "added_s": 0.002,
        "nothing": {},
    }
    assert list(summary_rows(summary)) == [
        ("steps", "1,200"),
        ("held-out loss after training", "2.957"),
        ("after training: accuracy", "0.5123"),
        ("last checkpoint", "10.4 MB"),
        ("training stood still for checkpoints", "193 ms"),
        ("added", "2.00 ms"),
    ]
