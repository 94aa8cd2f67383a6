"""Writing and loading the checkpoints of a run; any plan of the model can load their tensors.

    checkpoints/step-00000100/
      shard-00001-model-00001-of-00001.safetensors ...   every rank's tensors
      state.json                                          scalars: step, seed, plan, data
      manifest.json                                       size and SHA-256 of every other file

torch's distributed checkpointing writes and reads tensors over the Hugging Face safetensors storage. It
stores a replicated tensor once and spreads the work over the replicas. When it reads, it copies straight
into the parameters. It reads no pickle: the metadata is in the headers of the safetensors files.

Names are the model's own: `transformer.h.0.ln_1.weight` is a parameter, and
`optimizer/transformer.h.0.ln_1.weight/exp_avg` is a state of its optimizer. Both are whole tensors, also if
replicas shard the optimizer states: each rank writes the states that begin in its shard. `method/NAME/...`
is a tensor of a method. If replicas differ, these tensors stand for all replicas, and `rank/NUMBER/...`
holds the rank's own tensors to resume from. Every leaf is a tensor, because the storage reads back nothing
else; `state.json` holds the scalars.

A checkpoint is written to a separate directory, flushed to disk, and renamed last: under its final name it
is complete. `weft.training.checkpoint.manifest` checks every byte before a load.
`weft.training.checkpoint.saver` writes checkpoints in the background.
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
from weft.errors import RunError
from weft.files import flush, naming
from weft.run.launch.failures import PeerLostError
from weft.run.launch.nodes import JobNodes
from weft.run.methods import MethodState
from weft.run.state.synchroniser_state import UNSENT
from weft.training.checkpoint.manifest import (
    MANIFEST,
    digest_of,
    generation_path,
    generations,
    manifest,
    newest_complete,
    untold,
)
from weft.training.checkpoint.node_files import newest_among
from weft.training.checkpoint.remote_checkpoints import WaitingRanks, bring_newest, copy_to_storage
from weft.training.checkpoint.remote_storage import RemoteStorage
from weft.training.checkpoint.spread_checkpoint import bring, is_view, remove_views
from weft.training.checkpoint.stage_tensors import (
    NO_SHARDS,
    Shards,
    fill_copies,
    model_slots,
    model_tensors,
    optimizer_slots,
    optimizer_tensors,
)
from weft.training.checkpoint.tensor_shares import join_shares, parameter_of, read_shares
from weft.training.checkpoint.tensor_storage import known_tensors, plan_to_write, read_tensors
from weft.training.checkpoint.training_state import STATE, TrainingState, read_state
from weft.training.coordination.agreement import from_first_rank, gather, meeting_peers, together
from weft.training.coordination.attendance import Attendance, LateRankError

# A rank reports no progress while it writes its file. Some ranks write far more bytes or have slower disks.
SAVE_TIMEOUT_S = 1800.0
LOAD_TIMEOUT_S = CheckpointTable().load_timeout_s
NO_METHODS: Mapping[str, MethodState] = {}
_UNFINISHED = ".saving-"
_RANK = "rank"


def collect(
    stages: Mapping[int, nn.Module],
    optimizers: Mapping[int, torch.optim.Optimizer],
    shards: Shards = NO_SHARDS,
    methods: Mapping[str, MethodState] = NO_METHODS,
) -> dict[str, torch.Tensor]:
    """Return this rank's tensors of a checkpoint by name, not copies; every rank calls it.

    `shards` holds the stages that this rank steps as shards or masters, which replace the parameters here.
    """
    with meeting_peers():
        own = _own_tensors(stages, optimizers, shards)
        agreed, parameters = own, {name: parameter_of(name) for name in own}
        for one in methods.values():
            agreed = one.agreed(agreed, parameters)
        found = join_shares(stages, {**agreed, **_method_tensors(methods)})
        apart = {name: tensor for name, tensor in own.items() if agreed[name] is not tensor}
        return found | _rank_tensors(apart, methods)


def _own_tensors(
    stages: Mapping[int, nn.Module], optimizers: Mapping[int, torch.optim.Optimizer], shards: Shards
) -> Mapping[str, torch.Tensor]:
    return model_tensors(stages, shards) | optimizer_tensors(stages, optimizers, shards)


def _rank_tensors(
    own: Mapping[str, torch.Tensor], methods: Mapping[str, MethodState]
) -> dict[str, torch.Tensor]:
    """Return the tensors of this rank alone by name, for replicas that differ."""
    rank = dist.get_rank()
    kept = {
        rank_tensor(rank, method, name): tensor
        for method, state in methods.items()
        for name, tensor in state.rank_tensors().items()
    }
    return {f"{_RANK}/{rank}/{name}": tensor for name, tensor in own.items()} | kept


def rank_tensor(rank: int, method: str, name: str) -> str:
    """Return the name in a checkpoint of a tensor that a method keeps for one rank alone."""
    return f"{_RANK}/{rank}/method/{method}/{name}"


def _method_tensors(methods: Mapping[str, MethodState]) -> dict[str, torch.Tensor]:
    return {
        f"method/{method}/{name}": tensor
        for method, state in methods.items()
        for name, tensor in state.tensors().items()
    }


def room_for(
    tensors: Mapping[str, torch.Tensor], former: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return tensors of host memory to copy to; reuse those of an earlier copy, `former`, that fit."""
    return {name: _room_for(tensor, former.get(name)) for name, tensor in tensors.items()}


