"""Agreement: one rank's failure or request is everyone's."""

import os
import pickle
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from pool import RankError, WorkerPool

from weft.errors import InputError, RunError, Violation
from weft.training.coordination import agreement
from weft.training.coordination.agreement import StopRequest, from_first_rank, gather, together


def fail_on_rank_one(rank: int, ranks: int, kind: str) -> str:
    errors = {
        "input": InputError([Violation("a", "one"), Violation("b", "two", "three")]),
        "run": RunError("broken"),
        "disk": FileNotFoundError(2, "No such file or directory", "/absent"),
    }
    try:
        with together():
            if rank == 1:
                raise errors[kind]
    except (InputError, RunError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def fail_beside_a_slow_reader(rank: int, ranks: int) -> tuple[float, float]:
    """When this rank has read what failed, and when it raises it; rank 1 reads late."""
    read_s = 0.0

    def late(*values: object) -> list[object]:
        nonlocal read_s
        told = gather(*values)  # type: ignore[arg-type]
        time.sleep(0.3 * (rank == 1))
        read_s = time.monotonic()
        return told

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agreement, "gather", late)
        try:
            with together():
                if rank == 0:
                    raise RunError("broken")
        except RunError:
            return read_s, time.monotonic()
    raise AssertionError("nothing was raised")


def succeed(rank: int, ranks: int) -> tuple[list[int], int]:
    with together():
        pass
    return gather(rank * 10), from_first_rank(rank + 7)


def signal_rank(rank: int, ranks: int, signals: dict[int, signal.Signals]) -> tuple[list[int], bool]:
    """Votes of four steps; the signals arrive at different points of the second step."""
    former = signal.getsignal(signal.SIGTERM)
    votes = []
    with StopRequest() as stop:
        for step in range(4):
            stop.post_vote()
            if step == 1 and rank in signals:
                time.sleep(0.02 * rank)
                os.kill(os.getpid(), signals[rank])
            votes.append(int(stop.read_vote().stop or 0))
    return votes, signal.getsignal(signal.SIGTERM) is former


def wait_on_rank_two(rank: int, ranks: int) -> list[bool]:
    """Votes of three steps; rank 2 knows of new processes in the second one."""
    votes = []
    with StopRequest() as stop:
        for step in range(3):
            stop.post_vote(joins=rank == 2 and step == 1)
            votes.append(stop.read_vote().joins)
    return votes


def enter_and_leave(rank: int, ranks: int, times: int) -> int:
    """Leave at once, as a resumed run without steps does; the higher ranks begin a bit later."""
    for number in range(times):
        time.sleep(0.001 * rank * (number % 3))
        with StopRequest():
            pass
    return times


def lose_rank_one(rank: int, ranks: int, report: Path) -> None:
    with StopRequest() as stop:
        if rank == 1:
            os._exit(0)
        try:
            stop.post_vote()
            stop.read_vote()
        except RunError as error:
            report.write_text(f"{type(error).__name__}: {error}")
            raise


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("input", "InputError: a: one\nb: two (nearest valid: three)"),
        ("run", "RunError: broken"),
        ("disk", "RunError: rank 1: /absent: No such file or directory"),
    ],
)
def test_a_failure_on_one_rank_is_raised_on_all(worker_pool: WorkerPool, kind: str, expected: str) -> None:
    assert worker_pool.run(fail_on_rank_one, kind, ranks=3) == [expected] * 3


def test_no_rank_ends_before_all_know_why(worker_pool: WorkerPool) -> None:
    times = worker_pool.run(fail_beside_a_slow_reader, ranks=3)
    assert min(raised for _, raised in times) >= max(read for read, _ in times)


def test_values_reach_every_rank(worker_pool: WorkerPool) -> None:
    assert worker_pool.run(succeed, ranks=3) == [([0, 10, 20], 7)] * 3


class Calls:
    """Pickles as a call that leaves a file."""

    def __init__(self, trace: Path) -> None:
        self._trace = trace

    def __reduce__(self) -> tuple[object, tuple[str, int]]:
        return os.open, (str(self._trace), os.O_CREAT)


def send_a_pickle(rank: int, ranks: int, trace: Path, how: str) -> str:
    """Rank 0 sends a pickle where rank 1 gathers values, or takes the first rank's; it is as good as a
    stranger who has got between the ranks."""
    if rank == 1:
        with pytest.raises(RunError) as caught:
            gather(1) if how == "gather" else from_first_rank(1)
        return str(caught.value)
    content = torch.frombuffer(bytearray(pickle.dumps(Calls(trace))), dtype=torch.uint8)
    size = torch.tensor([len(content)])
    if how == "gather":
        dist.all_gather([torch.zeros_like(size) for _ in range(ranks)], size)
        dist.all_gather([torch.zeros_like(content) for _ in range(ranks)], content)
    else:
        dist.broadcast(size, src=0)
        dist.broadcast(content, src=0)
    return ""


@pytest.mark.parametrize("how", ["gather", "first rank"])
def test_a_pickle_among_the_values_calls_nothing(worker_pool: WorkerPool, tmp_path: Path, how: str) -> None:
    trace = tmp_path / "trace"
    said = worker_pool.run(send_a_pickle, trace, how, ranks=2)[1]
    assert not trace.exists()
    assert said.startswith("rank 1 was sent what no rank sends: ")


def test_a_signal_to_one_rank_stops_all_after_the_same_step(worker_pool: WorkerPool) -> None:
    answers = worker_pool.run(signal_rank, {1: signal.SIGTERM}, ranks=3)
    assert answers == [([0, 0, 15, 15], True)] * 3


def test_ctrl_c_prevails_over_the_signal_that_follows_it(worker_pool: WorkerPool) -> None:
    answers = worker_pool.run(signal_rank, {0: signal.SIGTERM, 2: signal.SIGINT}, ranks=3)
    assert answers == [([0, 0, 2, 2], True)] * 3


def test_a_rank_that_is_gone_is_a_lost_peer_in_one_line(worker_pool: WorkerPool, tmp_path: Path) -> None:
    report = tmp_path / "report"
    with pytest.raises(RankError):
        worker_pool.run(lose_rank_one, report, ranks=2)
    assert report.read_text().startswith("PeerLostError: rank 0 lost another rank: ")
    assert "\n" not in report.read_text()


def test_ranks_without_steps_leave_together(worker_pool: WorkerPool) -> None:
    assert worker_pool.run(enter_and_leave, 60, ranks=2) == [60] * 2


def test_all_ranks_learn_in_the_same_step_of_new_processes_that_wait(worker_pool: WorkerPool) -> None:
    assert worker_pool.run(wait_on_rank_two, ranks=3) == [[False, True, False]] * 3
