"""Small scripts that stand for the peers' programs, and answers as these write them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.peer_programs.calculon import Calculon, Question, Said
from benchmarks.peer_programs.program import PeerProgram

HEADING = "rank, cost, node_sequence, device_groups, strategies(dp_deg, tp_deg), batches, layer_partition"
FIRST = "1, 12.5, [<DeviceType.A100: 'a100'>, <DeviceType.T4: 't4'>], [4, 4], [(4, 1), (4, 1)], 2, [0, 3, 6]"
SECOND = "2, 14, (<DeviceType.T4: 't4'>, <DeviceType.A100: 'a100'>), [4, 4], [(2, 2), (2, 2)], 4, [0, 1, 6]"
UNLIKE = "3, 15.0, [<DeviceType.A100: 'a100'>, <DeviceType.T4: 't4'>], [4, 4], [(4, 1), (2, 2)], 2, [0, 3, 6]"
PARTS = {
    "fw_time": 1.0,
    "bw_time": 2.0,
    "recompute_time": 0.5,
    "recomm_exposed_time": 0.25,
    "tp_comm_exposed_time": 0.125,
    "pp_comm_exposed_time": 0.0625,
    "dp_comm_exposed_time": 0.5,
    "bubble_time": 1.5,
    "optim_step_time": 0.0625,
    "fw_offload_exposed_time": 0.0,
    "bw_offload_exposed_time": 0.0,
}
ANSWER = {**PARTS, "total_time": sum(PARTS.values()), "proc_mem_tier1_cap_req": 12e9}


def calculon(folder: Path, body: str) -> PeerProgram:
    """A clone whose command does this; `stats` is where its answer belongs."""
    (folder / "bin").mkdir(exist_ok=True)
    head = "import json, sys\ncommand, application, execution, system, stats = sys.argv[1:]\n"
    (folder / "bin" / "calculon").write_text(head + body)
    return PeerProgram(name="calculon", root=folder, limit_s=30.0)


def says(folder: Path, *asked: Question, body: str) -> tuple[Said, ...]:
    return Calculon(program=calculon(folder, body)).say(asked)


def writing(record: Any) -> str:
    return f"open(stats, 'w').write({json.dumps(record)!r})\n"


def metis(folder: Path, *lines: str, before: str = "") -> PeerProgram:
    """A clone whose program prints these lines."""
    text = "\n".join(lines)
    (folder / "cost_het_cluster.py").write_text(f"{before}\nprint({text!r})\n")
    return PeerProgram(name="metis", root=folder, limit_s=30.0)
