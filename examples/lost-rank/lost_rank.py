"""Three processes train with error reset. One is killed, the others go on, and a new one takes its place.

python lost_rank.py

The keeper starts the processes and writes who is there, roll by roll. Each roll has a plan, a verified
program and process groups of its own. The processes and their weights, momenta and errors stay.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import sysconfig
import time
from contextlib import suppress
from copy import deepcopy
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import weft
from weft.describe.families import layer_graph
from weft.describe.models import resolve_model
from weft.describe.plan import Plan
from weft.errors import RunError
from weft.methods.cser.runtime.replicas import CserReplicas
from weft.planning.compile import compile_plan
from weft.program.rank_program import part_of
from weft.program.verify import require_valid
from weft.run.own_loop import adamw
from weft.run.runtime import RankRuntime
from weft.run.stage.build import build_stages

RUN = Path(__file__).parent / "run.toml"
HOST, REPLICAS, EVERY = "127.0.0.1", 3, 4
# One is killed after this step, within a round of four.
LOST, LOST_AFTER = 2, 9
# The roll in which it is back, and the steps of that roll.
BACK, STEPS_BACK = 2, 12
TIMEOUT = timedelta(seconds=60)


class Own(NamedTuple):
    """What a replica has after a reset, beside its program."""

    step: int
    weights: dict[str, torch.Tensor]
    optimizer: dict[str, Any]
    errors: dict[str, torch.Tensor]


def plan_among(plan: Plan, replicas: int) -> Plan:
    """The plan with its first replicas only."""
    stages = tuple(one.model_copy(update={"replicas": one.replicas[:replicas]}) for one in plan.stages)
    batch = plan.global_batch // len(plan.stages[0].replicas) * replicas
    mesh = {**plan.mesh, "dp": replicas}
    return plan.model_copy(update={"stages": stages, "global_batch": batch, "mesh": mesh})


def loss_fn(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def samples(plan: Plan, step: int, micro_batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Windows of a source file's bytes."""
    text = (Path(sysconfig.get_path("stdlib")) / "argparse.py").read_bytes()
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    size = plan.micro_batch_size * plan.sequence
    start = (step * REPLICAS + micro_batch) * size % (len(data) - size - 1)
    shape = plan.micro_batch_size, plan.sequence
    return data[start : start + size].view(shape), data[start + 1 : start + 1 + size].view(shape)


def open_runtime(plan: Plan) -> RankRuntime:
    """This rank's part of the verified program, with new process groups."""
    model = resolve_model("gpt-1m", sequence=plan.sequence)
    program = compile_plan(plan, layer_graph(model))
    require_valid(program)
    rank = dist.get_rank()
    stages = build_stages(plan, model, rank, 0, torch.float32)
    return RankRuntime(plan, part_of(program, rank), stages, loss_fn, adamw, device="cpu", seed=0)


def state_of(runtime: RankRuntime) -> CserReplicas:
    state = runtime.methods["cser"]
    assert isinstance(state, CserReplicas)
    return state


def keep(runtime: RankRuntime, step: int) -> Own:
    weights = {name: one.detach().clone() for name, one in runtime.stages[0].named_parameters()}
    errors = {name: one.clone() for name, one in state_of(runtime).rank_tensors().items()}
    return Own(step, weights, deepcopy(runtime.optimizers[0].state_dict()), errors)


@torch.no_grad()
def restore(runtime: RankRuntime, own: Own) -> None:
    for name, one in runtime.stages[0].named_parameters():
        one.copy_(own.weights[name])
    runtime.optimizers[0].load_state_dict(own.optimizer)
    for name, one in state_of(runtime).rank_tensors().items():
        one.copy_(own.errors[name])
    state_of(runtime).resume()


