"""Law: blocks with windows attend to those tokens only; rows of the equality table say so of layouts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from equality_table import Row, differences, train
from hypothesis import given
from hypothesis import strategies as st
from methods.rows.attention_window import Windows
from pool import WorkerPool
from small_jobs import SEED
from small_plans import divisible
from stopped_runs import text_run, through_and_stopped
from transformers import MistralConfig, MistralForCausalLM

from weft.errors import InputError
from weft.methods.attention_window.runtime import choose_window
from weft.run.stage.build import build_stage
from weft.run.stage.decoder_parts import decoder_config
from weft.run.stage.windows import attend, give_window

STEPS = 2
Outcome = tuple[list[float], dict[str, torch.Tensor]]


def seen(tokens: int, window: int) -> torch.Tensor:
    """Which keys each query reads, shape (tokens, tokens)."""
    return torch.ones(tokens, tokens, dtype=torch.bool).tril().triu(1 - window)


@given(tokens=st.integers(1, 23), window=st.integers(1, 25), grouped=st.booleans(), samples=st.integers(1, 2))
def test_chunks_give_what_a_mask_over_all_scores_gives(
    tokens: int, window: int, grouped: bool, samples: int
) -> None:
    generator = torch.Generator().manual_seed(tokens * 100 + window)

    def drawn(heads: int) -> torch.Tensor:
        return torch.randn(samples, heads, tokens, 4, generator=generator, dtype=torch.float64)

    given_ = [drawn(4), *(drawn(2 if grouped else 4) for _ in range(2))]
    mine, others = ([one.clone().requires_grad_() for one in given_] for _ in range(2))
    found = attend(*mine, window=window, scale=0.3)
    queries, keys, values = others
    keys, values = (one.repeat_interleave(4 // one.shape[1], 1) for one in (keys, values))
    scores = (queries @ keys.transpose(2, 3) * 0.3).masked_fill(~seen(tokens, window), -torch.inf)
    expected = (scores.softmax(-1) @ values).transpose(1, 2)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    weight = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
    (found * weight).sum().backward()
    (expected * weight).sum().backward()
    for one, other in zip(mine, others, strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("window", [1, 3, 8])
def test_a_llama_with_a_window_is_a_mistral(window: int) -> None:
    config = divisible("llama", sequence=16)
    whole = build_stage(config, range(4), SEED, torch.float64)
    for layer in (1, 2):
        give_window(whole.block(layer), window)
    sizes = decoder_config(config).to_dict()
    names = set(MistralConfig().to_dict()) - {"model_type", "architectures"}
    mistral = MistralForCausalLM(
        MistralConfig(
            **{name: value for name, value in sizes.items() if name in names} | {"sliding_window": window},
            attn_implementation="sdpa",
        )
    ).double()
    mistral.load_state_dict(whole.state_dict(), strict=False)
    tokens = torch.randint(config.vocabulary, (2, 16), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(whole(tokens), mistral(tokens).logits, rtol=1e-9, atol=1e-10)


@pytest.mark.processes
def test_a_window_changes_what_is_trained_and_one_of_all_tokens_no_bit(worker_pool: WorkerPool) -> None:
    none, narrow, all_tokens = (
        Row(divisible("llama"), precision="fp32", methods=methods)
        for methods in ((), (Windows(),), (Windows(((1, 8), (2, 9))),))
    )
    found = {row: worker_pool.run(train, row, row.plan, ranks=1)[0] for row in (none, narrow, all_tokens)}
    assert not any(differences(found[all_tokens], found[none]).values())
    assert max(differences(found[narrow], found[none]).values()) > 1e-3


def test_only_blocks_of_known_families_have_windows() -> None:
    with pytest.raises(InputError, match="attention-window: layer 1 is no block of a family that weft knows"):
        choose_window(torch.nn.Linear(2, 2), 1, 4)


RUN = """
[goal]
contract = "empirical"
[attention-window]
tokens = 5
[attention-window.blocks]
"0" = 3
"""


@pytest.mark.processes
@pytest.mark.usefixtures("own_home")
def test_a_run_is_resumed_to_the_same_bits(tmp_path: Path, worker_pool: WorkerPool) -> None:
    through, _ = through_and_stopped(worker_pool, tmp_path, text_run(tmp_path, RUN), steps=4, stop=2)
    assert '"attention-window"' in (through / "plan.json").read_text()
