"""A log of what replicas send of weights: torn ends, files since checkpoints, and weights to the bit."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from thread_group import ThreadGroup, in_groups
from torch import nn

from weft.methods.sdp4bit.options import Sdp4BitOptions
from weft.methods.sdp4bit.runtime import QuantisedSharding
from weft.run.state.bucket import FlatLayout
from weft.run.state.shards import ReplicaWeights
from weft.sync.base import Meeting
from weft.training.checkpoint.manifest import generations
from weft.training.checkpoint.weight_log import LogHeader, WeightLog, log_file, read_log
from weft.training.checkpoint.weight_replay import roll_forward

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}


def module_of(sizes: list[int]) -> nn.ParameterList:
    return nn.ParameterList([nn.Parameter(torch.linspace(-1.0, 1.0, size)) for size in sizes])


def trained(
    folder: Path, stages: list[list[int]], replicas: int, steps: int, options: Sdp4BitOptions, precision: str
) -> list[list[torch.Tensor]]:
    """By stage, the weights that all replicas have in each step; every replica logs what it sends."""

    def work(group: ThreadGroup) -> list[list[torch.Tensor]]:
        generator, gatherer = torch.Generator().manual_seed(group.place), QuantisedSharding(options)
        places = dict.fromkeys(range(len(stages)), (group.place, group.size))
        log = WeightLog(folder, LogHeader(plan_id="plan", rank=group.place, places=places))
        log.begin(0)
        found = []
        for stage, sizes in enumerate(stages):
            layout = FlatLayout.of(module_of(sizes), replicas)
            flat = layout.flatten(PRECISIONS[precision])
            weights = ReplicaWeights(
                layout,
                flat,
                layout.share(group.place),
                gatherer,
                Meeting(group=group, stage=stage, replica=group.place, seed=3),
            )
            weights.keep, shown = log.keep, [flat.clone()]
            for step in range(steps):
                weights.own += 0.1 * torch.randn(weights.own.shape, generator=generator)
                weights.outdate(step)
                weights.gather(group)
                shown.append(flat.clone())
            found.append(shown)
        log.close()
        return found

    return in_groups(replicas, work)[0]


@given(
    stages=st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=4), min_size=1, max_size=2),
    replicas=st.integers(2, 3),
    steps=st.integers(0, 3),
    weights=st.sampled_from(["difference", "direct"]),
    bits=st.sampled_from([3, 4, 8]),
    precision=st.sampled_from(sorted(PRECISIONS)),
)
def test_replayed_weights_have_the_bits_of_the_run_in_every_step(
    stages: list[list[int]], replicas: int, steps: int, weights: str, bits: int, precision: str
) -> None:
    options = Sdp4BitOptions(weights=weights, weight_bits=bits, weight_group=24)
    with TemporaryDirectory() as name:
        live = trained(Path(name), stages, replicas, steps, options, precision)
        logs = [read_log(log_file(Path(name), 0, rank)) for rank in range(replicas)]
        for stage, shown in enumerate(live):
            flat = shown[0].clone()
            for step in range(1, steps + 1):
                payloads = [log.payloads[step, stage] for log in logs if log is not None]
                assert len(payloads) == replicas
                roll_forward(flat, QuantisedSharding(options), [payloads])
                assert torch.equal(flat, shown[step])


def written(folder: Path, steps: int = 3) -> Path:
    log = WeightLog(folder, LogHeader(plan_id="plan", rank=0, places={0: (0, 2)}))
    log.begin(0)
    for step in range(1, steps + 1):
        log.keep(step, 0, torch.full((8 * step,), step, dtype=torch.uint8))
    log.close()
    assert log.step_bytes == pytest.approx(8 * (steps + 1) / 2)
    return log_file(folder, 0, 0)


def test_a_torn_end_is_dropped_wherever_it_is_torn(tmp_path: Path) -> None:
    file = written(tmp_path)
    content, whole = file.read_bytes(), read_log(file)
    assert whole is not None
    assert [step for step, _ in whole.payloads] == [1, 2, 3]
    ends = [one.offset + one.length for one in whole.payloads.values()]
    header = content.index(b"\n") + 1
    for length in range(len(content)):
        file.write_bytes(content[:length])
        torn = read_log(file)
        assert (torn is None) == (length < header)
        if torn is not None:
            assert len(torn.payloads) == sum(end <= length for end in ends)
            assert all(one.read().unique().tolist() == [step] for (step, _), one in torn.payloads.items())


def test_a_changed_byte_ends_the_log(tmp_path: Path) -> None:
    file = written(tmp_path)
    content, whole = file.read_bytes(), read_log(file)
    assert whole is not None
    second = whole.payloads[1, 0].offset + whole.payloads[1, 0].length
    for place in range(second, whole.payloads[2, 0].offset + whole.payloads[2, 0].length):
        file.write_bytes(content[:place] + bytes([content[place] ^ 0x55]) + content[place + 1 :])
        damaged = read_log(file)
        assert damaged is not None
        assert set(damaged.payloads) == {(1, 0)}


def test_checkpoints_prune_logs_and_a_resumed_run_begins_its_log_anew(tmp_path: Path) -> None:
    logs = [WeightLog(tmp_path, LogHeader(plan_id="plan", rank=rank, places={})) for rank in range(2)]

    def begin(step: int) -> list[int]:
        for log in logs:
            log.begin(step)
        return [step for step, _ in generations(tmp_path)]

    for log in logs:
        log.keep(1, 0, torch.zeros(4, dtype=torch.uint8))
    assert not tmp_path.joinpath("step-00000000").exists()
    assert [begin(step) for step in (0, 3, 6)][-1] == [6, 3, 0]
    logs[1].prune(3)
    assert begin(9) == [9, 6, 3, 0]
    logs[0].prune(3)
    assert begin(6) == [6, 3]
