"""Checkpoints do not know of tensor, context and expert ranks: any division passes the same tensors on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from decoder_models import tiny_decoder
from equality_table import Row
from hugging_face_jobs import (
    inputs_of,
    model_folder,
    result_of,
    run_training,
    small,
    transformers_logits,
    whole_model,
    write_run,
    write_text,
)
from pool import WorkerPool
from safetensors.torch import load_file
from saved_checkpoints import save_checkpoint
from small_jobs import make_runtime
from small_plans import divisible, make_program
from tensor_jobs import DividedLoss, samples_of

from weft.describe.model import ModelConfig
from weft.describe.models import resolve_model
from weft.describe.plan import Plan
from weft.describe.plan_file import PlanFile
from weft.errors import RunError
from weft.training.checkpoint import checkpoints
from weft.training.checkpoint.training_state import TrainingState
from weft.training.interchange.export import export
from weft.training.optimizer.optimizers import OptimizerSettings, optimizer_factory

pytestmark = pytest.mark.processes

ADAMW = OptimizerSettings(
    name="adamw", learning_rate=0.01, warm_up_steps=0, betas=(0.9, 0.95), weight_decay=0.2
)


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    return {name: value for file in path.glob("*.safetensors") for name, value in load_file(file).items()}


def pass_on(
    rank: int, ranks: int, config: ModelConfig, plan: Plan, source: Path | None, directory: Path
) -> str:
    """Train a step, or load a checkpoint instead, and save; what loading says when it fails."""
    runtime = make_runtime(
        rank,
        config,
        plan,
        make_program(config, plan),
        loss_fn=DividedLoss(),
        optimizer_factory=optimizer_factory(ADAMW),
    )
    try:
        if source is None:
            runtime.step(0, samples_of(config, plan, 0)).loss  # noqa: B018  (waits for the others)
        else:
            checkpoints.load(source, runtime.stages, runtime.optimizers, runtime.stepped)
        state = TrainingState(
            step=1,
            samples=8,
            seed=0,
            plan_id=plan.plan_id,
            model=config.name,
            precision="fp64",
            data="none",
            first_loss=1.0,
        )
        save_checkpoint(directory, state, runtime.stages, runtime.optimizers, runtime.stepped, keep=1)
    except RunError as error:
        return str(error)
    finally:
        runtime.close()
    return ""


def plans_of(config: ModelConfig) -> list[Plan]:
    pipelined = Row(config, "1f1b", pp=2, tp=2).plan
    shared = Row(config, dp=2, tp=2, sharding="zero-1").plan
    tokens = Row(config, dp=2, cp=2, sharding="zero-3").plan
    both = Row(config, cp=2, tp=2).plan
    alone = Row(config).plan
    return [alone, Row(config, tp=2).plan, both, tokens, both, alone, pipelined, shared, alone]


def plans_with_experts(config: ModelConfig) -> list[Plan]:
    pipelined = Row(config, "1f1b", pp=2, ep=2).plan
    shared = Row(config, dp=2, ep=2, sharding="zero-1").plan
    gathered = Row(config, dp=2, ep=2, sharding="zero-3").plan
    alone = Row(config).plan
    both = Row(config, dp=2, tp=2, ep=2, sharding="zero-2").plan
    tokens = Row(config, cp=2, ep=2).plan
    tensor = Row(config, tp=2).plan
    return [alone, Row(config, ep=2).plan, shared, tensor, gathered, both, tokens, pipelined, alone]


@pytest.mark.parametrize(
    "family",
    [
        pytest.param("gpt", marks=pytest.mark.tables),
        pytest.param("bert", marks=pytest.mark.tables),
        "mixtral",
    ],
)
def test_any_division_passes_the_same_tensors_on(
    worker_pool: WorkerPool, tmp_path: Path, family: str
) -> None:
    mixture = family == "mixtral"
    config = tiny_decoder(family, num_hidden_layers=2) if mixture else divisible(family, tied=True)
    source, first = None, None
    for number, plan in enumerate(plans_with_experts(config) if mixture else plans_of(config)):
        directory = tmp_path / str(number)
        said = worker_pool.run(pass_on, config, plan, source, directory, ranks=plan.ranks)
        assert said == [""] * plan.ranks
        [source] = directory.iterdir()
        found = tensors_of(source)
        first = first or found
        assert set(found) == set(first)
        assert all(torch.equal(value, first[name]) for name, value in found.items())


def test_states_after_a_step_are_those_of_one_rank(worker_pool: WorkerPool, tmp_path: Path) -> None:
    config = divisible("llama")
    *_, shared, alone = plans_of(config)
    plans = {"alone": alone, "shared": shared, "divided": Row(config, tp=2).plan}
    plans |= {"tokens": Row(config, cp=2).plan, "both": Row(config, cp=2, tp=2).plan}
    for name, plan in plans.items():
        worker_pool.run(pass_on, config, plan, None, tmp_path / name, ranks=plan.ranks)
    expected = tensors_of(tmp_path / "alone" / "step-00000001")
    assert any(name.endswith("exp_avg_sq") for name in expected)
    for name in ("shared", "divided", "tokens", "both"):
        found = tensors_of(tmp_path / name / "step-00000001")
        assert set(found) == set(expected)
        # Two replicas train on as many samples more, so that only names and shapes are the same.
        for key, value in found.items():
            assert value.shape == expected[key].shape
            if name != "shared":
                torch.testing.assert_close(value, expected[key], rtol=1e-9, atol=1e-15, msg=key)


def test_a_checkpoint_of_another_width_is_refused(worker_pool: WorkerPool, tmp_path: Path) -> None:
    config = divisible("gpt")
    wider = replace(config, feed_forward=32)
    worker_pool.run(pass_on, config, Row(config).plan, None, tmp_path, ranks=1)
    [source] = tmp_path.iterdir()
    said = worker_pool.run(pass_on, wider, Row(wider, tp=2).plan, source, tmp_path / "no", ranks=2)
    needs = "mlp.c_fc.bias/exp_avg has the shape [24], this model's is [32]"
    assert said == [f"{source}: optimizer/transformer.h.0.{needs}"] * 2


@pytest.fixture(scope="module")
def divided_run(worker_pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two tensor ranks over a vocabulary that they do not divide."""
    home = tmp_path_factory.mktemp("divided")
    config = replace(small("gpt", tied=True), vocabulary=257)
    folder = model_folder(home / "model", config)
    text = write_text(home / "text.txt")
    write_run(home / "run", folder, text, precision="fp64", weights=False)
    plan = Row(resolve_model(str(folder)), "1f1b", tp=2).plan
    (home / "run" / "plan.json").write_text(PlanFile(plan).to_json())
    assert worker_pool.run(run_training, home / "run", plan, ranks=2) == [0, 0]
    return home / "run"


