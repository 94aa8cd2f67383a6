"""Saves beside training: what is on the disk is one step of all ranks, or the save before it, or an error."""

from __future__ import annotations

import gc
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import wait as wait_for
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pool import RankError, WorkerPool
from safetensors.torch import load_file
from saved_checkpoints import save_checkpoint
from torch import nn

from weft.errors import InputError, RunError
from weft.run.launch.failures import PeerLostError
from weft.run.streams import THERE, Completion, Value
from weft.training.checkpoint import checkpoints, saver
from weft.training.checkpoint.manifest import generation_path, newest_complete, verify
from weft.training.checkpoint.saver import FAREWELL_S, Saver, farewell_s
from weft.training.checkpoint.training_state import TrainingState
from weft.training.coordination.agreement import StopRequest
from weft.training.coordination.attendance import Attendance, LateRankError
from weft.training.optimizer.optimizers import OptimizerSettings, optimizer_factory

pytestmark = pytest.mark.processes

WIDTH = 6
LIMIT_S = 1.0


class Job:
    """One stage per rank, of which every step changes every tensor in place."""

    def __init__(self, rank: int, width: int = WIDTH) -> None:
        settings = OptimizerSettings(
            name="adamw", learning_rate=0.1, warm_up_steps=0, betas=(0.9, 0.95), weight_decay=0.1
        )
        torch.manual_seed(rank)
        self.stages: dict[int, nn.Module] = {rank: nn.ModuleDict({f"layer{rank}": nn.Linear(width, width)})}
        self.optimizers = {rank: optimizer_factory(settings)(self.stages[rank])}
        self.steps = 0

    def step(self) -> None:
        for stage, module in self.stages.items():
            for parameter in module.parameters():
                parameter.grad = torch.full_like(parameter, 0.1 * (self.steps + 1))
            self.optimizers[stage].step()
        self.steps += 1

    def content(self) -> dict[str, bytes]:
        tensors = checkpoints.collect(self.stages, self.optimizers)
        return {name: tensor.detach().numpy().tobytes() for name, tensor in tensors.items()}

    def save(self, saves: Saver) -> None:
        saves.save(state_at(self.steps), self.stages, self.optimizers)

    def save_now(self, directory: Path, keep: int = 2) -> None:
        save_checkpoint(directory, state_at(self.steps), self.stages, self.optimizers, keep=keep)


def state_at(step: int) -> TrainingState:
    return TrainingState(
        step=step,
        samples=8 * step,
        plan_id="f00d",
        seed=3,
        model="cafe",
        precision="fp32",
        data="beef",
        first_loss=5.5,
    )


def at_once(work: Callable[[], None], *reads: Value) -> Completion:
    work()
    return THERE.completion


def saver_of(directory: Path, resumed_step: int = 0, keep: int = 9) -> Saver:
    return Saver(directory, keep=keep, resumed_step=resumed_step, ranks=Attendance(), copy=at_once)


def stored(directory: Path, step: int) -> dict[str, bytes]:
    files = generation_path(directory, step).glob("*.safetensors")
    return {name: value.numpy().tobytes() for file in files for name, value in load_file(file).items()}


def train_and_save(
    rank: int, ranks: int, directory: Path, plan: list[bool], copy_s: float, write_s: list[float]
) -> tuple[dict[int, dict[str, bytes]], list[int]]:
    """Save after the steps that `plan` marks; copies and writes of this rank take their time."""
    expected: dict[int, dict[str, bytes]] = {}
    copy, write, reported = saver.copy_to_host, saver.write, []

    def slow_copy(tensors: dict, room: dict) -> None:
        for name, tensor in tensors.items():
            time.sleep(copy_s)
            copy({name: tensor}, room)

    def slow_write(*arguments: object, **named: object) -> int:
        time.sleep(write_s[rank])
        return write(*arguments, **named)

    saver.copy_to_host, saver.write = slow_copy, slow_write
    job = Job(rank)
    try:
        with saver_of(directory) as saves:
            for marked in plan:
                job.step()
                if marked:
                    expected[job.steps] = job.content()
                    reported += saves.save(state_at(job.steps), job.stages, job.optimizers)
                reported += saves.poll()
            reported += saves.wait()
    finally:
        saver.copy_to_host, saver.write = copy, write
    return expected, [one.step for one in reported]


@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    plan=st.lists(st.booleans(), min_size=1, max_size=6),
    copy_s=st.sampled_from([0.0, 0.01]),
    write_s=st.lists(st.sampled_from([0.0, 0.05]), min_size=2, max_size=2),
)
def test_no_later_step_is_in_a_checkpoint(
    worker_pool: WorkerPool,
    tmp_path_factory: pytest.TempPathFactory,
    plan: list[bool],
    copy_s: float,
    write_s: list[float],
) -> None:
    directory = tmp_path_factory.mktemp("run") / "checkpoints"
    answers = worker_pool.run(train_and_save, directory, plan, copy_s, write_s, ranks=2)
    marked = [step + 1 for step, saved in enumerate(plan) if saved]
    for expected, reported in answers:
        assert list(expected) == reported == marked
    for step in marked:
        verify(generation_path(directory, step))
        assert stored(directory, step) == answers[0][0][step] | answers[1][0][step]


