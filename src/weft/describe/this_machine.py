"""This machine as a Cluster, found without torch.

The driver's own tool lists NVIDIA devices, and the catalogue describes them. Without any, every usable core
is a device. Then a run starts one process per core, each with one thread.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from weft.describe.catalogue import CatalogueEntry, catalogue
from weft.describe.cluster import Cluster, Link, NodeGroup
from weft.describe.device import Device
from weft.describe.inventory.device_names import devices_named
from weft.errors import InputError, Violation

THIS_MACHINE = "this-machine"

# More processes than this start slowly and gain nothing on one host.
MOST_CORES = 8

# Defaults before `weft measure`: messages through the loopback interface, memory of one channel.
_LOOPBACK = Link(1e9, 50e-6)
_MEMORY_BYTES_PER_S = 10e9
_CPU_KERNEL_S = 5e-6
_DEFAULT_CLOCK_HZ = 2e9

_NVIDIA_SMI_TIMEOUT_S = 20


def this_machine() -> Cluster:
    """Return this host as one node: its NVIDIA devices if there are any, else its usable cores (at most 8).

    Raises:
        InputError: when it has a device that is not in the catalogue.
    """
    groups = nvidia_groups(nvidia_devices())
    if not groups:
        groups = (cpu_group(_usable_cores(), _read("/proc/cpuinfo"), _total_memory_bytes()),)
    links = {
        (min(one.name, other.name), max(one.name, other.name)): _LOOPBACK
        for index, one in enumerate(groups)
        for other in groups[index + 1 :]
    }
    return Cluster(
        name=THIS_MACHINE,
        groups=groups,
        links=links,
        assumed_inside=frozenset(group.name for group in groups),
        assumed_between=frozenset(links),
    )


def nvidia_smi(*arguments: str) -> str:
    """Return the answer of the driver's own tool; empty without a driver, or when it does not answer."""
    try:
        answer = subprocess.run(
            ("nvidia-smi", *arguments),
            capture_output=True,
            text=True,
            timeout=_NVIDIA_SMI_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired, UnicodeDecodeError):
        return ""
    return answer.stdout if answer.returncode == 0 else ""


def nvidia_devices() -> list[tuple[str, int]]:
    """Return the name and the bytes of memory of every NVIDIA device, as the driver reports them."""
    return read_devices(nvidia_smi("--query-gpu=name,memory.total", "--format=csv,noheader"))


def read_devices(text: str) -> list[tuple[str, int]]:
    """Return names and bytes from lines such as ``NVIDIA H200, 143771 MiB``; other lines say nothing."""
    devices = []
    for line in text.splitlines():
        name, _, memory = line.rpartition(",")
        amount = memory.removesuffix("MiB").strip()
        if amount.isascii() and amount.isdigit() and len(amount) < 12:
            devices.append((name.strip(), int(amount) * 2**20))
    return devices


def nvidia_groups(devices: Sequence[tuple[str, int]]) -> tuple[NodeGroup, ...]:
    """Return one group per kind of device, from the driver's names and bytes of memory.

    Different kinds in one host become groups of one node each. Memory sizes and the order of kinds come from
    the driver, not from the data sheet.

    Raises:
        InputError: for a device that is not in the catalogue, with the remedy.
    """
    found: dict[str, list[tuple[CatalogueEntry, int]]] = {}
    problems: list[Violation] = []
    for name, memory_bytes in devices:
        entry = _entry_of(name, memory_bytes)
        if entry is None:
            problem = f"{name!r} is not in the catalogue; describe it in a cluster file: weft init --cluster"
            near = " or ".join(devices_named(name, memory_bytes))
            problems.append(Violation(THIS_MACHINE, problem, near))
        else:
            found.setdefault(entry.device.name, []).append((entry, memory_bytes))
    if problems:
        raise InputError(list(dict.fromkeys(problems)))
    return tuple(
        NodeGroup(
            name=name,
            count=1,
            device=replace(devices[0][0].device, memory_bytes=min(memory for _, memory in devices)),
            devices=len(devices),
            link=devices[0][0].link,
        )
        for name, devices in found.items()
    )


def cpu_group(cores: int, cpuinfo: str, memory_bytes: int) -> NodeGroup:
    """Return one node of `cores` devices, one per core, which share the memory equally.

    The peak is clock x two fused multiply-add units x vector width. If `cpuinfo`, the text of
    `/proc/cpuinfo`, lacks values, the clock is 2 GHz and the width the narrowest. BF16 has the speed of fp32.
    """
    flags = _field(cpuinfo, "flags").split()
    lanes = 16 if "avx512f" in flags else 8 if "avx2" in flags else 4
    try:
        clock_hz = float(_field(cpuinfo, "cpu MHz")) * 1e6
    except ValueError:
        clock_hz = _DEFAULT_CLOCK_HZ
    flops_per_s = clock_hz * 2 * 2 * lanes
    device = Device(
        name="cpu",
        memory_bytes=max(1, memory_bytes // cores),
        memory_bytes_per_s=_MEMORY_BYTES_PER_S,
        flops_per_s={"fp64": flops_per_s / 2, "fp32": flops_per_s, "bf16": flops_per_s},
        launch_s=_CPU_KERNEL_S,
        synchronous=True,
    )
    return NodeGroup(name="cpu", count=1, device=device, devices=cores, link=_LOOPBACK)


def _entry_of(driver_name: str, memory_bytes: int) -> CatalogueEntry | None:
    """Return the catalogue's device of this driver name; memory distinguishes variants of one name."""
    matches = [entry for entry in catalogue().values() if driver_name in entry.driver_names]
    return min(matches, key=lambda entry: abs(entry.device.memory_bytes - memory_bytes), default=None)


def _field(cpuinfo: str, key: str) -> str:
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return ""


def _usable_cores() -> int:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(usable, MOST_CORES)


def _total_memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
