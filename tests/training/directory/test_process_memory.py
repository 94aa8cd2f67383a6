"""The memory of a process: tensors apart from what was there before them."""

from __future__ import annotations

import torch

from weft.training.directory.process_memory import ProcessMemory, resident_memory

CPU = torch.device("cpu")
SIZE = 64_000_000


def test_tensors_are_counted_and_later_copies_are_not() -> None:
    torch.ones(8)
    memory = ProcessMemory(CPU)
    tensor = torch.ones(SIZE // 4)
    memory.begin_copies()
    copy = tensor.clone()
    memory.begin_copies()
    peaks = memory.peaks()
    assert 0.9 * tensor.nbytes <= peaks["tensor_bytes"] <= tensor.nbytes + SIZE / 2
    assert peaks["library_bytes"] > 10**7
    rest = peaks["max_rss_bytes"] - peaks["library_bytes"] - peaks["tensor_bytes"]
    assert rest >= 0.9 * copy.nbytes


def test_a_later_plan_has_peaks_of_its_own() -> None:
    former = ProcessMemory(CPU)
    torch.ones(2 * SIZE // 4)
    both = former.peaks()
    memory = ProcessMemory(CPU, former)
    tensor = torch.ones(SIZE // 4)
    own = memory.peaks()
    assert own["max_rss_bytes"] <= both["max_rss_bytes"] - 0.9 * tensor.nbytes
    assert 0.9 * tensor.nbytes <= own["tensor_bytes"] <= both["tensor_bytes"] - 0.9 * tensor.nbytes


def test_a_run_without_checkpoints_counts_to_its_end() -> None:
    memory = ProcessMemory(CPU)
    peaks = memory.peaks()
    assert peaks["library_bytes"] + peaks["tensor_bytes"] == peaks["max_rss_bytes"]


def test_parts_are_within_the_peak() -> None:
    seen = resident_memory()
    assert 0 < seen.private + seen.mapped <= seen.peak
