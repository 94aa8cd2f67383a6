"""The memory of a process: tensors apart from what was there before them."""

from __future__ import annotations

import torch

from weft.training.directory.process_memory import ProcessMemory, peak_memory, resident_memory

CPU = torch.device("cpu")
SIZE = 64_000_000


def test_tensors_are_counted_and_later_copies_are_not() -> None:
    torch.ones(8)
    memory = ProcessMemory(CPU)
    # A former peak of this process would hide smaller ones.
    room = resident_memory().peak - resident_memory().private - resident_memory().mapped
    tensor = torch.ones((room + SIZE) // 4)
    memory.begin_copies()
    copy = tensor.clone()
    memory.begin_copies()
    peaks = memory.peaks()
    assert 0.9 * tensor.nbytes <= peaks["tensor_bytes"] <= tensor.nbytes + SIZE / 2
    assert peaks["library_bytes"] > 10**7
    rest = peaks["max_rss_bytes"] - peaks["library_bytes"] - peaks["tensor_bytes"]
    assert rest >= 0.9 * copy.nbytes


def test_a_run_without_checkpoints_counts_to_its_end() -> None:
    memory = ProcessMemory(CPU)
    peaks = memory.peaks()
    assert peaks["max_rss_bytes"] == peak_memory(CPU)["max_rss_bytes"]
    assert peaks["library_bytes"] + peaks["tensor_bytes"] >= peaks["max_rss_bytes"] - SIZE


def test_parts_are_within_the_peak() -> None:
    seen = resident_memory()
    assert 0 < seen.private + seen.mapped <= seen.peak
