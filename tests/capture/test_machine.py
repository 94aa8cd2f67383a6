"""The clock of kernels: an accelerator's events time its kernels, and each time has a launch."""

from __future__ import annotations

import time
from unittest.mock import patch

import pytest
import torch
from late_accelerator import LateAccelerator

from weft.capture.machine import LAUNCHES, KernelClock

KERNEL_S = 1e-3


def test_kernels_of_an_accelerator_are_timed_on_the_device() -> None:
    accelerator, ran = LateAccelerator(), []

    def kernel() -> None:
        time.sleep(KERNEL_S)
        ran.append(True)

    with patch("weft.capture.machine.accelerator_of", lambda device: accelerator):
        clock = KernelClock(torch.device("cpu"), launch_s=7.0)
    seconds = clock.seconds(lambda: accelerator.launch(kernel))
    assert len(ran) == LAUNCHES
    # The host's own time to launch them is far shorter. A launch is in every time.
    assert seconds > 7.0 + KERNEL_S


def test_a_cpu_computes_while_its_call_runs() -> None:
    clock = KernelClock(torch.device("cpu"), launch_s=7.0)
    assert KERNEL_S <= clock.seconds(lambda: time.sleep(KERNEL_S)) < 7.0
    assert clock.seconds(lambda: None) == pytest.approx(0.0, abs=1.0)
