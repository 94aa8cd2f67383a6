"""What torch is told about the kernels and the generators of a process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from weft.run.accelerator import current_device, device_count, seed_generators, take_device

SCRIPT = """
import os
import pytest
import torch
from weft.run.accelerator import require_same_bits

before = torch.are_deterministic_algorithms_enabled()
require_same_bits()
print(before, torch.are_deterministic_algorithms_enabled(), os.environ["CUBLAS_WORKSPACE_CONFIG"])
try:
    torch.nn.functional.max_unpool1d(torch.ones(1, 1, 2), torch.zeros(1, 1, 2, dtype=torch.int64), 2)
except RuntimeError as error:
    print("does not have a deterministic implementation" in str(error))
"""


@pytest.mark.usefixtures("warm_starts")
def test_operations_without_the_same_bits_fail_once_they_are_required() -> None:
    told = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True).stdout
    assert told.split() == ["False", "True", ":4096:8", "True"]


def test_a_seed_of_the_host_draws_what_torch_draws_and_reaches_no_other_vendor() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        expected = torch.rand(3)
        asked = len(torch.xpu._queued_calls)
        seed_generators(5, torch.device("cpu"))
        assert torch.equal(torch.rand(3), expected)
    assert len(torch.xpu._queued_calls) == asked


class Driver:
    """The part of `torch.accelerator` that counts devices and chooses one."""

    def __init__(self, kind: str | None, devices: int) -> None:
        self.kind, self.devices, self.chosen = kind, devices, 0

    def current_accelerator(self) -> torch.device | None:
        return None if self.kind is None else torch.device(self.kind)

    def device_count(self) -> int:
        return self.devices

    def set_device_index(self, index: int) -> None:
        self.chosen = index

    def current_device_index(self) -> int:
        return self.chosen


@pytest.mark.parametrize(
    ("kind", "devices", "count", "name"),
    [("cuda", 4, 4, "cuda:2"), ("mps", 1, 0, "cpu"), ("cuda", 0, 0, "cpu"), (None, 0, 0, "cpu")],
)
def test_a_process_takes_a_device_of_a_vendor_that_has_collectives(
    monkeypatch: pytest.MonkeyPatch, kind: str | None, devices: int, count: int, name: str
) -> None:
    monkeypatch.setattr(torch, "accelerator", Driver(kind, devices))
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    assert device_count() == count
    assert (take_device(2) if count else current_device()) == name
    assert os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == ("32" if count else None)
