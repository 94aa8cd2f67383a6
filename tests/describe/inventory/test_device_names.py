"""Names that drivers, schedulers and labels give the devices of the catalogue."""

from __future__ import annotations

import pytest

from weft.describe.catalogue import catalogue
from weft.describe.inventory.device_names import devices_named, is_slice


@pytest.mark.parametrize("name", list(catalogue()))
def test_names_of_the_catalogue_and_of_the_driver_mean_their_device_however_they_are_written(
    name: str,
) -> None:
    entry = catalogue()[name]
    for word in (name, *entry.aliases, *entry.driver_names):
        for written in (word, word.replace(" ", "-"), word.lower().replace(" ", "_"), word.upper()):
            assert devices_named(written) == [name], written


@pytest.mark.parametrize(
    ("word", "first"),
    [
        ("nvidia_a100-sxm4-80gb", "a100-80gb"),  # Slurm's AutoDetect
        ("NVIDIA-A100-SXM4-40GB", "a100-40gb"),  # NVIDIA's label
        ("nvidia-tesla-t4", "t4"),  # Google's label
        ("nvidia-h100-80gb", "h100-80gb"),
        ("nvidia-h100-mega-80gb", ""),
        ("rtx4090", "rtx-4090"),
        ("rtx_a6000", "rtx-a6000"),
        ("a6000", "rtx-a6000"),
        ("3090", "rtx-3090"),
        ("2080ti", "rtx-2080-ti"),
        ("v100", "v100-16gb"),
        ("h100", "h100-80gb"),
        ("mi300x", "mi300x"),
        ("a10", "a10"),
        ("rtxproserver6000", "rtx-pro-6000"),  # of AWS ParallelCluster
        ("nvidia_b200", "b200"),
        ("k80", ""),
        ("", ""),
    ],
)
def test_other_words_mean_the_usual_device_first(word: str, first: str) -> None:
    assert next(iter(devices_named(word)), "") == first


def test_memory_and_hints_tell_variants_apart() -> None:
    assert devices_named("a100")[:2] == ["a100-40gb", "a100-80gb"]
    assert devices_named("a100", 81920 * 2**20) == ["a100-80gb", "a100-80gb-pcie"]
    assert devices_named("a100", hints=("ib", "a100_80gb", "sxm4")) == ["a100-80gb"]
    # A list without names: only the hints say something.
    assert devices_named("", hints=("intel", "v100-32gb")) == ["v100-32gb"]
    # A hint that contradicts says nothing.
    assert devices_named("t4", hints=("a100",)) == ["t4"]


@pytest.mark.parametrize(
    ("word", "sliced"),
    [("a100_1g.10gb", True), ("NVIDIA-A100-SXM4-80GB-MIG-2g.20gb", True), ("NVIDIA-A100-SXM4-80GB", False)],
)
def test_partitions_of_devices_are_seen(word: str, sliced: bool) -> None:
    assert is_slice(word) is sliced
