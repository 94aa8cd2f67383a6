"""Checkpoints of a run, and how it goes on from them; any plan of the model can load their tensors.

    checkpoints/step-00000100/
      shard-00001-model-00001-of-00001.safetensors ...   every rank's tensors
      state.json                                          scalars: step, seed, plan, data
      manifest.json                                       size and SHA-256 of every other file

Tensors are written and read by torch's distributed checkpointing over the Hugging Face safetensors storage.
It was preferred to files of our own because it stores a replicated tensor once, spreads the work over the
replicas, and copies straight into the parameters when it reads.
It reads no pickle: the storage takes its metadata from the headers of the safetensors files.

Names are the model's own: `transformer.h.0.ln_1.weight` is a parameter,
`optimizer/transformer.h.0.ln_1.weight/exp_avg` a state of its optimizer. Both are whole, also where replicas
share out what they step: each writes the states that begin in its share. Every leaf is a tensor, because the
storage cannot read back anything else; what is not a tensor stands in `state.json`.

A checkpoint is written to a directory of its own, flushed to the disk, and renamed last: under its final
name it is complete. `weft.training.manifest` checks every byte before anything is loaded.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load as read_tensors
from torch.distributed.checkpoint.state_dict_saver import save as write_tensors

from weft.errors import InputError, RunError, Violation
from weft.run.shards import gather_weights
from weft.training.agreement import from_first_rank, gather, meeting_peers, together
from weft.training.manifest import (
    FORMAT,
    MANIFEST,
    canonical,
    digest_of,
    generation_path,
    generations,
    manifest,
    newest_complete,
)
from weft.training.optimizer_states import NO_SHARDS, Shards, optimizer_slots, optimizer_tensors

STATE = "state.json"
_UNFINISHED = ".saving-"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingState:
    """The scalars of a checkpoint.

    Attributes:
        step: steps done; the sampler's position follows from it.
        seed, plan_id, data: what the run was started with; a run resumes only where they are the same.
        first_loss: held-out loss before the first step, in nats per token.
    """

    step: int
    seed: int
    plan_id: str
    data: str
    first_loss: float


def save(
    directory: Path,
    state: TrainingState,
    stages: Mapping[int, nn.Module],
    optimizers: Mapping[int, torch.optim.Optimizer],
    shards: Shards = NO_SHARDS,
    *,
    keep: int,
) -> Path:
    """Write a checkpoint of all ranks' stages and keep the newest `keep`; every rank calls it.

    `shards` has the stages that this rank steps a share of only; their weights are gathered first.

    Raises:
        RunError: on every rank when one could not write; earlier checkpoints stay as they were.
    """
    final = generation_path(directory, state.step)
    building = directory / f"{_UNFINISHED}{final.name}"
    first_rank = dist.get_rank() == 0
    with together():
        if first_rank:
            for remains in directory.glob(f"{_UNFINISHED}*"):
                shutil.rmtree(remains)
            building.mkdir(parents=True)
            _write(building / STATE, canonical({"format": FORMAT, **asdict(state)}))
    with meeting_peers():
        gather_weights(shards)
        states = optimizer_tensors(stages, optimizers, shards)
    tensors = _tensors(stages) | states
    writer = HuggingFaceStorageWriter(str(building), save_distributed=True)
    _distributed(building, lambda: write_tensors(tensors, storage_writer=writer))
    files = _sizes_and_digests(building)
    with together():
        if first_rank:
            _write(building / MANIFEST, manifest(files))
            _flush_directory(building)
            if final.exists():
                # Resuming went past this step only because what is there is damaged.
                shutil.rmtree(final)
            building.rename(final)
            _flush_directory(directory)
            done = [path for step, path in generations(directory) if step <= state.step]
            for old in done[keep:]:
                shutil.rmtree(old)
    return final


def agree_on_newest(directory: Path) -> tuple[Path | None, list[str]]:
    """`newest_complete` as rank 0 sees it, on every rank.

    Raises:
        RunError: on every rank, when there are checkpoints and none is whole.
    """
    found: tuple[Path | None, list[str]] = (None, [])
    with together():
        if dist.get_rank() == 0:
            found = newest_complete(directory)
    agreed: tuple[Path | None, list[str]] = from_first_rank(found)
    return agreed


def read_state(path: Path) -> TrainingState:
    """The scalars of a verified checkpoint.

    Raises:
        RunError: when weft did not write them.
    """
    try:
        record = json.loads((path / STATE).read_bytes())
        if record.pop("format") != FORMAT:
            raise ValueError("another format")
        return TrainingState(**record)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise RunError(f"{path / STATE}: not a training state of format {FORMAT}") from None


def require_same_run(expected: TrainingState, saved: TrainingState, where: str) -> None:
    """Refuse to go on from a checkpoint of another plan, seed or text.

    Raises:
        InputError: one line per difference.
    """
    pairs = {
        "plan": (saved.plan_id, expected.plan_id),
        "seed": (saved.seed, expected.seed),
        "data": (saved.data, expected.data),
    }
    violations = [
        Violation(
            where, f"saved with {name} {old}, this run has {new}; a run resumes with the same", str(old)
        )
        for name, (old, new) in pairs.items()
        if old != new
    ]
    if violations:
        raise InputError(violations)


def load(
    path: Path,
    stages: Mapping[int, nn.Module],
    optimizers: Mapping[int, torch.optim.Optimizer],
    shards: Shards = NO_SHARDS,
) -> TrainingState:
    """Fill this rank's parameters, buffers and optimizer states from a verified checkpoint.

    Every rank calls it. Of what it steps a share of only, `shards`, a rank reads the states of the parameters
    that reach into its share.

    Raises:
        RunError: on every rank, when a tensor is missing or has another shape.
    """
    with together():
        state = read_state(path)
        reader = HuggingFaceStorageReader(str(path))
        known = reader.read_metadata().state_dict_metadata
    targets = _tensors(stages)
    slots = optimizer_slots(stages, optimizers, known, shards)
    tensors = targets | {key: slot.whole for key, slot in slots.items()}
    _distributed(path, lambda: read_tensors(tensors, storage_reader=HuggingFaceStorageReader(str(path))))
    for slot in slots.values():
        slot.fill()
    _fill_copies(stages, optimizers)
    return state


def _fill_copies(stages: Mapping[int, nn.Module], optimizers: Mapping[int, torch.optim.Optimizer]) -> None:
    """Give all parameters of one name on this rank, copies of tied weights, what the last one was given."""
    copies: dict[str, list[tuple[nn.Parameter, torch.optim.Optimizer]]] = {}
    for stage, module in stages.items():
        for name, parameter in module.named_parameters():
            copies.setdefault(name, []).append((parameter, optimizers[stage]))
    for *others, (source, stepper) in copies.values():
        for parameter, optimizer in others:
            parameter.detach().copy_(source.detach())
            state = stepper.state.get(source, {})
            optimizer.state[parameter] = {leaf: value.clone() for leaf, value in state.items()}


def _tensors(stages: Mapping[int, nn.Module]) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for module in stages.values()
        for name, tensor in module.state_dict(keep_vars=False).items()
    }


def _distributed(path: Path, call: Callable[[], Any]) -> None:
    """Run a collective call of torch's checkpointing; its failures come in one line, on every rank."""
    try:
        with meeting_peers():
            call()
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items())
        reason = " ".join(str(cause).split()) or type(cause).__name__
        raise RunError(f"{path}: rank {rank}: {reason}") from error


def _sizes_and_digests(building: Path) -> dict[str, tuple[int, str]]:
    """Size and digest of every file of a checkpoint in the making; each rank reads its share of them."""
    names = sorted(file.name for file in building.iterdir())
    mine: dict[str, tuple[int, str]] = {}
    with together():
        for name in names[dist.get_rank() :: dist.get_world_size()]:
            mine[name] = ((building / name).stat().st_size, digest_of(building / name))
    return {name: entry for part in gather(mine) for name, entry in part.items()}


def _write(path: Path, content: bytes) -> None:
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _flush_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        # Some network file systems cannot flush a directory; the rename is atomic there all the same.
        with suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
