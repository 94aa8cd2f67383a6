"""Checkpoints: what is loaded is what was saved, byte for byte, or nothing is loaded."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pool import WorkerPool
from recorded_files import Told, recorded, require_flushed_before_named
from safetensors.torch import load_file
from saved_checkpoints import save_checkpoint
from small_plans import tiny
from torch import nn
from torch.distributed import distributed_c10d

from weft.errors import RunError
from weft.run.stage.build import build_stage
from weft.training.checkpoint import checkpoints
from weft.training.checkpoint.manifest import MANIFEST, canonical, newest_complete, verify
from weft.training.checkpoint.stage_tensors import model_tensors, optimizer_tensors
from weft.training.checkpoint.tensor_storage import read_tensors
from weft.training.checkpoint.training_state import TrainingState, read_state
from weft.training.optimizer.optimizers import OptimizerSettings, optimizer_factory

SETTINGS = OptimizerSettings(
    name="adamw", learning_rate=0.01, warm_up_steps=0, betas=(0.9, 0.95), weight_decay=0.1
)


def state_at(step: int) -> TrainingState:
    return TrainingState(
        step=step,
        plan_id="f00d",
        seed=3,
        samples=8,
        model="cafe",
        precision="fp32",
        data="beef",
        first_loss=5.5,
    )


def stage_of(index: int, width: int = 5) -> nn.Module:
    """A stage with names of its own, a norm, and a buffer."""
    torch.manual_seed(index)
    module = nn.ModuleDict({f"layer{index}": nn.Linear(width, 7), f"norm{index}": nn.BatchNorm1d(7)})
    module.register_buffer(f"scale{index}", torch.tensor(float(index)))
    return module


def trained(index: int, steps: int) -> tuple[dict[int, nn.Module], dict[int, torch.optim.Optimizer]]:
    module = stage_of(index)
    optimizer = optimizer_factory(SETTINGS)(module)
    for step in range(steps):
        for parameter in module.parameters():
            parameter.grad = torch.full_like(parameter, 0.1 * (step + 1))
        optimizer.step()
    return {index: module}, {index: optimizer}


def content(stages: dict[int, nn.Module], optimizers: dict[int, torch.optim.Optimizer]) -> dict[str, bytes]:
    tensors = model_tensors(stages) | optimizer_tensors(stages, optimizers)
    return {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}


def save_steps(rank: int, ranks: int, directory: Path, steps: list[int], keep: int) -> list[str]:
    """Ranks 0 and 2 hold stage 0, ranks 1 and 3 stage 1."""
    for step in steps:
        save_checkpoint(directory, state_at(step), *trained(rank % 2, step), keep=keep)
    return sorted(path.name for path in directory.iterdir())


def recorded_saves(rank: int, ranks: int, directory: Path) -> list[Told]:
    """What this rank tells the disk while it saves a second checkpoint, which takes the place of a first."""
    save_steps(rank, ranks, directory, [1], 1)
    with recorded() as told:
        save_steps(rank, ranks, directory, [2], 1)
    return told


def save_and_load(rank: int, ranks: int, directory: Path) -> tuple[bool, TrainingState, int]:
    saved = trained(rank % 2, 3)
    path = save_checkpoint(directory, state_at(3), *saved, keep=1)
    fresh = {rank % 2: stage_of(rank % 2)}
    optimizers = {rank % 2: optimizer_factory(SETTINGS)(fresh[rank % 2])}
    different = content(fresh, optimizers) != content(*saved)
    agreed, _ = checkpoints.agree_on_newest(directory)
    assert agreed == path
    loaded = checkpoints.load(path, fresh, optimizers)
    equal = content(fresh, optimizers) == content(*saved)
    tensors = [name for file in path.glob("*.safetensors") for name in _names(file)]
    assert len(tensors) == len(set(tensors)), "a replicated tensor is stored once"
    return different and equal, loaded, len(tensors)


def save_and_load_copies(rank: int, ranks: int, directory: Path) -> bool:
    """Rank 0 holds both copies of a tied weight, rank 1 nothing of it; all of it comes back."""
    config = tiny(tied=True)
    layers = {0: [0, 1], 3: [6, 7]} if rank == 0 else {1: [2, 3], 2: [4, 5]}

    def made(seed: int) -> tuple[dict[int, nn.Module], dict[int, torch.optim.Optimizer]]:
        stages = {stage: build_stage(config, chosen, seed, torch.float32) for stage, chosen in layers.items()}
        return stages, {stage: optimizer_factory(SETTINGS)(module) for stage, module in stages.items()}

    saved, fresh = made(0), made(1)
    for stage, module in saved[0].items():
        for parameter in module.parameters():
            parameter.grad = torch.full_like(parameter, 0.5)
        saved[1][stage].step()
    path = save_checkpoint(directory, state_at(1), *saved, keep=1)
    checkpoints.load(path, *fresh)
    return all(
        content({stage: fresh[0][stage]}, fresh[1]) == content({stage: saved[0][stage]}, saved[1])
        for stage in layers
    )


def test_copies_of_a_weight_are_stored_once_and_all_filled(worker_pool: WorkerPool, tmp_path: Path) -> None:
    assert worker_pool.run(save_and_load_copies, tmp_path, ranks=2) == [True, True]
    [path] = tmp_path.iterdir()
    names = [name for file in path.glob("*.safetensors") for name in _names(file)]
    assert names.count("transformer.wte.weight") == 1
    assert names.count("optimizer/transformer.wte.weight/exp_avg") == 1
    assert len(names) == len(set(names))


def _names(file: Path) -> list[str]:
    from safetensors import safe_open

    with safe_open(file, framework="pt") as tensors:
        return list(tensors.keys())


def refusal(rank: int, ranks: int, directory: Path, width: int) -> str:
    """What loading into a stage of another width says, on this rank; rank 1's stage fits."""
    index = rank % 2
    stages = {index: stage_of(index, width if rank == 0 else 5)}
    path, _ = checkpoints.agree_on_newest(directory)
    assert path is not None
    with pytest.raises(RunError) as failed:
        checkpoints.load(path, stages, {index: optimizer_factory(SETTINGS)(stages[index])})
    dist.barrier()
    return str(failed.value)


