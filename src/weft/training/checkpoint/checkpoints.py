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
share out what they step: each writes the states that begin in its share. `method/NAME/...` is what a method
keeps. Where replicas step by themselves these are what stands for all of them, and `rank/NUMBER/...` is what
each rank goes on from. Every leaf is a tensor, because the storage cannot read back anything else; what is
not a tensor stands in `state.json`.

A checkpoint is written to a directory of its own, flushed to the disk, and renamed last: under its final
name it is complete. `weft.training.checkpoint.manifest` checks every byte before anything is loaded.
`weft.training.checkpoint.saver` writes while training goes on.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from weft.describe.run_tables.training import CheckpointTable
from weft.files import flush, naming
from weft.run.methods import MethodState
from weft.training.checkpoint.manifest import (
    MANIFEST,
    digest_of,
    generation_path,
    generations,
    manifest,
    newest_complete,
    untold,
)
from weft.training.checkpoint.optimizer_states import NO_SHARDS, Shards, optimizer_slots, optimizer_tensors
from weft.training.checkpoint.tensor_shares import join_shares, parameter_of, read_shares
from weft.training.checkpoint.tensor_storage import known_tensors, plan_to_write, read_tensors
from weft.training.checkpoint.training_state import STATE, TrainingState, read_state
from weft.training.checkpoint.weight_tensors import fill_copies, model_slots, model_tensors
from weft.training.coordination.agreement import from_first_rank, gather, meeting_peers, together
from weft.training.coordination.attendance import Attendance

# A rank's file is written in one go, which tells nobody how far it is, and one may have far more to write, or
# a slower disk, than another.
SAVE_TIMEOUT_S = 1800.0
LOAD_TIMEOUT_S = CheckpointTable().load_timeout_s
NO_METHODS: Mapping[str, MethodState] = {}
_UNFINISHED = ".saving-"
_RANK = "rank"


def save(
    directory: Path,
    state: TrainingState,
    stages: Mapping[int, nn.Module],
    optimizers: Mapping[int, torch.optim.Optimizer],
    shards: Shards = NO_SHARDS,
    methods: Mapping[str, MethodState] = NO_METHODS,
    *,
    keep: int,
) -> Path:
    """Write a checkpoint of all ranks' stages and keep the newest `keep`; every rank calls it.

    Nothing may change the tensors meanwhile; `weft.training.checkpoint.saver` writes while training goes on.

    Raises:
        RunError: on every rank when one could not write; earlier checkpoints stay as they were.
    """
    write(directory, state, collect(stages, optimizers, shards, methods), keep=keep)
    return generation_path(directory, state.step)


def collect(
    stages: Mapping[int, nn.Module],
    optimizers: Mapping[int, torch.optim.Optimizer],
    shards: Shards = NO_SHARDS,
    methods: Mapping[str, MethodState] = NO_METHODS,
) -> dict[str, torch.Tensor]:
    """What this rank has of a checkpoint, by name: the tensors themselves, not copies. Every rank calls it.

    `shards` has the stages of which this rank steps a share or masters, which stand for the parameters.
    """
    with meeting_peers():
        own = _own_tensors(stages, optimizers, shards)
        agreed, parameters = own, {name: parameter_of(name) for name in own}
        for one in methods.values():
            agreed = one.agreed(agreed, parameters)
        found = join_shares(stages, agreed) | _method_tensors(methods)
        apart = {name: tensor for name, tensor in own.items() if agreed[name] is not tensor}
        return found | _rank_tensors(apart, methods)


def _own_tensors(
    stages: Mapping[int, nn.Module], optimizers: Mapping[int, torch.optim.Optimizer], shards: Shards
) -> Mapping[str, torch.Tensor]:
    return model_tensors(stages, shards) | optimizer_tensors(stages, optimizers, shards)


def _rank_tensors(
    own: Mapping[str, torch.Tensor], methods: Mapping[str, MethodState]
) -> dict[str, torch.Tensor]:
    """What this rank alone has, where replicas differ."""
    kept = {
        f"method/{method}/{name}": tensor
        for method, state in methods.items()
        for name, tensor in state.rank_tensors().items()
    }
    return {f"{_RANK}/{dist.get_rank()}/{name}": tensor for name, tensor in {**own, **kept}.items()}


def _method_tensors(methods: Mapping[str, MethodState]) -> dict[str, torch.Tensor]:
    return {
        f"method/{method}/{name}": tensor
        for method, state in methods.items()
        for name, tensor in state.tensors().items()
    }


