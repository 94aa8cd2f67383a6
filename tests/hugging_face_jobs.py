"""Tiny models as Hugging Face folders, and short runs of them."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import convolutional_jobs as convolutional
import numpy as np
import torch
from decoder_models import tiny_decoder
from small_plans import make_plan, tiny
from transformers import AutoModelForCausalLM, AutoModelForImageClassification, AutoModelForMaskedLM

from weft.describe.catalogue import catalogue
from weft.describe.cluster import Cluster, Link, NodeGroup
from weft.describe.families import layer_graph
from weft.describe.job import Job
from weft.describe.model import ModelConfig, image_tokens
from weft.describe.models import CONFIG_FILE, resolve_model
from weft.describe.plan import Plan
from weft.describe.plan_file import PlanFile
from weft.describe.run_file import load_run, parse_run
from weft.planning.planned_job import PlannedJob
from weft.planning.problem import Problem
from weft.run.launch.worker_start import WorkerContext
from weft.run.stage.build import build_stage
from weft.training.interchange.hugging_face_families import hugging_face_family
from weft.training.loop import train

FAMILIES = ("gpt", "llama", "bert", "vit", "resnet")
TASKS = {"bert": "masked-lm", "vit": "image-classification", "resnet": "image-classification"}
PRECISIONS = {"fp32": torch.float32, "fp64": torch.float64}


def small(family: str, *, tied: bool = False) -> ModelConfig:
    """Two layers that know every byte, or ten kinds of images; other families are types of decoders."""
    if family == "resnet":
        return convolutional.tiny(family, channels=1, vocabulary=10, depths=(1, 1))
    if family not in FAMILIES:
        return tiny_decoder(family, vocab_size=256, num_hidden_layers=2, tie_word_embeddings=tied)
    config = tiny(family, layers=2, tied=tied)
    if family == "vit":
        sizes = {"image_size": 8, "patch_size": 4, "channels": 1}
        return replace(config, key_value_heads=2, vocabulary=10, sequence=image_tokens(8, 4), **sizes)
    if family == "bert":
        return replace(config, key_value_heads=2, vocabulary=260)
    return replace(config, vocabulary=256)


def model_folder(path: Path, config: ModelConfig, **changes: Any) -> Path:
    """A folder with a `config.json` and no weights; `changes` are made to the configuration."""
    path.mkdir(parents=True)
    configuration = hugging_face_family(config).configuration(config)
    record = {**configuration.to_dict(), **changes}
    (path / CONFIG_FILE).write_text(json.dumps(record))
    return path


def whole_model(config: ModelConfig, seed: int = 3, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """As it evaluates."""
    return build_stage(config, range(config.layers + 2), seed, dtype).eval()


def inputs_of(config: ModelConfig) -> torch.Tensor:
    """Three samples: tokens, or pixels."""
    generator = torch.Generator().manual_seed(11)
    if config.reads_images:
        return torch.rand(3, config.channels, config.image_size, config.image_size, generator=generator)
    return torch.randint(config.vocabulary, (3, config.sequence), generator=generator)


def transformers_logits(folder: Path, config: ModelConfig, dtype: torch.dtype) -> torch.Tensor:
    """What `transformers` computes from a folder, as a user would load it."""
    auto = {"bert": AutoModelForMaskedLM} | dict.fromkeys(("vit", "resnet"), AutoModelForImageClassification)
    model_class = auto.get(config.family, AutoModelForCausalLM)
    model = model_class.from_pretrained(folder, dtype=dtype, local_files_only=True)
    inputs = inputs_of(config)
    with torch.no_grad():
        logits: torch.Tensor = model(inputs.to(dtype) if config.reads_images else inputs).logits
    return logits


def write_run(
    run_dir: Path, folder: Path, text: Path, *, precision: str, weights: bool, **layout: Any
) -> Plan:
    """The files of a run directory that its workers and an export read."""
    run_dir.mkdir()
    config = resolve_model(str(folder))
    family = config.family
    record = {
        "model": {"hf": str(folder), "weights": weights},
        "task": {
            "kind": TASKS.get(family, "causal-lm"),
            "data": "digits" if config.reads_images else str(text),
        },
        "train": {"steps": 4, "seed": 5},
        "optimizer": {"learning_rate": 0.01, "warm_up_steps": 2},
        "checkpoint": {"every": 2, "keep": 2},
    }
    plan = make_plan(config, precision=precision, schedule="1f1b", **layout)
    (run_dir / "run.toml").write_text(parse_run(record).to_toml())
    (run_dir / "plan.json").write_text(PlanFile(plan).to_json())
    return plan


def write_text(path: Path) -> Path:
    words = np.random.default_rng(0).choice([b"warp ", b"weft ", b"loom\n"], 2000)
    path.write_bytes(b"".join(words.tolist()))
    return path


def run_training(rank: int, ranks: int, run_dir: Path, plan: Plan) -> int:
    """One rank of the run in `run_dir`."""
    os.environ["WEFT_HOME"] = str(run_dir.parent / "home")
    run = load_run(run_dir / "run.toml")
    config = resolve_model(run.model.hf or "")
    group = NodeGroup(name="all", count=1, device=catalogue()["t4"].device, devices=4, link=Link(1e9, 1e-5))
    job = Job(
        graph=layer_graph(config),
        cluster=Cluster(name="test", groups=(group,)),
        global_batch=plan.global_batch,
        sequence=plan.sequence,
    )
    planned = PlannedJob(run=run, problem=Problem(job=job, model=config), plan=plan)
    return train(planned, run_dir, WorkerContext(rank, ranks, rank, "cpu", 1))


def result_of(run_dir: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((run_dir / "result.json").read_text())
    return record
