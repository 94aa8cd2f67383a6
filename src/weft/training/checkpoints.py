"""Checkpoints of a run, to be resumed under the same plan.

    checkpoints/step-00000100/
      shard-00001-model-00001-of-00001.safetensors ...   every rank's tensors
      state.json                                          scalars: step, seed, plan, data
      manifest.json                                       size and SHA-256 of every other file

Tensors are written and read by torch's distributed checkpointing over the Hugging Face safetensors storage.
It was preferred to files of our own because it stores a replicated tensor once, spreads the work over the
replicas, copies straight into the parameters when it reads, and keeps working when tensors become sharded.
It reads no pickle: the storage takes its metadata from the headers of the safetensors files.

Names are the model's own: `transformer.h.0.ln_1.weight` is a parameter,
`optimizer/transformer.h.0.ln_1.weight/exp_avg` a state of its optimizer. Every leaf is a tensor, because the
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
    *,
    keep: int,
) -> Path:
    """Write a checkpoint of all ranks' stages and keep the newest `keep`; every rank calls it.

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
    tensors = _tensors(stages) | _optimizer_tensors(stages, optimizers)
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
    path: Path, stages: Mapping[int, nn.Module], optimizers: Mapping[int, torch.optim.Optimizer]
) -> TrainingState:
    """Fill this rank's parameters, buffers and optimizer states from a verified checkpoint.

    Every rank calls it.

    Raises:
        RunError: on every rank, when a tensor is missing or has another shape.
    """
    with together():
        state = read_state(path)
        reader = HuggingFaceStorageReader(str(path))
        known = reader.read_metadata().state_dict_metadata
    targets = _tensors(stages)
    slots = _optimizer_slots(stages, optimizers, known)
    tensors = targets | {key: tensor for key, (_, _, tensor) in slots.items()}
    _distributed(path, lambda: read_tensors(tensors, storage_reader=HuggingFaceStorageReader(str(path))))
    for optimizer_state, leaf, tensor in slots.values():
        optimizer_state[leaf] = tensor
    return state


def _tensors(stages: Mapping[int, nn.Module]) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for module in stages.values()
        for name, tensor in module.state_dict(keep_vars=False).items()
    }


def _optimizer_tensors(
    stages: Mapping[int, nn.Module], optimizers: Mapping[int, torch.optim.Optimizer]
) -> dict[str, torch.Tensor]:
    return {
        f"optimizer/{name}/{leaf}": value
        for stage, module in stages.items()
        for name, parameter in module.named_parameters()
        for leaf, value in optimizers[stage].state.get(parameter, {}).items()
    }


def _optimizer_slots(
    stages: Mapping[int, nn.Module], optimizers: Mapping[int, torch.optim.Optimizer], known: Mapping[str, Any]
) -> dict[str, tuple[dict[str, Any], str, torch.Tensor]]:
    """Room for the optimizer states that the checkpoint has of this rank: (where, leaf, tensor) by name.

    Optimizers make their states at their first step, so a fresh one has none to fill.
    """
    owners = {
        name: (optimizers[stage], parameter)
        for stage, module in stages.items()
        for name, parameter in module.named_parameters()
    }
    slots = {}
    for key, metadata in known.items():
        head, _, rest = key.partition("/")
        name, _, leaf = rest.rpartition("/")
        if head == "optimizer" and name in owners:
            optimizer, parameter = owners[name]
            # AdamW keeps its step count, a scalar, on the host.
            device = parameter.device if metadata.size else torch.device("cpu")
            tensor = torch.empty(metadata.size, dtype=metadata.properties.dtype, device=device)
            slots[key] = (optimizer.state[parameter], leaf, tensor)
    return slots


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
