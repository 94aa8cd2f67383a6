"""The layers that other stacks give to the stages of a pipeline."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.doors.explain.megatron import stages_of
from weft.doors.explained import explain_text
from weft.doors.implied import Answers
from weft.doors.stage_splits import EQUAL_BLOCKS, StageSplit

pytestmark = pytest.mark.pure

MEGATRON = (
    "torchrun --nproc-per-node 8 pretrain_gpt.py --pipeline-model-parallel-size 2 --num-layers 24 "
    "--hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --max-position-embeddings 1024 "
    "--micro-batch-size 1 --global-batch-size 64 --bf16 --vocab-size 32000 --use-distributed-optimizer "
)


@given(
    devices=st.integers(1, 6),
    loops=st.integers(1, 3),
    each=st.integers(1, 5),
    rest=st.integers(0, 5),
    split=st.sampled_from(
        [EQUAL_BLOCKS, StageSplit(counts_embedding=1, counts_head=1), StageSplit(counts_head=1)]
    ),
)
def test_all_layers_are_dealt_out_and_nearly_equally(
    devices: int, loops: int, each: int, rest: int, split: StageSplit
) -> None:
    blocks = each * devices * loops + rest
    layers = split.of(blocks, devices, loops)
    assert len(layers) == devices * loops
    assert sum(layers) == blocks + 2
    counted = list(layers)
    counted[0] -= not split.counts_embedding
    counted[-1] -= not split.counts_head
    assert max(counted) - min(counted) <= 1
    assert counted == sorted(counted, reverse=True)


def test_the_ends_have_their_own_numbers_of_blocks() -> None:
    assert StageSplit(first=3, last=1).of(24, 4, 1) == (4, 10, 10, 2)
    assert StageSplit(last=4).of(16, 2, 2) == (7, 2, 6, 3)
    assert StageSplit(layers=(5, 1)).of(99, 2, 1) == (5, 1)
    # Megatron-LM: an embedding that is accounted for is a layer of the first stage.
    assert StageSplit(counts_embedding=1, counts_head=1).of(22, 4, 1) == (6, 6, 6, 6)


@pytest.mark.parametrize(
    ("layout", "stages"),
    [
        ("Et*3|t*2L", ["Ettt", "ttL"]),
        ("E|(t|)*3,m|m||L", ["E", "t", "t", "t", "m", "m", "", "L"]),
        ("E(t|t)*2|L", ["Et", "tt", "t", "L"]),
        ("E((t|)*2t|)*2L", ["Et", "t", "t", "t", "t", "t", "L"]),
        ("Et|tL", ["Et", "tL"]),
    ],
)
def test_a_layout_of_megatron_lm_is_written_out(layout: str, stages: list[str]) -> None:
    assert stages_of(layout) == stages


def test_a_layout_of_very_many_layers_ends() -> None:
    assert len(stages_of("((t*99999)*99999|)*99999")[0]) <= 100_000


def layers_of(*options: str) -> list[int]:
    found = explain_text(MEGATRON + " ".join(options), "run.sh", Answers(on="8xa100-80gb"), search=False)
    assert found.plan is not None, found.findings
    return [len(stage.layers) for stage in found.plan.plan.stages]


def test_a_file_of_megatron_lm_is_predicted_with_its_own_stages() -> None:
    assert layers_of() == [13, 13]
    assert layers_of("--pipeline-model-parallel-layout", '"Et*20|t*4L"') == [21, 5]
    assert layers_of("--decoder-last-pipeline-num-layers", "8") == [17, 9]
    assert layers_of("--num-layers-per-virtual-pipeline-stage", "6") == [7, 6, 6, 7]
    with_ends = ("--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split")
    assert layers_of(*with_ends) == [13, 13]


def test_stages_of_other_sums_are_wrong() -> None:
    text = MEGATRON + "--pipeline-model-parallel-layout Et*20|t*5L"
    found = explain_text(text, "run.sh", Answers(on="8xa100-80gb"), search=False)
    assert found.plan is None
    assert any("the stages are given 27 layers, the model has 26" in str(one) for one in found.findings)


TORCHTITAN = """
[training]
local_batch_size = 8
seq_len = 1024
[parallelism]
pipeline_parallel_degree = 2
pipeline_parallel_schedule = "1F1B"
{parts}
"""


def test_a_file_of_torchtitan_is_predicted_with_its_own_stages() -> None:
    def layers_of(parts: str) -> list[int]:
        answers = Answers(model="llama-1b", on="8xa100-80gb")
        found = explain_text(TORCHTITAN.format(parts=parts), "t.toml", answers, search=False)
        assert found.plan is not None, found.findings
        return [len(stage.layers) for stage in found.plan.plan.stages]

    assert layers_of("") == [9, 9]
    names = [f"layers.{number}" for number in range(16)]
    parts = [["tok_embeddings", *names[:11]], [*names[11:], "norm", "output"]]
    # An end that counts as no layer is beside those of its stage.
    assert layers_of("pipeline_parallel_first_stage_less_layers = 0") == [10, 8]
    assert layers_of(f"module_fqns_per_model_part = {parts}".replace("'", '"')) == [12, 6]
