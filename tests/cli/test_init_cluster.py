"""`weft init --cluster`: from lists of nodes, from this machine, and from neither."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from describe.drivers import nvidia_smi_of

from weft.cli.main import run
from weft.describe.cluster import Link
from weft.describe.cluster_file import load_cluster

NODES = "NodeName=g[1-4] Gres=gpu:h100:2 State=IDLE\nNodeName=g5 Gres=gpu:h100:2 State=DOWN\n"
MATRIX = "\tGPU0\tGPU1\nGPU0\t X \tNV18\nGPU1\tNV18\t X \n"
MATRIX_OF_FOUR = "\tGPU0\tGPU1\tGPU2\tGPU3\n" + "".join(
    f"GPU{row}\t" + "\t".join("X" if row == column else "NV4" for column in range(4)) + "\n"
    for row in range(4)
)
DOCS = Path(__file__).parents[2] / "docs"
PORTS = "CA 'mlx5_0'\n\tPort 1:\n\t\tState: Active\n\t\tRate: 400\n\t\tLink layer: InfiniBand\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in (("nodes", NODES), ("topology", MATRIX), ("ports", PORTS)):
        (tmp_path / name).write_text(text)
    return tmp_path


def test_lists_of_a_cluster_become_its_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder / "mine.toml"
    words = ["init", str(path), "--cluster"]
    words += [word for name in ("nodes", "topology", "ports") for word in (f"--{name}", str(folder / name))]
    assert run([*words, "--device", "h100-80gb"]) == 0
    out = capsys.readouterr().out
    assert out.splitlines() == [
        "left out: g5 (DOWN)",
        f"wrote {path}: 4 nodes, 8 devices; next: weft plan gpt2 --on {path}",
    ]
    cluster = load_cluster(path)
    assert (cluster.groups[0].link.bytes_per_s, cluster.links["h100-80gb", "h100-80gb"]) == (
        450e9,
        Link(50e9, 10e-6),
    )
    assert run([*words, "--device", "h100-80gb"]) == 2
    assert "exists already" in capsys.readouterr().err


def test_the_documented_answer_is_the_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    states = ("IDLE", "MIXED", "IDLE+DRAIN")
    lines = [f"NodeName=gpu0{place} Gres=gpu:a100:4 State={state}" for place, state in enumerate(states, 1)]
    Path("nodes.txt").write_text("\n".join(lines))
    Path("topology.txt").write_text(MATRIX_OF_FOUR)
    words = ["init", "cluster.toml", "--cluster", "--nodes", "nodes.txt", "--topology", "topology.txt"]
    assert run(words) == 0
    assert capsys.readouterr().out in (DOCS / "clusters.md").read_text()


def test_a_list_comes_from_standard_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(NODES))
    assert run(["init", str(tmp_path / "c.toml"), "--cluster", "--nodes", "-"]) == 0
    assert "assumed: h100-80gb: the network as usual; `ibstat` tells (--ports)" in capsys.readouterr().out


def test_this_machine_is_described_by_its_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    matrix = MATRIX.encode("unicode_escape").decode()
    script = f"[ $1 = topo ] && exec printf '{matrix}'; yes 'NVIDIA H200, 143771 MiB' | head -2"
    nvidia_smi_of(script, monkeypatch, tmp_path)
    path = tmp_path / "c.toml"
    assert run(["init", str(path), "--cluster"]) == 0
    assert "assumed" not in capsys.readouterr().out
    (group,) = load_cluster(path).groups
    assert (group.device.name, group.devices, group.link.bytes_per_s) == ("h200-141gb", 2, 450e9)
    # Nodes with the same devices have this machine's links; others have not.
    (tmp_path / "nodes").write_text(NODES.replace("h100", "h200"))
    assert run(["init", str(tmp_path / "d.toml"), "--cluster", "--nodes", str(tmp_path / "nodes")]) == 0
    assert load_cluster(tmp_path / "d.toml").assumed_inside == frozenset()


def test_without_devices_the_cores_are_described(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    path = tmp_path / "mine.toml"
    assert run(["init", str(path), "--cluster"]) == 0
    cluster = load_cluster(path)
    assert (cluster.name, cluster.device_of(0).name) == ("mine", "cpu")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--nodes", "x"], "--nodes: is about a cluster (nearest valid: --cluster)"),
        (["--cluster", "--nodes", "no-file"], "no-file"),
        (["--cluster", "--device", "a100-80"], "--device: 'a100-80' is not in the catalogue"),
        (["--cluster", "--nodes", "nodes", "--ports", "topology"], "topology: no ports"),
        (["--cluster", "--nodes", "ports"], "ports: no list of nodes"),
        (["--cluster", "--topology", "topology"], "--topology: this machine has no NVIDIA device"),
        (["--cluster", "--device", "h100-80gb"], "--device: this machine has no NVIDIA device"),
    ],
)
def test_bad_input_is_refused_with_one_line(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    line: str,
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PATH", str(folder))
    assert run(["init", "mine.toml", *words]) == 2
    err = capsys.readouterr().err
    assert line in err
    assert len(err.splitlines()) == 1
    assert not (folder / "mine.toml").exists()