def copy_to_host(tensors: Mapping[str, torch.Tensor], room: Mapping[str, torch.Tensor]) -> None:
    """Copy tensors to their `room`; the host does not wait for an accelerator."""
    for name, tensor in tensors.items():
        room[name].copy_(tensor, non_blocking=True)


def _room_for(tensor: torch.Tensor, kept: torch.Tensor | None) -> torch.Tensor:
    if kept is not None and kept.shape == tensor.shape and kept.dtype == tensor.dtype:
        return kept
    # A device copies to pinned memory several times faster.
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type != "cpu")


def write(
    directory: Path,
    state: TrainingState,
    tensors: Mapping[str, torch.Tensor],
    *,
    keep: int,
    damaged: Collection[Path] = (),
    ranks: Attendance | None = None,
    timeout_s: float = SAVE_TIMEOUT_S,
    nodes: JobNodes | None = None,
    storage: RemoteStorage | None = None,
) -> int:
    """Write the ranks' collected tensors as one generation, name it last, and return its bytes.

    Every rank calls it. In a separate thread it needs separate `ranks`. They wait at most `timeout_s` for a
    rank that writes nothing. After the rename, only the newest `keep` generations not `damaged` stay.

    If `nodes` have run directories apart, each keeps the files of its own ranks, and the manifest of all.
    With a `storage`, the generation is copied there, too, before any earlier one goes.

    Raises:
        RunError: on every rank if one rank cannot write or is late; earlier checkpoints stay unchanged.
    """
    final = generation_path(directory, state.step)
    building = directory / f"{_UNFINISHED}{final.name}"
    nodes = nodes or JobNodes.one(dist.get_rank(), dist.get_world_size())
    leads = nodes.leads_folder
    where = f"{directory}: the checkpoint of step {state.step}"
    group, meet, progress = _waiting(ranks, where, "wrote nothing", timeout_s)
    with together(group, meet):
        if leads:
            remove_unfinished(directory)
            building.mkdir(parents=True)
            _write(building / STATE, state.record())
    write_planned = plan_to_write(building, tensors, group)
    with together(group, meet):
        write_planned()
    mine: dict[str, tuple[int, str]] = {}
    with together(group, meet):
        names = sorted(file.name for file in building.iterdir())
        for name in names[nodes.folder.index(nodes.rank) :: len(nodes.folder)]:
            mine[name] = ((building / name).stat().st_size, digest_of(building / name, lambda _: progress()))
    files = {name: entry for part in gather(mine, group) for name, entry in part.items()}
    with together(group, meet):
        if leads:
            _write(building / MANIFEST, manifest(files))
            flush(building)
            if final.exists():
                # The run resumed before this step only because this checkpoint is damaged.
                shutil.rmtree(final)
            building.rename(final)
            flush(directory)
    if storage is not None:
        waiting = WaitingRanks(nodes, group, meet, progress)
        copy_to_storage(storage, directory, state.step, mine, keep, waiting)
    # No directory loses an earlier checkpoint before all have this one.
    with together(group, meet):
        if leads:
            worthless = set(damaged) - {final}
            whole = [path for _, path in generations(directory) if path not in worthless]
            for old in [*whole[keep:], *worthless]:
                shutil.rmtree(old, ignore_errors=True)
    return sum(size for size, _ in files.values())


def remove_unfinished(directory: Path) -> None:
    """Remove the unfinished directories of killed saves; call it only while no save is under way."""
    for remains in directory.glob(f"{_UNFINISHED}*"):
        shutil.rmtree(remains)


