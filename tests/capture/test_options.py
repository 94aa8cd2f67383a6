"""What may be asked to be measured, and how the rest is refused."""

from __future__ import annotations

import pytest
from lab.clusters import device, group
from predict.cost.machines import CPU, MODEL, cluster

from weft.capture.measure import counts_of, require_degrees, require_ranks
from weft.cli.main import run
from weft.describe.cluster import Cluster, Link
from weft.describe.models import resolve_model
from weft.errors import InputError


def test_counts_are_sorted_and_unique() -> None:
    assert counts_of("--micro-batches", "8, 1,2,8") == (1, 2, 8)


@pytest.mark.parametrize("text", ["", "0", "1,,2", "two", "-1", "1.5"])
def test_what_is_no_count_is_refused(text: str) -> None:
    with pytest.raises(InputError) as refused:
        counts_of("--micro-batches", text)
    assert str(refused.value).startswith("--micro-batches: '")
    assert "allowed: whole numbers of at least 1" in str(refused.value)


def test_a_degree_divides_the_layers_and_the_devices_of_every_node() -> None:
    require_degrees(cluster(nodes=2, devices=4), MODEL, (1, 2, 4))
    for degree, nearest in ((3, "nearest tp: 2"), (8, "nearest tp: 4")):
        with pytest.raises(InputError, match=f"--tensor-parallel: tp {degree} does not divide .*{nearest}"):
            require_degrees(cluster(nodes=1, devices=8), MODEL, (1, degree))
    with pytest.raises(InputError) as refused:
        require_degrees(cluster(nodes=1, devices=2), MODEL, (1, 2, 4))
    assert str(refused.value) == (
        "--tensor-parallel: 4 does not divide the 2 devices of a node of cluster (nearest valid: 2)"
    )


def test_tensor_ranks_are_measured_inside_nodes() -> None:
    groups = (group("new", device("fast", 4e10), devices=2), group("old", device("slow", 1e10), devices=1))
    mixed = Cluster(name="mixed", groups=groups, links={("new", "old"): Link(1e8, 0.0)})
    with pytest.raises(InputError, match="2 does not divide the 1 devices of a node of mixed"):
        require_degrees(mixed, MODEL, (2,))


def test_ranks_share_cores_but_not_accelerators() -> None:
    require_ranks(cluster(nodes=1, devices=2, device=CPU), (2, 4))
    require_ranks(cluster(nodes=1, devices=4), (2, 4))
    with pytest.raises(InputError, match=r"4 ranks need as many devices; cluster has 2 .nearest valid: 2"):
        require_ranks(cluster(nodes=1, devices=2), (2, 4))


def test_layers_that_no_ranks_divide() -> None:
    with pytest.raises(InputError, match="no layer of the model can be divided"):
        require_degrees(cluster(), resolve_model("resnet-tiny"), (2,))


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("--tensor-parallel", "2"), "--tensor-parallel: is about the layers of a model; name one"),
        (("--sequence", "64"), "--sequence: is about the layers of a model; name one"),
        (("--precision", "int8"), "'int8'"),
        (("gpt-1m", "--precision", "int8"), "'int8'"),
        (("--ranks", "2,100000"), "--ranks: 100000 ranks are more than 16 for each core"),
        (("--micro-batches", "2"), "--micro-batches: is about the layers of a model; name one"),
        (("gpt-1m", "--micro-batches", "1,x"), "--micro-batches: 'x', allowed: whole numbers of at least 1"),
        (("--ranks", "1,2"), "--ranks: a collective has two ranks or more"),
        (("gpt-1m", "--tensor-parallel", "3"), "--tensor-parallel: tp 3 does not divide 4 heads"),
    ],
)
def test_the_command_refuses_in_one_line(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], line: str
) -> None:
    assert run(["measure", *arguments]) == 2
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 1
    assert line in told[0]
