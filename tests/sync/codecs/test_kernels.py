"""The kernels have the bits of the plain path: interpreted on a CPU, and on a GPU where there is one."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).with_name("path_bits.py")


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed: pip install '.[triton]'")
@pytest.mark.parametrize("interpreted", [True, False])
def test_kernels_have_the_bits_of_the_plain_path(interpreted: bool) -> None:
    if not interpreted and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    # Triton decides when it is imported whether it interprets: another process.
    environment = os.environ | {"TRITON_INTERPRET": str(int(interpreted))}
    found = subprocess.run(
        [sys.executable, SCRIPT], env=environment, capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stderr