def one_rank_is_slow(rank: int, ranks: int, directory: Path) -> tuple[int, bool, bool, bool]:
    """Rank 1 writes only when rank 0 has trained on; what rank 0 sees before and after."""
    write, trained_on = saver.write, directory / "trained on"

    def late_write(*arguments: object, **named: object) -> int:
        while not trained_on.exists():
            time.sleep(0.01)
        return write(*arguments, **named)

    if rank == 1:
        saver.write = late_write
    job = Job(rank)
    try:
        with saver_of(directory) as saves:
            job.save(saves)
            for _ in range(5):
                job.step()
            early = len(saves.poll()), generation_path(directory, 0).exists()
            dist.barrier()
            trained_on.touch()
            (done,) = saves.wait()
            return *early, done.write_s > 0, generation_path(directory, 0).exists()
    finally:
        saver.write = write


def test_a_checkpoint_has_its_name_when_the_last_rank_is_done_and_training_goes_on(
    worker_pool: WorkerPool, tmp_path: Path
) -> None:
    assert worker_pool.run(one_rank_is_slow, tmp_path, ranks=2) == [(0, False, True, True)] * 2


def fail_in_background(rank: int, ranks: int, directory: Path) -> tuple[str, int]:
    """The disk of rank 1 is full from its second save on; the error, and the step whose vote told it."""
    job = Job(rank, width=64)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        with StopRequest() as stop, saver_of(directory) as saves:
            for step in range(200):
                stop.post_vote(failed=saves.failed)
                job.step()
                time.sleep(0.005)
                if stop.read_vote().failed:
                    saves.fail()
                if step == 0:
                    job.save(saves)
                    saves.wait()
                if step == 1:
                    if rank == 1:
                        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
                    job.save(saves)
    except RunError as error:
        return str(error), step
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    return "no error", step


def test_a_write_that_fails_fails_every_rank_after_the_same_step_and_spares_what_is_there(
    worker_pool: WorkerPool, tmp_path: Path
) -> None:
    answers = worker_pool.run(fail_in_background, tmp_path / "checkpoints", ranks=2)
    assert answers[0] == answers[1]
    line, step = answers[0]
    assert "rank 1" in line
    assert "File too large" in line
    assert "\n" not in line
    assert 2 <= step < 199
    assert newest_complete(tmp_path / "checkpoints")[0] == generation_path(tmp_path / "checkpoints", 1)


def test_a_directory_that_is_torn_away_fails_the_next_save(worker_pool: WorkerPool, tmp_path: Path) -> None:
    errors = worker_pool.run(lose_directory, tmp_path / "checkpoints", ranks=2)
    assert errors[0] == errors[1]
    assert "checkpoints" in errors[0]
    assert "\n" not in errors[0]


def lose_directory(rank: int, ranks: int, directory: Path) -> str:
    job = Job(rank)
    try:
        with saver_of(directory) as saves:
            job.save(saves)
            saves.wait()
            if rank == 0:
                directory.rename(directory.with_name("gone"))
                directory.write_text("a file where the folder was")
            dist.barrier()
            job.step()
            job.save(saves)
            saves.wait()
    except RunError as error:
        return str(error)
    return "no error"


class Stopped(BaseException):
    """The process would be dead from here on."""


def stop_at_every_file_operation(rank: int, ranks: int, directory: Path) -> list[tuple[int, bool]]:
    """Saves that end at their first, second, ... operation on files; what each leaves behind is whole."""
    operations = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.listdir", "os.scandir"}
    left: list[int | None] = [None]

    def hook(event: str, arguments: tuple) -> None:
        if left[0] is not None and event in operations and str(directory) in str(arguments[0]):
            left[0] -= 1
            if left[0] < 0:
                raise Stopped

    sys.addaudithook(hook)
    job, found = Job(0), []
    job.step()
    job.save_now(directory, keep=1)
    before, count, ended = job.content(), 0, False
    while not ended:
        job.step()
        left[0] = count
        try:
            job.save_now(directory, keep=1)
            ended = True
        except (Stopped, RunError):
            pass
        finally:
            left[0] = None
        newest, skipped = newest_complete(directory)
        assert newest is not None
        step = int(newest.name.removeprefix("step-"))
        here = job.content()
        found.append(
            (step, not skipped and stored(directory, step) == (here if step == job.steps else before))
        )
        before = here if step == job.steps else before
        count += 1
    assert list(directory.iterdir()) == [generation_path(directory, job.steps)], "unfinished ones are cleaned"
    return found


def test_a_save_that_ends_at_any_file_operation_leaves_a_whole_generation(
    worker_pool: WorkerPool, tmp_path: Path
) -> None:
    (found,) = worker_pool.run(stop_at_every_file_operation, tmp_path / "checkpoints", ranks=1)
    assert len(found) > 10
    assert all(whole for _, whole in found)
    steps = [step for step, _ in found]
    assert steps == sorted(steps)


