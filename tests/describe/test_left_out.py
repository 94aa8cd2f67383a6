"""Nodes that are left out: by group or device, all or some, never the last one."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.describe.cluster import Cluster
from weft.describe.cluster_file import parse_cluster
from weft.describe.left_out import without
from weft.describe.plan_subject import cluster_of_run
from weft.describe.run_file import load_run, naming, parse_run
from weft.errors import InputError

MIXED = parse_cluster("8xt4+16xa100-80gb+8xv100-16gb")


def counts(cluster: Cluster) -> dict[str, int]:
    return {group.name: group.count for group in cluster.groups}


def test_all_or_some_nodes_of_a_group_leave_with_their_links() -> None:
    left = without(MIXED, ["t4", "1 a100-80gb"])
    assert counts(left) == {"a100-80gb": 1, "v100-16gb": 1}
    assert left.name == "8xt4+16xa100-80gb+8xv100-16gb without t4 and 1 a100-80gb"
    assert left.ranks == 16
    assert all("t4" not in pair for pair in left.links)
    assert left.assumed_inside == {"a100-80gb", "v100-16gb"}
    assert all("t4" not in pair for pair in left.assumed_between)
    assert without(MIXED, []) is MIXED


@given(st.lists(st.tuples(st.sampled_from(["t4", "a100-80gb", "v100-16gb"]), st.integers(1, 2)), max_size=4))
def test_what_is_left_is_what_was_not_named(words: list[tuple[str, int]]) -> None:
    taken = dict.fromkeys(counts(MIXED), 0)
    for name, count in words:
        taken[name] += count
    expected = {name: count - taken[name] for name, count in counts(MIXED).items()}
    legal = all(count >= 0 for count in expected.values()) and any(expected.values())
    names = [f"{count} {name}" for name, count in words]
    if legal:
        assert counts(without(MIXED, names)) == {name: count for name, count in expected.items() if count}
    else:
        with pytest.raises(InputError, match=r"cluster\.without"):
            without(MIXED, names)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["t5"], r"'t5' names no nodes of the cluster: t4, a100-80gb, v100-16gb \(nearest valid: t4\)"),
        (["9 t4"], r"'9 t4': t4 has 2 nodes \(nearest valid: 2 t4\)"),
        (["0 t4"], r"'0 t4': t4 has 2 nodes"),
        (["t4", "a100-80gb", "v100-16gb"], "'v100-16gb' leaves no node of "),
        ([""], "'' names no nodes"),
    ],
)
def test_other_words_are_refused(words: list[str], line: str) -> None:
    with pytest.raises(InputError, match=line):
        without(MIXED, words)


def test_a_run_file_leaves_nodes_out_and_another_cluster_has_its_own(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('[model]\npreset = "gpt-1m"\n[cluster]\nuse = "8xt4+8xl4"\nwithout = ["t4"]\n')
    run = load_run(path)
    assert counts(cluster_of_run(run)) == {"l4": 1}
    path.write_text(run.to_toml())
    assert load_run(path).cluster == run.cluster
    assert counts(cluster_of_run(naming(run, on="4xt4"))) == {"t4": 1}
    plain = parse_run({"model": {"preset": "gpt-1m"}})
    assert "without" not in plain.to_toml()
