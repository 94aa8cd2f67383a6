"""`this-machine` as a cluster, without torch: NVIDIA GPUs where the driver answers, else CPU cores."""

from __future__ import annotations

import os
import re
import shutil
import subprocess

from weft.describe.catalogue import catalogue
from weft.describe.cluster import Cluster, Link, NodeGroup
from weft.describe.device import Device

# More local ranks than this say little about a cluster and crowd a workstation.
MOST_CPU_RANKS = 8
CPU_LINK = Link(bytes_per_s=1e9, latency_s=50e-6)
CPU_MEMORY_BYTES_PER_S = 1e10
DEFAULT_CLOCK_HZ = 2.5e9
NVIDIA_SMI_TIMEOUT_S = 10


def this_machine() -> Cluster:
    """One node: its GPUs, or one CPU device per usable core."""
    gpus = _nvidia_gpus()
    if gpus:
        return gpu_cluster(gpus)
    cores = len(os.sched_getaffinity(0))
    return cpu_cluster(min(cores, MOST_CPU_RANKS), _memory_bytes(), _cpu_info())


def cpu_cluster(devices: int, memory_bytes: int, cpu_info: str) -> Cluster:
    """A node of `devices` CPU devices of one core each; `cpu_info` is the text of /proc/cpuinfo."""
    peak = _clock_hz(cpu_info) * _fp32_flops_per_cycle(cpu_info)
    device = Device(
        name="cpu",
        memory_bytes=memory_bytes // devices,
        memory_bytes_per_s=CPU_MEMORY_BYTES_PER_S,
        flops_per_s={"fp64": peak / 2, "fp32": peak},
        synchronous=True,
    )
    group = NodeGroup(name="this", count=1, device=device, devices=devices, link=CPU_LINK)
    return Cluster(name="this-machine", groups=(group,))


def gpu_cluster(lines: list[str]) -> Cluster:
    """A node of the first kind of GPU that `nvidia-smi --query-gpu=name,memory.total` lists."""
    names = [line.split(",")[0].strip() for line in lines]
    memory_mib = int(re.findall(r"\d+", lines[0].split(",")[1])[0])
    entry = catalogue().get(catalogue_name(names[0], memory_mib))
    count = sum(name == names[0] for name in names)
    if entry is not None:
        group = NodeGroup(name="this", count=1, device=entry.device, devices=count, link=entry.link)
        return Cluster(name="this-machine", groups=(group,))
    nearest_known = catalogue()["l4"]
    device = Device(
        name=re.sub(r"[^a-z0-9]+", "-", names[0].lower()).strip("-"),
        memory_bytes=memory_mib * 2**20,
        memory_bytes_per_s=nearest_known.device.memory_bytes_per_s,
        flops_per_s=nearest_known.device.flops_per_s,
    )
    group = NodeGroup(name="this", count=1, device=device, devices=count, link=nearest_known.link)
    return Cluster(name="this-machine", groups=(group,))


def catalogue_name(gpu: str, memory_mib: int) -> str:
    """The catalogue's name of a GPU as its driver calls it, or an empty string."""
    words = set(re.split(r"[^a-z0-9]+", gpu.lower()))
    gigabytes = memory_mib * 2**20 / 1e9
    fitting = [
        (abs(entry.device.memory_bytes / 1e9 - gigabytes), name)
        for name, entry in catalogue().items()
        if name.split("-")[0] in words or set(name.split("-")) <= words
    ]
    return min(fitting)[1] if fitting else ""


def _nvidia_gpus() -> list[str]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    query = [program, "--query-gpu=name,memory.total", "--format=csv,noheader"]
    try:
        answer = subprocess.run(
            query, capture_output=True, text=True, timeout=NVIDIA_SMI_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    lines = [line for line in answer.stdout.splitlines() if "," in line]
    return lines if answer.returncode == 0 else []


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _cpu_info() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            return file.read()
    except OSError:
        return ""


def _clock_hz(cpu_info: str) -> float:
    clocks = [float(value) for value in re.findall(r"^cpu MHz\s*:\s*([\d.]+)", cpu_info, re.MULTILINE)]
    return 1e6 * max(clocks) if clocks else DEFAULT_CLOCK_HZ


def _fp32_flops_per_cycle(cpu_info: str) -> float:
    """Two fused multiply-adds per cycle in the widest vectors; SSE without either extension."""
    flags = set(re.findall(r"^flags\s*:\s*(.*)", cpu_info, re.MULTILINE)[:1] or [""])
    words = set(next(iter(flags)).split())
    if "avx512f" in words:
        return 64.0
    return 32.0 if "avx2" in words else 8.0