def damaged_and_kept(rank: int, ranks: int, directory: Path) -> list[str]:
    """Generations 1 to 4, of which 3 and 4 are damaged; the run goes on from 2 and saves 3 and 5."""
    job = Job(rank)
    for _ in range(4):
        job.step()
        job.save_now(directory, keep=9)
    if rank == 0:
        for step in (3, 4):
            (generation_path(directory, step) / "state.json").write_text("{}")
    dist.barrier()
    with saver_of(directory, resumed_step=2, keep=3) as saves:
        for step in (3, 5):
            saves.save(state_at(step), job.stages, job.optimizers)
        saves.wait()
    dist.barrier()
    verify(generation_path(directory, 3))
    return sorted(path.name for path in directory.iterdir())


def test_a_damaged_generation_takes_no_place_of_a_whole_one(worker_pool: WorkerPool, tmp_path: Path) -> None:
    names = worker_pool.run(damaged_and_kept, tmp_path / "checkpoints", ranks=2)
    assert names == [["step-00000002", "step-00000003", "step-00000005"]] * 2


def load_with_a_bad_rank(rank: int, ranks: int, directory: Path, report: Path, how: signal.Signals) -> None:
    """Rank 1 gets a signal in the middle of a load; what loading says on rank 0 is left in a file."""
    job = Job(rank)
    job.save_now(directory)
    attendance = Attendance()
    if rank == 1:
        checkpoints.read_state = lambda path: os.kill(os.getpid(), how)
    try:
        path = generation_path(directory, 0)
        checkpoints.load(path, job.stages, job.optimizers, ranks=attendance, timeout_s=LIMIT_S)
    except RunError as error:
        report.write_text(f"{type(error).__name__}: {error}")
    os._exit(0)  # the end of the group would wait for a rank that is stopped


@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL])
def test_a_rank_that_is_stopped_or_gone_fails_the_load_in_one_line(
    worker_pool: WorkerPool, tmp_path: Path, how: signal.Signals
) -> None:
    report = tmp_path / "report"
    with suppress(RankError):
        worker_pool.run(load_with_a_bad_rank, tmp_path / "c", report, how, ranks=2, timeout_s=60)
    text = report.read_text()
    assert "\n" not in text
    if how == signal.SIGSTOP:
        late = f"{tmp_path}/c/step-00000000: rank 1 read nothing for 1 s while others waited"
        assert text == f"LateRankError: {late}"
    else:
        assert text.startswith("PeerLostError: rank 0 lost another rank: ")


def save_with_a_late_rank(rank: int, ranks: int, directory: Path, release: Path, votes: bool) -> str:
    text = save_late(rank, directory, release, votes)
    # The frames of the error keep the group, in a cycle, and its end waits for that of the other rank's.
    gc.collect()
    return text


def save_late(rank: int, directory: Path, release: Path, votes: bool) -> str:
    """What rank 1's second save, which hangs, is called: in the vote of a step, or by who waits for it."""
    write_planned = checkpoints.plan_to_write

    def hangs(folder: Path, tensors: dict, group: dist.ProcessGroup) -> Callable[[], None]:
        write = write_planned(folder, tensors, group)

        def late() -> None:
            while not release.exists():
                time.sleep(0.01)
            write()

        return late if rank == 1 and folder.name.endswith("1") else write

    checkpoints.plan_to_write = hangs
    job = Job(rank)
    saves = Saver(directory, keep=9, resumed_step=0, ranks=Attendance(), copy=at_once, timeout_s=LIMIT_S)
    try:
        with StopRequest() as stop, saves:
            for _ in range(2):
                job.save(saves)
                job.step()
            while votes:
                stop.post_vote(failed=saves.failed)
                time.sleep(0.01)
                if stop.read_vote().failed:
                    saves.fail()
            saves.wait()
    except LateRankError as error:
        return str(error)
    finally:
        release.touch()
        wait_for([saves._writing])
        checkpoints.plan_to_write = write_planned
    return "no error"


@pytest.mark.parametrize("votes", [False, True])
def test_a_rank_that_does_not_write_its_part_is_named_by_all_and_the_save_before_stays(
    worker_pool: WorkerPool, tmp_path: Path, votes: bool
) -> None:
    directory = tmp_path / "c"
    answers = worker_pool.run(save_with_a_late_rank, directory, tmp_path / "release", votes, ranks=2)
    line = f"{directory}: the checkpoint of step 1: rank 1 wrote nothing for 1 s while others waited"
    assert answers == [line] * 2
    assert newest_complete(directory) == (generation_path(directory, 0), [])


def test_a_save_gets_less_time_the_less_it_can_still_end() -> None:
    """Without a lost rank, it ends only if all have written already; with a late one, never."""
    late, lost, own = (farewell_s(error) for error in (LateRankError, PeerLostError, InputError))
    assert (late, own) == (0.0, FAREWELL_S)
    assert lost is not None
    assert 0.0 < lost < FAREWELL_S / 5
    assert farewell_s(None) is None