def agreement_error(rank: int, ranks: int, directory: Path) -> str:
    with pytest.raises(RunError) as failed:
        checkpoints.agree_on_newest(directory)
    return str(failed.value)


def save_error(rank: int, ranks: int, directory: Path) -> str:
    with pytest.raises(RunError) as failed:
        save_checkpoint(directory, state_at(1), *trained(rank % 2, 1), keep=1)
    return str(failed.value)


@pytest.fixture(scope="module")
def saved(worker_pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the checkpoints of steps 1 and 2."""
    directory = tmp_path_factory.mktemp("run") / "checkpoints"
    worker_pool.run(save_steps, directory, [1, 2], 5, ranks=2)
    return directory


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_what_is_loaded_is_what_was_saved(worker_pool: WorkerPool, tmp_path: Path, ranks: int) -> None:
    answers = worker_pool.run(save_and_load, tmp_path / "checkpoints", ranks=ranks)
    assert [(equal, state) for equal, state, _ in answers] == [(True, state_at(3))] * ranks
    # Per stage: two pairs of parameters with three states each, four buffers.
    assert answers[0][2] == min(ranks, 2) * (4 * 4 + 4)


def save_and_load_without_pickles(rank: int, ranks: int, directory: Path) -> bool:
    """With torch's own ways to pickle for another rank, and to unpickle, taken away."""
    ways = ("_object_to_tensor", "_tensor_to_object")
    former = {name: getattr(distributed_c10d, name) for name in ways}

    def refuse(*_: object) -> None:
        raise AssertionError("a pickle was sent")

    for name in ways:
        setattr(distributed_c10d, name, refuse)
    try:
        return save_and_load(rank, ranks, directory)[0]
    finally:
        for name in ways:
            setattr(distributed_c10d, name, former[name])


def test_no_rank_sends_a_pickle(worker_pool: WorkerPool, tmp_path: Path) -> None:
    answers = worker_pool.run(save_and_load_without_pickles, tmp_path / "checkpoints", ranks=2)
    assert answers == [True, True]


def save_misfit(rank: int, ranks: int, directory: Path) -> str:
    """Two ranks have a tensor of one name and another shape each."""
    stages = {0: stage_of(0, 5 + rank)}
    with pytest.raises(RunError) as failed:
        save_checkpoint(directory, state_at(1), stages, {0: optimizer_factory(SETTINGS)(stages[0])}, keep=1)
    return str(failed.value)


def test_tensors_that_do_not_fit_together_are_refused_by_all(worker_pool: WorkerPool, tmp_path: Path) -> None:
    first, second = worker_pool.run(save_misfit, tmp_path, ranks=2)
    assert first == second
    assert "rank 1: layer0.weight is torch.float32 [7, 6], elsewhere torch.float32 [7, 5]" in first


def test_only_the_newest_are_kept(worker_pool: WorkerPool, tmp_path: Path) -> None:
    names = worker_pool.run(save_steps, tmp_path / "checkpoints", [5, 6, 7, 8], 2, ranks=2)[0]
    assert names == ["step-00000007", "step-00000008"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_checkpoint_is_on_the_disk_before_it_gets_its_name(
    worker_pool: WorkerPool, tmp_path: Path, ranks: int
) -> None:
    answers = worker_pool.run(recorded_saves, tmp_path, ranks=ranks)
    first, others = answers[0], answers[1:]
    # The ranks meet between what the others write and what the first one writes last.
    told = [one for part in others for one in part] + first
    final = tmp_path / "step-00000002"
    require_flushed_before_named(told, tmp_path / ".saving-step-00000002", final)
    # The older one is there until the newer one's name is on the disk.
    after = [(one.what, one.path) for one in told[told.index(Told("name", str(final))) :]]
    assert after.index(("flush", str(tmp_path))) < after.index(("remove", str(tmp_path / "step-00000001")))


def test_the_newest_is_found_and_remains_of_a_torn_one_are_passed_by(saved: Path, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(saved, tmp_path / "checkpoints"))
    shutil.copytree(directory / "step-00000002", directory / ".saving-step-00000003")
    (directory / "step-12").mkdir()
    assert newest_complete(directory) == (directory / "step-00000002", [])
    assert newest_complete(tmp_path / "absent") == (None, [])


def test_reading_tells_of_every_tensor_and_checking_of_every_file(saved: Path) -> None:
    path, told = saved / "step-00000002", []
    tensors = {name: value for file in path.glob("*.safetensors") for name, value in load_file(file).items()}
    rooms = {name: torch.zeros_like(value) for name, value in tensors.items()}
    read_tensors(path, rooms, lambda: told.append(1))
    assert all(torch.equal(room, tensors[name]) for name, room in rooms.items())
    assert len(told) == len(tensors)
    read: list[int] = []
    newest_complete(saved, read.append)
    assert sorted(read) == sorted(file.stat().st_size for file in path.iterdir() if file.name != MANIFEST)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_flipped_byte_is_ever_loaded(saved: Path, data: st.DataObject) -> None:
    older, newer = saved / "step-00000001", saved / "step-00000002"
    file = data.draw(st.sampled_from(sorted(newer.iterdir())))
    original = file.read_bytes()
    place = data.draw(st.integers(0, len(original) - 1))
    flip = data.draw(st.integers(1, 255))
    try:
        file.write_bytes(original[:place] + bytes([original[place] ^ flip]) + original[place + 1 :])
        path, skipped = newest_complete(saved)
    finally:
        file.write_bytes(original)
    assert path == older
    assert len(skipped) == 1
    assert newer.name in skipped[0]
    assert "\n" not in skipped[0]


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_cut_or_missing_file_is_ever_loaded(saved: Path, data: st.DataObject) -> None:
    file = data.draw(st.sampled_from(sorted((saved / "step-00000002").iterdir())))
    original = file.read_bytes()
    kept = data.draw(st.one_of(st.none(), st.integers(0, len(original) - 1)))
    try:
        if kept is None:
            file.unlink()
        else:
            file.write_bytes(original[:kept])
        path, skipped = newest_complete(saved)
    finally:
        file.write_bytes(original)
    assert path == saved / "step-00000001"
    assert len(skipped) == 1


def test_a_file_that_does_not_belong_there_is_not_read(saved: Path, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(saved, tmp_path / "checkpoints"))
    shutil.copy(
        next((directory / "step-00000001").glob("*.safetensors")),
        directory / "step-00000002" / "extra.safetensors",
    )
    path, skipped = newest_complete(directory)
    assert path == directory / "step-00000001"
    assert "not in the manifest: ['extra.safetensors']" in skipped[0]


def test_where_no_checkpoint_is_whole_every_rank_fails_in_one_line(
    worker_pool: WorkerPool, saved: Path, tmp_path: Path
) -> None:
    directory = Path(shutil.copytree(saved, tmp_path / "checkpoints"))
    for path in directory.iterdir():
        (path / "manifest.json").unlink()
    errors = worker_pool.run(agreement_error, directory, ranks=2)
    assert errors[0] == errors[1]
    assert "\n" not in errors[0]
    assert "step-00000001: torn" in errors[0]
    assert "step-00000002: torn" in errors[0]
    assert len(list(directory.iterdir())) == 2


def test_a_tensor_of_another_shape_fails_on_every_rank(worker_pool: WorkerPool, saved: Path) -> None:
    errors = worker_pool.run(refusal, saved, 6, ranks=2)
    assert errors[0] == errors[1]
    assert "\n" not in errors[0]
    assert "layer0.weight" in errors[0]


def test_a_failed_save_fails_on_every_rank_and_leaves_what_was_there(
    worker_pool: WorkerPool, tmp_path: Path
) -> None:
    blocked = tmp_path / "checkpoints"
    blocked.write_text("a file where the folder should be")
    errors = worker_pool.run(save_error, blocked, ranks=2)
    assert errors[0] == errors[1]
    assert "checkpoints" in errors[0]
    assert blocked.read_text() == "a file where the folder should be"


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 2}', '{"format": 1, "step": 1}', "[" * 3000])
def test_a_foreign_state_or_manifest_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "state.json").write_text(text)
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(RunError, match=r"state\.json"):
        read_state(tmp_path)
    with pytest.raises(RunError, match=r"manifest\.json"):
        verify(tmp_path)


def test_a_manifest_of_another_format_is_not_called_damaged(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_bytes(canonical({"format": 1, "files": {}}))
    with pytest.raises(RunError, match="of format 1; this weft reads 2"):
        verify(tmp_path)


def test_the_manifest_names_every_file(saved: Path) -> None:
    path = saved / "step-00000002"
    files = json.loads((path / "manifest.json").read_text())["files"]
    assert sorted([*files, "manifest.json"]) == sorted(file.name for file in path.iterdir())
    assert files["state.json"][0] == (path / "state.json").stat().st_size