def copy_to_host(
    tensors: Mapping[str, torch.Tensor], room: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Copies in host memory, complete when this returns; in the `room` of an earlier copy where they fit."""
    return {name: _room_for(tensor, room.get(name)).copy_(tensor) for name, tensor in tensors.items()}


def _room_for(tensor: torch.Tensor, kept: torch.Tensor | None) -> torch.Tensor:
    if kept is not None and kept.shape == tensor.shape and kept.dtype == tensor.dtype:
        return kept
    return torch.empty(tensor.shape, dtype=tensor.dtype)


def write(
    directory: Path,
    state: TrainingState,
    tensors: Mapping[str, torch.Tensor],
    *,
    keep: int,
    damaged: Collection[Path] = (),
    ranks: Attendance | None = None,
    timeout_s: float = SAVE_TIMEOUT_S,
) -> int:
    """Write what the ranks have collected as one generation, name it last, and return its bytes.

    Every rank calls it, in a thread of its own with `ranks` of its own, which wait no longer than `timeout_s`
    for one that writes nothing. When the generation has its name, the `damaged` ones and all but the newest
    `keep` others are removed.

    Raises:
        RunError: on every rank when one could not write or is late; earlier checkpoints stay as they were.
    """
    final = generation_path(directory, state.step)
    building = directory / f"{_UNFINISHED}{final.name}"
    first_rank = dist.get_rank() == 0
    where = f"{directory}: the checkpoint of step {state.step}"
    group, meet, progress = _waiting(ranks, where, "wrote nothing", timeout_s)
    with together(group, meet):
        if first_rank:
            remove_unfinished(directory)
            building.mkdir(parents=True)
            _write(building / STATE, state.record())
    write_planned = plan_to_write(building, tensors, group)
    with together(group, meet):
        write_planned()
    mine: dict[str, tuple[int, str]] = {}
    with together(group, meet):
        names = sorted(file.name for file in building.iterdir())
        for name in names[dist.get_rank() :: dist.get_world_size()]:
            mine[name] = ((building / name).stat().st_size, digest_of(building / name, progress))
    files = {name: entry for part in gather(mine, group) for name, entry in part.items()}
    with together(group, meet):
        if first_rank:
            _write(building / MANIFEST, manifest(files))
            flush(building)
            if final.exists():
                # Resuming went past this step only because what is there is damaged.
                shutil.rmtree(final)
            building.rename(final)
            flush(directory)
            worthless = set(damaged) - {final}
            whole = [path for _, path in generations(directory) if path not in worthless]
            for old in [*whole[keep:], *worthless]:
                shutil.rmtree(old, ignore_errors=True)
    return sum(size for size, _ in files.values())


def remove_unfinished(directory: Path) -> None:
    """Remove what killed saves have left; only while no save is under way."""
    for remains in directory.glob(f"{_UNFINISHED}*"):
        shutil.rmtree(remains)


def agree_on_newest(
    directory: Path, ranks: Attendance | None = None, *, timeout_s: float = LOAD_TIMEOUT_S
) -> tuple[Path | None, list[str]]:
    """`newest_complete` as rank 0 sees it, on every rank; `ranks` and `timeout_s` as in `load`.

    Raises:
        RunError: on every rank, when there are checkpoints and none is whole, or rank 0 is late.
    """
    found: tuple[Path | None, list[str]] = (None, [])
    group, meet, progress = _waiting(ranks, str(directory), "read nothing", timeout_s)
    with together(group, meet):
        if dist.get_rank() == 0:
            found = newest_complete(directory, progress)
    path, skipped = from_first_rank([found[0] and str(found[0]), found[1]], group)
    return path and Path(path), skipped


def load(
    path: Path,
    stages: Mapping[int, nn.Module],
    optimizers: Mapping[int, torch.optim.Optimizer],
    shards: Shards = NO_SHARDS,
    methods: Mapping[str, MethodState] = NO_METHODS,
    *,
    plan_ids: Collection[str] = (),
    ranks: Attendance | None = None,
    timeout_s: float = LOAD_TIMEOUT_S,
) -> TrainingState:
    """Fill this rank's parameters, buffers and optimizer states from a verified checkpoint.

    Every rank calls it. Of what it steps a share of only, `shards`, a rank reads the states of the parameters
    that reach into its share. What a method keeps is read where the checkpoint has it; a method that was not
    in use then begins anew. Where replicas differed, each goes on with its own under the same plan, of which
    `plan_ids` are all ids; under another one all begin from what stood for all. A rank meets `ranks` when it
    has read all: whoever is there first waits for the others while they read on, and no longer than
    `timeout_s` for one that reads nothing.

    Raises:
        RunError: on every rank, when a tensor is missing or has another shape, or a rank is late or gone.
    """
    group, meet, progress = _waiting(ranks, str(path), "read nothing", timeout_s)
    with together(group, meet):
        state = read_state(path)
        known = known_tensors(path)
        slots = model_slots(stages, shards) | optimizer_slots(stages, optimizers, known, shards)
        kept = {name: tensor for name, tensor in _method_tensors(methods).items() if name in known}
        rooms = {key: slot.whole for key, slot in slots.items()} | kept
        filled = read_shares(path, stages, rooms, progress)
        read_tensors(path, {key: room for key, room in rooms.items() if key not in filled}, progress)
        for slot in slots.values():
            slot.fill()
        fill_copies(stages, optimizers, shards)
        if state.plan_id in plan_ids and _apart(known):
            # The states that a fresh optimizer has not made yet are there now.
            own = _rank_tensors(_own_tensors(stages, optimizers, shards), methods)
            read_tensors(path, {key: room for key, room in own.items() if key in known}, progress)
            fill_copies(stages, optimizers, shards)
        else:
            for one in methods.values():
                one.rebase()
    for stepped in shards.values():
        stepped.publish()
    return state


def has_rank_tensors(path: Path) -> bool:
    """Return whether a checkpoint has what each rank goes on from, beside what stands for all of them.

    Raises:
        RunError: when a file cannot be read.
    """
    return _apart(known_tensors(path))


def _apart(known: Collection[str]) -> bool:
    return any(name.startswith(f"{_RANK}/") for name in known)


def _waiting(
    ranks: Attendance | None, where: str, idle: str, timeout_s: float
) -> tuple[dist.ProcessGroup | None, Callable[[], None], Callable[[], None]]:
    """Where the ranks agree, how they wait for each other, and how one says that it gets on."""
    if ranks is None:
        return None, untold, untold
    return ranks.group, partial(ranks.meet, where, idle, timeout_s), ranks.progress


def _write(path: Path, content: bytes) -> None:
    with naming(path):
        path.write_bytes(content)
        flush(path)
