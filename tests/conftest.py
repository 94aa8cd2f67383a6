"""Fixtures shared by all rooms."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, nullcontext
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from installing import found, install_example
from pool import WorkerPool
from touched import UNTIL
from warm_starts import Template

# Other processes share the cores: how long an example takes says nothing about the code. Continuous
# integration tries the same examples every time; everybody else tries new ones, as many as they ask for.
settings.register_profile(
    "weft",
    deadline=None,
    derandomize=os.environ.get("CI") == "true",
    max_examples=int(os.environ.get("WEFT_EXAMPLES", "50")),
)
settings.load_profile("weft")


TESTS = Path(__file__).parent
PURE_ROOMS = {
    "describe",
    "doors",
    "lab",
    "methods",
    "moves",
    "planning",
    "predict",
    "program",
    "scoring",
    "timeline",
    "watch",
}
# Tests in these rooms that hold the pure half against torch or its libraries, or that train.
WITH_TORCH = (
    "describe/test_*_runtime.py",
    "describe/test_clip.py",
    "describe/test_convolutional.py",
    "describe/test_encoder_decoder.py",
    "describe/test_encoders.py",
    "describe/test_expert_pieces.py",
    "describe/test_families.py",
    "describe/test_models.py",
    "describe/test_optimizers.py",
    "describe/test_towers.py",
    "lab/test_lab.py",
    "lab/test_place.py",
    "methods/test_*_runs.py",
    "methods/test_*_runtime.py",
    "methods/test_auxiliary_head.py",
    "methods/test_expert_exchanges.py",
    "methods/test_own_bubble_work.py",
    "methods/test_snapshot.py",
    "methods/test_tensor_collectives.py",
    "planning/test_blocking_pinned.py",
    "planning/test_graph_models.py",
    "planning/test_optimizers.py",
    "predict/cost/test_*_runtime.py",
    "program/schedules/test_torch_orders.py",
)


@cache
def is_pure(path: Path) -> bool:
    """Return whether the tests of a file run without torch."""
    place = path.relative_to(TESTS)
    return place.parts[0] in PURE_ROOMS and not any(place.match(pattern) for pattern in WITH_TORCH)


# More tests of one file may have two runners, which get so many neighbours in turn.
LONG_TABLE, NEIGHBOURS = 100, 16
# The simulator's engine, then every function of the codecs, each with the types that tests call it with.
COMPILE_ENGINE = """
from weft.predict.abstract import simulate_schedule
from weft.predict.engine import load_compiled_engine
load_compiled_engine()
simulate_schedule("gpipe", devices=2, micro_batches=2)
"""
COMPILE_CODECS = """
import torch
from weft.sync.codecs.counter import Key
from weft.sync.codecs.quantiser import Quantiser, unsmooth_
codec, values = Quantiser(bits=4, group=32, smooth=True), torch.ones(64)
payload = torch.empty(codec.payload_bytes(64), dtype=torch.uint8)
codec.encode(values, payload, Key(0, 0))
codec.encode_sum(payload[None], codec, 64, payload, Key(0, 0))
codec.decode(payload, values)
unsmooth_(values)
"""
COMPILING = pytest.StashKey[subprocess.Popen[bytes]]()


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Start runners warm, and compile beside their imports what they would all compile at the same time."""
    if not getattr(session.config.option, "numprocesses", None):
        return
    stack = ExitStack()
    session.config.add_cleanup(stack.close)
    has_torch = find_spec("torch") is not None
    stack.enter_context(compiling(session.config, COMPILE_ENGINE + COMPILE_CODECS * has_torch))
    if has_torch:
        template = stack.enter_context(Template.start())
        stack.enter_context(template.warming(starts_others="as asked"))


@contextmanager
def compiling(config: pytest.Config, code: str) -> Iterator[None]:
    """Run this code in a process that the session's tests wait for."""
    with subprocess.Popen([sys.executable, "-c", code]) as process:
        config.stash[COMPILING] = process
        yield


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_node_collection_finished(node: Any) -> None:
    """Let runners begin their tests when all is compiled."""
    process = node.config.stash.get(COMPILING, None)
    assert process is None or process.wait() == 0


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out tests that need torch where it is missing, and import no pure ones where none is wanted."""
    if not collection_path.name.startswith("test_"):
        return None
    wanted = not config.getoption("markexpr").startswith("not pure")
    left_out = not wanted if is_pure(collection_path) else find_spec("torch") is None
    return left_out or None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests of the pure half, and keep a file's tests that start processes on one runner.

    Each runner has one pool, and other runners' tests fill the time in which processes wait (pytest-xdist,
    `--dist loadgroup`). In `make tables` little else fills it, so a long table has both runners.
    """
    starting: dict[Path, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if is_pure(item.path):
            item.add_marker(pytest.mark.pure)
        fixtures = getattr(item, "fixturenames", ())
        if item.get_closest_marker("processes") is not None or "worker_pool" in fixtures:
            starting[item.path].append(item)
    for path, some in starting.items():
        shared = len(some) > LONG_TABLE and config.getoption("markexpr") == "tables"
        for number, item in enumerate(some):
            half = f" {number // NEIGHBOURS % 2}" if shared else ""
            item.add_marker(pytest.mark.xdist_group(f"{path.relative_to(TESTS)}{half}"))


def pytest_collection_finish() -> None:
    """Leave modules and collected tests, which stay, out of all collections of garbage."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup() -> None:
    """Compute on one thread: runners share the cores, and threads that wait for one use it up.

    Behind the time that `make quick` states, no test begins.
    """
    if time.time() > float(os.environ.get(UNTIL, "inf")):
        pytest.skip("the time of make quick is over")
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)


@pytest.fixture
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep what weft remembers between commands with the test."""
    monkeypatch.setenv("WEFT_HOME", str(tmp_path / "home"))


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of installed packages, here and in the processes that a test starts (see `installing`)."""
    folder = tmp_path / "packages"
    folder.mkdir()
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
    with found(folder):
        yield folder


@pytest.fixture
def weft_example(packages: Path) -> Path:
    """The folder with the example of a package that adds to weft."""
    install_example(packages)
    return packages


@pytest.fixture(scope="session")
def template() -> Iterator[Template]:
    """The template of the processes that this runner's tests start."""
    with Template.start() as template:
        yield template


@pytest.fixture
def warm_starts(request: pytest.FixtureRequest, template: Template) -> Iterator[None]:
    """Has processes of Python start warm, but for tests that are marked `cold`."""
    cold = request.node.get_closest_marker("cold") is not None
    with nullcontext() if cold else template.warming():
        yield


@pytest.fixture(scope="session")
def worker_pool(template: Template) -> Iterator[WorkerPool]:
    """Worker processes for tests of more than one rank."""
    with closing(WorkerPool(template)) as pool:
        yield pool