def test_transformers_computes_the_logits_of_a_divided_run(
    divided_run: Path, worker_pool: WorkerPool, tmp_path: Path
) -> None:
    run_dir = divided_run
    config = replace(small("gpt", tied=True), vocabulary=257)
    export(run_dir, tmp_path / "out")
    model = whole_model(config, dtype=torch.float64)
    tensors = tensors_of(run_dir / "checkpoints" / "step-00000004")
    model.load_state_dict({name: tensors[name] for name in model.state_dict()})
    with torch.no_grad():
        ours = model(inputs_of(config))
    assert torch.equal(ours, transformers_logits(tmp_path / "out", config, torch.float64))
    # Another divided run begins where this one has ended.
    text = run_dir.parent / "text.txt"
    write_run(tmp_path / "next", tmp_path / "out", text, precision="fp64", weights=True)
    plan = Row(resolve_model(str(tmp_path / "out")), "1f1b", tp=2).plan
    (tmp_path / "next" / "plan.json").write_text(PlanFile(plan).to_json())
    assert worker_pool.run(run_training, tmp_path / "next", plan, ranks=2) == [0, 0]
    first, last = result_of(tmp_path / "next")["first_loss"], result_of(run_dir)["final_loss"]
    assert first == pytest.approx(last, rel=1e-12)
