"""This machine: the driver's answer and the processor's description, read from text."""

import pytest
from describe.drivers import nvidia_smi_of

from weft.describe import this_machine as module
from weft.describe.catalogue import catalogue
from weft.describe.this_machine import cpu_group, nvidia_groups, read_devices, this_machine
from weft.errors import InputError

CPUINFO = """\
processor\t: 0
model name\t: A Processor
cpu MHz\t\t: 2500.000
flags\t\t: fpu sse sse2 avx avx2 {more}

processor\t: 1
cpu MHz\t\t: 800.000
"""


def test_equal_devices_are_one_node_with_the_drivers_memory():
    (group,) = nvidia_groups(read_devices("NVIDIA H200, 143771 MiB\n" * 8))
    assert (group.name, group.count, group.devices) == ("h200-141gb", 1, 8)
    assert group.device.memory_bytes == 143771 * 2**20
    assert group.device.flops_per_s == catalogue()["h200-141gb"].device.flops_per_s
    assert group.link == catalogue()["h200-141gb"].link


def test_different_devices_are_groups_of_their_own():
    text = "Tesla T4, 15360 MiB\nNVIDIA L4, 23034 MiB\nTesla T4, 15109 MiB\n"
    one, two = nvidia_groups(read_devices(text))
    assert (one.name, one.devices, two.name, two.devices) == ("t4", 2, "l4", 1)
    assert one.device.memory_bytes == 15109 * 2**20


def test_no_lines_are_no_devices():
    assert nvidia_groups(read_devices("")) == ()
    assert nvidia_groups(read_devices("No devices were found\n")) == ()


def test_an_unknown_device_is_refused_with_the_remedy_once():
    with pytest.raises(InputError) as refused:
        nvidia_groups([("NVIDIA Marvel 9000", 2**34)] * 4)
    assert len(refused.value.violations) == 1
    assert "describe it in a cluster file: weft init --cluster" in str(refused.value)


def test_an_unknown_variant_is_refused_with_the_devices_it_may_be():
    with pytest.raises(InputError, match=r"nearest valid: a100-80gb or a100-80gb-pcie"):
        nvidia_groups([("NVIDIA A100", 80 * 2**30)])


def test_every_name_of_the_drivers_means_one_device():
    known = [name for entry in catalogue().values() for name in entry.driver_names]
    assert len(known) == len(set(known))


@pytest.mark.parametrize(
    ("cpuinfo", "fp32"),
    [
        (CPUINFO.format(more="avx512f"), 2.5e9 * 64),
        (CPUINFO.format(more=""), 2.5e9 * 32),
        ("flags : sse2\ncpu MHz : fast\n", 2e9 * 16),
        ("", 2e9 * 16),
    ],
)
def test_a_core_computes_clock_times_width(cpuinfo, fp32):
    group = cpu_group(4, cpuinfo, 32 * 2**30)
    assert group.device.flops_per_s == {"fp64": fp32 / 2, "fp32": fp32, "bf16": fp32}
    assert (group.count, group.devices, group.device.memory_bytes) == (1, 4, 8 * 2**30)
    assert group.device.synchronous


def test_without_a_driver_the_cores_are_the_devices(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    cluster = this_machine()
    assert cluster.name == "this-machine"
    assert 1 <= cluster.ranks <= module.MOST_CORES
    assert cluster.device_of(0).name == "cpu"
    assert cluster.fingerprint == this_machine().fingerprint


def test_a_driver_that_fails_or_hangs_is_no_driver(monkeypatch, tmp_path):
    monkeypatch.setattr(module, "_NVIDIA_SMI_TIMEOUT_S", 0.05)
    for script in ("exit 9", "exec sleep 60"):
        nvidia_smi_of(script, monkeypatch, tmp_path)
        assert this_machine().device_of(0).name == "cpu"


def test_a_driver_that_answers_is_believed(monkeypatch, tmp_path):
    nvidia_smi_of(r"printf 'NVIDIA L4, 23034 MiB\nTesla T4, 15360 MiB\n'", monkeypatch, tmp_path)
    cluster = this_machine()
    assert [group.name for group in cluster.groups] == ["l4", "t4"]
    assert cluster.link_between(0, 1).bytes_per_s > 0
