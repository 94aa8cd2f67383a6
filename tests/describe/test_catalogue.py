"""The catalogue: complete, from data sheets, dense peaks."""

import pytest

from weft.describe.catalogue import catalogue, find_device
from weft.describe.device import FP8, PRECISION_BYTES
from weft.errors import InputError


@pytest.mark.parametrize("name", list(catalogue()))
def test_every_entry_is_complete_and_plausible(name):
    entry = catalogue()[name]
    device = entry.device
    assert device.name == name == name.lower()
    assert entry.source
    assert set(device.flops_per_s) <= {*PRECISION_BYTES, FP8}
    # Matrix units take twice as many operands of half the size.
    if FP8 in device.flops_per_s:
        assert device.flops_per_s[FP8] == pytest.approx(2 * device.flops_per_s["bf16"], rel=0.02)
    assert {"fp16", "fp32"} <= set(device.flops_per_s)
    assert device.flops_per_s["fp16"] >= device.flops_per_s["fp32"] >= device.flops_per_s.get("fp64", 0)
    assert 10e9 < device.memory_bytes < 300e9
    assert 3e11 <= device.memory_bytes_per_s <= 8e12
    assert 1 <= entry.devices <= 8
    assert entry.network.latency_s >= entry.link.latency_s
    assert device.price_per_hour is None


# Dense peaks of the data sheets; "with sparsity" figures are twice these.
@pytest.mark.parametrize(
    ("name", "bf16", "fp32", "memory_bytes_per_s"),
    [
        ("a100-80gb", 312e12, 19.5e12, 2.039e12),
        ("a100-40gb", 312e12, 19.5e12, 1.555e12),
        ("h100-80gb", 989.4e12, 66.9e12, 3.35e12),
        ("h200-141gb", 989.4e12, 66.9e12, 4.8e12),
        ("v100-16gb", None, 15.7e12, 0.9e12),
        ("l4", 121e12, 30.3e12, 0.3e12),
        ("mi300x", 1307.4e12, 163.4e12, 5.3e12),
    ],
)
def test_figures_of_well_known_devices(name, bf16, fp32, memory_bytes_per_s):
    device = catalogue()[name].device
    assert device.flops_per_s.get("bf16") == bf16
    assert device.flops_per_s["fp32"] == fp32
    assert device.memory_bytes_per_s == memory_bytes_per_s


def test_aliases_and_capitals_find_the_same_entry():
    assert find_device("GH200", "x") is catalogue()["gh200-96gb"]
    names = [name for entry in catalogue().values() for name in (entry.device.name, *entry.aliases)]
    assert len(names) == len(set(names))


def test_a_name_without_its_memory_gets_all_that_begin_with_it():
    with pytest.raises(InputError, match="nearest valid: a100-40gb or a100-80gb"):
        find_device("A100", "cluster")


def test_an_unknown_device_gets_the_nearest():
    with pytest.raises(InputError, match="nearest valid: a100-80gb"):
        find_device("a100-80", "cluster")