def replica(me: int, store: dist.Store, first: int) -> None:
    """Train in all rolls from the first one that names this process."""
    whole, roll = weft.plan(RUN).plan, first
    # The last two resets: one process may have ended one more than another.
    kept: list[Own] = []
    store.set(f"here/{me}/{first}", "")
    while True:
        members = json.loads(store.get(f"roll/{roll}"))
        store.set(f"at/{roll}/{me}", json.dumps(kept[-1].step if kept else -1))
        steps = [json.loads(store.get(f"at/{roll}/{one}")) for one in members]
        begin = min((step for step in steps if step >= 0), default=0)
        kept = [own for own in kept if own.step <= begin]
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore(f"roll {roll}", store),
            rank=members.index(me),
            world_size=len(members),
            timeout=TIMEOUT,
        )
        runtime = open_runtime(plan_among(whole, len(members)))
        if max(steps) >= 0:
            if kept:
                restore(runtime, kept[-1])
            state_of(runtime).take_in(away=not kept)
        ended, failed = False, True
        try:
            ended = train(runtime, store, members, roll, begin, kept)
            failed = False
        except RunError as error:
            print(f"replica {me}: {error}", flush=True)
        finally:
            close(runtime, failed=failed)
        if ended:
            return
        roll += 1


def train(
    runtime: RankRuntime, store: dist.Store, members: list[int], roll: int, begin: int, kept: list[Own]
) -> bool:
    """Train until a new process waits behind a reset, or for the last steps; True: these are done."""
    leads = dist.get_rank() == 0
    if leads:
        print(f"roll {roll}: replicas {members} train on from step {begin}", flush=True)
    for step in range(begin, begin + STEPS_BACK) if roll == BACK else count(begin):
        loss = runtime.step(step, lambda number, step=step: samples(runtime.plan, step, number)).loss
        if leads:
            print(f"step {step}: loss {loss:.3f}", flush=True)
            store.set("step", str(step))
        if (step + 1) % EVERY == 0:
            kept[:] = [*kept[-1:], keep(runtime, step + 1)]
            waits = torch.tensor([leads and store.check([f"waits/{roll}"])], dtype=torch.int32)
            dist.broadcast(waits, 0)
            if waits.item():
                if leads:
                    store.set(f"left/{roll}", "")
                return False
    own = torch.cat([one.flat - one.form.error for one in state_of(runtime).synced_parts(0)])
    mean = own.clone()
    dist.all_reduce(mean)
    apart = (own - mean / len(members)).abs().max()
    dist.all_reduce(apart, dist.ReduceOp.MAX)
    if leads:
        print(f"weights minus errors of {members} differ by {apart.item():.1e}", flush=True)
    return True


def close(runtime: RankRuntime, *, failed: bool) -> None:
    # The work under way has failed, as the step has told.
    with suppress(RunError):
        runtime.close(failed=failed)
    dist.destroy_process_group()


def start(me: int, port: int, roll: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, __file__, str(me), str(port), str(roll)])


def keeper() -> int:
    """Start all processes, kill one, and write a roll whenever one has gone or come."""
    store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    replicas = {one: start(one, store.port, 0) for one in range(REPLICAS)}
    roll, members = 0, sorted(replicas)
    store.set("roll/0", json.dumps(members))
    killed = False
    try:
        while any(one.poll() is None for one in replicas.values()):
            time.sleep(0.05)
            if not killed and store.check(["step"]) and int(store.get("step")) >= LOST_AFTER:
                replicas[LOST].send_signal(signal.SIGKILL)
                killed = True
            gone = [one for one in members if replicas[one].poll() not in (None, 0)]
            if any(one != LOST for one in gone):
                return 1
            if gone:
                members, roll = [one for one in members if one not in gone], roll + 1
                store.set(f"roll/{roll}", json.dumps(members))
                replicas[LOST] = start(LOST, store.port, roll + 1)
            elif LOST not in members and store.check([f"here/{LOST}/{roll + 1}"]):
                store.set(f"waits/{roll}", "")
                if store.check([f"left/{roll}"]):
                    members, roll = sorted(replicas), roll + 1
                    store.set(f"roll/{roll}", json.dumps(members))
    finally:
        for one in replicas.values():
            one.kill()
            one.wait()
    return max(one.returncode for one in replicas.values())


if __name__ == "__main__":
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if len(sys.argv) == 1:
        sys.exit(keeper())
    number, port, first = map(int, sys.argv[1:])
    torch.set_num_threads(1)
    replica(number, dist.TCPStore(HOST, port, is_master=False, timeout=TIMEOUT), first)
