"""Law: blocks with windows attend to those tokens only, in every layout, as one process does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from methods.test_micro_batch_norms_runs import weights
from pool import WorkerPool
from small_jobs import SEED, descent, make_runtime
from tensor_jobs import DividedLoss, divisible, samples_of, tensor_plan, whole_loss, whole_parameters
from transformers import MistralConfig, MistralForCausalLM

from weft.cli.main import run
from weft.describe.families import layer_graph
from weft.describe.layer_choices import with_choices
from weft.describe.model import ModelConfig
from weft.describe.plan import LayerChoice, Plan
from weft.errors import InputError
from weft.methods.attention_window.options import NAME
from weft.methods.attention_window.runtime import attend, give_window
from weft.planning.compile import compile_plan
from weft.program.verify import require_valid
from weft.run.families.llama import llama_config
from weft.run.stages import build_stage

STEPS = 2
Outcome = tuple[list[float], dict[str, torch.Tensor]]


def seen(tokens: int, window: int) -> torch.Tensor:
    """Which keys each query reads, shape (tokens, tokens)."""
    return torch.ones(tokens, tokens, dtype=torch.bool).tril().triu(1 - window)


@settings(max_examples=40, deadline=None)
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
        give_window(whole, layer, window)
    sizes = llama_config(config).to_dict()
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


def windowed(plan: Plan, **layers_of: tuple[int, ...]) -> Plan:
    """The plan with windows, such as ``w3=(1,)``."""
    choices = tuple(
        LayerChoice(name=NAME, layers=layers, value=int(name[1:])) for name, layers in layers_of.items()
    )
    return plan.model_copy(update={"layer_choices": choices})


def alone(rank: int, ranks: int, config: ModelConfig, plan: Plan) -> Outcome:
    model = build_stage(config, range(config.layers + 2), SEED, torch.float64)
    for choice in plan.layer_choices:
        for layer in choice.layers:
            give_window(model, layer, choice.value)
    optimizer, losses = descent(model), []
    for step in range(STEPS):
        batch, total = samples_of(config, plan, step), 0.0
        for number in range(plan.micro_batches):
            inputs, targets = batch(number)
            loss = whole_loss(model(inputs), targets) / plan.micro_batches
            loss.backward()
            total += loss.item()
        losses.append(total)
        optimizer.step()
        optimizer.zero_grad()
    return losses, {name: value.detach().clone() for name, value in model.named_parameters()}


def train(rank: int, ranks: int, config: ModelConfig, plan: Plan) -> Outcome:
    program = compile_plan(plan, with_choices(layer_graph(config), plan.layer_choices))
    runtime = make_runtime(rank, config, plan, program, loss_fn=DividedLoss())
    losses = [runtime.step(step, samples_of(config, plan, step)).loss for step in range(STEPS)]
    parameters = whole_parameters(runtime)
    runtime.close()
    return losses, parameters


def recomputing(plan: Plan, how: str) -> Plan:
    stages = tuple(stage.model_copy(update={"recompute": how}) for stage in plan.stages)
    return plan.model_copy(update={"stages": stages})


@pytest.mark.processes
@pytest.mark.parametrize(
    ("family", "tp", "options", "recompute"),
    [
        ("gpt", 1, {"pp": 2, "schedule": "1f1b"}, "full"),
        ("llama", 1, {"pp": 2, "schedule": "zb-h1"}, "selective"),
        ("llama", 1, {"dp": 2, "loops": 2, "schedule": "breadth-first"}, "none"),
        ("gpt", 2, {}, "none"),
    ],
)
def test_every_layout_trains_like_one_process(
    worker_pool: WorkerPool, family: str, tp: int, options: dict[str, Any], recompute: str
) -> None:
    config = divisible(family)
    plan = recomputing(windowed(tensor_plan(config, tp=tp, **options), w3=(1,), w5=(2,)), recompute)
    require_valid(compile_plan(plan, with_choices(layer_graph(config), plan.layer_choices)))
    [(expected_losses, expected)] = worker_pool.run(alone, config, plan, ranks=1)
    assert expected_losses != worker_pool.run(alone, config, windowed(plan), ranks=1)[0][0]
    seen_names: set[str] = set()
    for losses, parameters in worker_pool.run(train, config, plan, ranks=plan.ranks):
        assert losses == pytest.approx(expected_losses, rel=1e-12)
        for name, value in parameters.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-9, atol=1e-12)
        seen_names |= set(parameters)
    assert seen_names == set(expected)


@pytest.mark.processes
def test_a_window_of_all_tokens_changes_no_bit(worker_pool: WorkerPool) -> None:
    config = replace(divisible("llama"), sequence=8)
    plan = tensor_plan(config, tp=1).model_copy(update={"precision": "fp32"})
    none, all_tokens = (
        worker_pool.run(train, config, windowed(plan, **given_), ranks=1)[0]
        for given_ in ({}, {"w8": (1, 2)})
    )
    assert none[0] == all_tokens[0]
    assert all(torch.equal(value, all_tokens[1][name]) for name, value in none[1].items())


def test_only_blocks_of_known_families_have_windows() -> None:
    with pytest.raises(InputError, match="attention-window: layer 1 is no block of a family that weft knows"):
        give_window(torch.nn.Linear(2, 2), 1, 4)


RUN = """
[model]
preset = "gpt-1m"
[task]
data = "{folder}/text.txt"
sequence = 16
[train]
global_batch = 4
steps = 4
[goal]
contract = "empirical"
[plan]
pp = 2
dp = 1
micro_batch_size = 1
schedule = "1f1b"
[attention-window]
tokens = 5
[attention-window.blocks]
"0" = 3
"""


@pytest.mark.processes
def test_a_run_is_resumed_to_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_HOME", str(tmp_path / "home"))
    (tmp_path / "text.txt").write_text("The sheep of the hills are counted twice. " * 200)
    path = tmp_path / "run.toml"
    path.write_text(RUN.format(folder=tmp_path))
    for name, stops in (("through", (4,)), ("stopped", (2, 4))):
        for steps in stops:
            source = "--resume" if (tmp_path / name).exists() else "--directory"
            assert run(["train", str(path), source, str(tmp_path / name), "--steps", str(steps)]) == 0
    through, stopped = (weights(tmp_path / name) for name in ("through", "stopped"))
    assert through.keys() == stopped.keys()
    assert all(torch.equal(value, stopped[name]) for name, value in through.items())
    assert '"attention-window"' in (tmp_path / "through" / "plan.json").read_text()
