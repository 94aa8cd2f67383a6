"""Rows with low-rank products: one process freezes the same layers."""

from __future__ import annotations

from dataclasses import dataclass, replace

from asked_methods import with_low_rank
from decoder_models import tiny_decoder
from equality_table import Row
from methods.rows.gradient_norm import Clips
from methods.rows.micro_batch_norms import TellsNorms
from methods.rows.tensor_collectives import OVERLAPPED
from one_process import Method
from small_plans import divisible, tiny
from torch import nn

from weft.describe.block_products import block_products, products_in
from weft.describe.plan import Choice
from weft.methods.lora.options import Base
from weft.methods.lora.runtime.few_bits import PackedWeight
from weft.run.runtime import RankRuntime
from weft.run.stage.stage_module import StageModule


@dataclass(frozen=True)
class LowRank(Method):
    """Low-rank products beside the linear layers of these names, or all."""

    targets: tuple[str, ...] = ()
    base: Base | None = None
    dropout: float = 0.0

    @property
    def choices(self) -> tuple[Choice, ...]:
        return (with_low_rank(4, 8.0, *self.targets, base=self.base, dropout=self.dropout),)

    def check(self, runtime: RankRuntime) -> None:
        for module in runtime.stages.values():
            packed = [one for one in module.modules() if isinstance(one, PackedWeight)]
            assert len(packed) == (0 if self.base is None else _linear_layers(module))
            trained = {name for name, one in module.named_parameters() if one.requires_grad}
            assert trained == {name for name, _ in module.named_parameters() if ".lora_" in name}
        assert sum(bucket.flat.numel() for bucket in runtime.buckets.values()) < 50_000


def _linear_layers(module: nn.Module) -> int:
    assert isinstance(module, StageModule)
    products = block_products(module.config)
    return sum(len(products_in(module.config, index, products)) for index in module.block_indices)


ALL, SOME = LowRank(), LowRank(("q_proj", "v_proj"))
NF4, INT8 = LowRank(base="nf4"), LowRank(("q_proj", "v_proj"), base="int8")
GPT, LLAMA = tiny(layers=4), tiny("llama", layers=4)
WIDE_GPT, WIDE_LLAMA = divisible("gpt"), divisible("llama")
# Two tensor ranks divide the inner sides of products into whole blocks of 64.
BLOCKS_GPT, BLOCKS_LLAMA = (
    replace(one, hidden=128, feed_forward=256, decoder=None) for one in (WIDE_GPT, WIDE_LLAMA)
)
# Its first block has experts, whose linear layers have no low-rank products beside them.
MIXTURE = tiny_decoder(
    "qwen2_moe", num_hidden_layers=2, vocab_size=19, max_position_embeddings=8, mlp_only_layers=[1]
)
ROWS = (
    Row(MIXTURE, "1f1b", pp=2, methods=(ALL, Clips(0.001))),
    Row(GPT, "1f1b", pp=2, steps=3, methods=(ALL, Clips(0.001))),
    Row(tiny(layers=4, tied=True), "1f1b", pp=2, steps=3, methods=(ALL,)),
    Row(LLAMA, "1f1b", dp=2, steps=3, methods=(SOME,)),
    # The first and the last stage have no block: nothing in them is trained.
    Row(LLAMA, "1f1b", pp=3, layers=(1, 4, 1), steps=3, methods=(ALL,)),
    Row(LLAMA, "zb-h1", pp=3, layers=(1, 4, 1), steps=3, methods=(SOME,)),
    Row(LLAMA, "zb-v", pp=2, loops=2, steps=3, methods=(ALL,)),
    Row(LLAMA, "breadth-first", pp=2, loops=2, recompute="full", steps=3, methods=(ALL,)),
    Row(LLAMA, "1f1b", pp=2, recompute="selective", steps=3, methods=(SOME,)),
    Row(LLAMA, "1f1b", dp=2, sharding="zero-1", steps=3, methods=(ALL,)),
    Row(LLAMA, "1f1b", dp=2, pp=2, sharding="zero-2", steps=3, methods=(ALL,)),
    Row(WIDE_LLAMA, "1f1b", tp=2, steps=3, methods=(ALL,)),
    Row(WIDE_GPT, "1f1b", tp=2, steps=3, methods=(ALL, Clips(0.001))),
    Row(WIDE_GPT, "1f1b", dp=2, unlike=((2,), (1,)), steps=3, methods=(ALL, Clips(0.001))),
    Row(WIDE_LLAMA, "1f1b", tp=2, pp=2, recompute="full", steps=3, methods=(SOME,)),
    Row(WIDE_LLAMA, "1f1b", tp=2, chunks="by size", steps=3, methods=(ALL,)),
    Row(WIDE_LLAMA, "1f1b", tp=2, steps=3, methods=(ALL, OVERLAPPED)),
    Row(WIDE_LLAMA, "1f1b", cp=2, steps=3, methods=(ALL,)),
    Row(LLAMA, "1f1b", pp=2, precision="bf16", steps=3, tolerance=0.05, methods=(ALL,)),
    Row(LLAMA, "1f1b", pp=2, chunks=8, steps=3, methods=(ALL, TellsNorms())),
    Row(tiny_decoder("phi3"), "1f1b", pp=2, steps=3, methods=(ALL,)),
    Row(tiny_decoder("gpt_neox"), "1f1b", pp=2, steps=3, methods=(ALL,)),
    Row(LLAMA, "1f1b", pp=2, dp=2, steps=3, evaluates=True, methods=(LowRank(dropout=0.3),)),
    Row(GPT, "zb-h1", pp=2, steps=3, methods=(LowRank(dropout=0.3),)),
    Row(WIDE_LLAMA, "1f1b", tp=2, pp=2, steps=3, methods=(LowRank(dropout=0.3),)),
    Row(WIDE_GPT, "1f1b", tp=2, steps=3, methods=(LowRank(dropout=0.3),)),
    Row(WIDE_LLAMA, "1f1b", cp=2, steps=3, methods=(LowRank(dropout=0.3),)),
    Row(LLAMA, "1f1b", pp=2, recompute="full", steps=3, methods=(LowRank(("q_proj",), dropout=0.3),)),
    Row(LLAMA, "1f1b", pp=2, steps=3, methods=(NF4,)),
    Row(LLAMA, "zb-h1", pp=3, layers=(1, 4, 1), steps=3, methods=(INT8,)),
    Row(GPT, "1f1b", dp=2, recompute="full", sharding="zero-2", steps=3, methods=(NF4,)),
    Row(LLAMA, "1f1b", pp=2, precision="bf16", steps=3, tolerance=0.05, methods=(NF4,)),
    Row(BLOCKS_LLAMA, "1f1b", tp=2, pp=2, steps=3, methods=(NF4,)),
    Row(BLOCKS_GPT, "1f1b", tp=2, recompute="selective", steps=3, methods=(LowRank(base="int8"),)),
    Row(BLOCKS_LLAMA, "1f1b", cp=2, steps=3, methods=(NF4,)),
)