def agree_on_newest(
    directory: Path,
    ranks: Attendance | None = None,
    *,
    timeout_s: float = LOAD_TIMEOUT_S,
    nodes: JobNodes | None = None,
    completes: bool = False,
    storage: RemoteStorage | None = None,
) -> tuple[Path | None, list[str]]:
    """Return rank 0's `newest_complete` on every rank; `ranks` and `timeout_s` are as in `load`.

    With `nodes` whose run directories are apart, it is the newest checkpoint that is whole among them, as
    `newest_among`. If a `storage` has a newer one, the directories first get its files.

    Raises:
        RunError: on every rank, if there are checkpoints and none is whole, or a rank is late.
    """
    nodes = nodes or JobNodes.one(dist.get_rank(), dist.get_world_size())
    everyone = WaitingRanks(nodes, *_waiting(ranks, str(directory), "read nothing", timeout_s))
    if storage is None:
        return _newest_local(directory, everyone, completes=completes)
    found: tuple[Path | None, list[str]] | None = None
    try:
        found = _newest_local(directory, everyone, completes=completes)
    except (PeerLostError, LateRankError):
        raise
    except RunError:
        pass  # none is whole here, and the storage may have one
    local_step = read_state(found[0]).step if found and found[0] else -1
    brought, lost = bring_newest(directory, storage, local_step, everyone)
    if brought or found is None:
        found = _newest_local(directory, everyone, completes=completes)
    return found[0], [*lost, *found[1]]


def _newest_local(directory: Path, ranks: WaitingRanks, *, completes: bool) -> tuple[Path | None, list[str]]:
    nodes, group, meet, progress = ranks
    found: tuple[Path | None, list[str]] = (None, [])
    if nodes.are_apart:
        return newest_among(directory, nodes, group, meet, progress, completes=completes)
    with together(group, meet):
        if dist.get_rank() == 0:
            found = newest_complete(directory, lambda _: progress())
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
    nodes: JobNodes | None = None,
) -> TrainingState:
    """Fill this rank's parameters, buffers and optimizer states from a verified checkpoint.

    Every rank calls it. Of a stage in `shards`, a rank reads the states of parameters that reach into its
    shard. A method's tensors are read if the checkpoint has them; otherwise the method begins anew. If
    replicas differed, each rank resumes from its own tensors under the same plan; `plan_ids` are all its ids.
    Under another plan, all ranks resume from the tensors that stand for all replicas. At the end a rank
    waits for the other `ranks`, and at most `timeout_s` for a rank that reads nothing. `nodes` whose run
    directories are apart send each other the tensors that their ranks read.

    Raises:
        RunError: on every rank, if a tensor is missing or has another shape, or a rank is late or gone.
    """
    group, meet, progress = _waiting(ranks, str(path), "read nothing", timeout_s)

    def fetch(tensors: Collection[str]) -> None:
        if nodes is not None and is_view(path):
            bring(path, tensors, nodes, group, meet, progress)

    with together(group, meet):
        state = read_state(path)
        known = known_tensors(path)
        slots = model_slots(stages, shards) | optimizer_slots(stages, optimizers, known, shards)
        kept = {name: tensor for name, tensor in _method_tensors(methods).items() if name in known}
        rooms = {key: slot.whole for key, slot in slots.items()} | kept
    fetch(rooms)
    with together(group, meet):
        filled = read_shares(path, stages, rooms, progress)
        read_tensors(path, {key: room for key, room in rooms.items() if key not in filled}, progress)
        for slot in slots.values():
            slot.fill()
    own = dict[str, torch.Tensor]()
    resumes = state.plan_id in plan_ids and _apart(known)
    if resumes:
        # The slots above have made the states that a fresh optimizer lacks.
        tensors = _rank_tensors(_own_tensors(stages, optimizers, shards), methods)
        own = {key: room for key, room in tensors.items() if key in known}
        fetch(own)
    with together(group, meet):
        if resumes:
            read_tensors(path, own, progress)
            fill_copies(stages, optimizers, shards)
        for one in methods.values():
            if resumes:
                one.resume()
            else:
                one.rebase()
    for stepped in shards.values():
        stepped.publish()
    return state


def forget_view(path: Path, nodes: JobNodes, ranks: Attendance) -> None:
    """Remove what was brought from other nodes to read a checkpoint; every rank calls it."""
    if is_view(path):
        with together(ranks.group):
            pass  # all have read it
        if nodes.leads_folder:
            remove_views(path.parent.parent)


def has_rank_tensors(path: Path) -> bool:
    """Return True if a checkpoint has tensors of single ranks, and no sums that another plan can carry on.

    Raises:
        RunError: if a file cannot be read.
    """
    known = known_tensors(path)
    return _apart(known) and not any(name.endswith(f"/{UNSENT}") for name in known)


def _apart(known: Collection[str]) -> bool:
    return any(name.startswith(f"{_RANK}/") for name in known)


def _waiting(
    ranks: Attendance | None, where: str, idle: str, timeout_s: float
) -> tuple[dist.ProcessGroup | None, Callable[[], None], Callable[[], None]]:
    """Return the ranks' process group, a function that meets them, and one that notes progress."""
    if ranks is None:
        return None, untold, untold
    return ranks.group, partial(ranks.meet, where, idle, timeout_s), ranks.progress


def _write(path: Path, content: bytes) -> None:
    with naming(path):
        path.write_bytes(content)
        flush(path)
