"""What a person sees of weft's objects when a notebook, a debugger or an assertion prints them."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from pydantic import BaseModel
from small_jobs import loss_of
from small_plans import make_plan, tiny

import weft
from weft.describe.cluster_file import parse_cluster
from weft.describe.plan import Plan, Replica, Stage
from weft.describe.prediction import Prediction
from weft.errors import Violation
from weft.timeline.timeline import Timeline

LONGEST = 200
# What the walk must meet at least.
NAMED = """Planned PlannedJob Plan Stage Replica Prediction Candidate Ranking Problem Job Cluster
LayerGraph Layer Program Timeline Simulation PredictedStep Run Comparison Runtime BlockModel CapturedModel
RunFile InputError RunError"""


@pytest.fixture(scope="module")
def objects(tmp_path_factory) -> Iterator[dict[str, object]]:
    """One of everything that `weft` exports or returns, by exported name; large enough to be long."""
    planned = weft.plan(model="gpt-1m", on="16xa100-80gb", global_batch=64, schedule="1f1b", dp=8)
    timeline = planned.simulate()
    summary = {"steps": 7, "measured_step_s": 0.25, "final_loss": 3.5, "max_rss_bytes": [10**9] * 500}
    config, plan = tiny(), make_plan(tiny())
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    with weft.Runtime(plan, config, loss_of) as runtime:
        yield {
            "plan": planned,
            "Planned": planned,
            "Plan": planned.plan,
            "Cluster": planned.job.problem.job.cluster,
            "simulate": timeline,
            "Timeline": timeline,
            "train": weft.Run(Path("runs") / "gpt-1m", summary),
            "Run": (weft.Run(Path("runs") / "gpt-1m", summary), _comparison(timeline)),
            "evaluate": None,  # a plain mapping
            "Runtime": runtime,
            "PlacedDevice": weft.PlacedDevice(torch.device("cpu"), 10**9),
            "PlacedModel": weft.PlacedModel(blocks(), one_device(blocks()), ["cpu"]),
            "CapturedModel": weft.CapturedModel(torch.nn.Linear(4, 3), torch.zeros(1, 4)),
            "BlockModel": blocks(),
            "InputError": weft.InputError([Violation(f"key.{key}", "is wrong " * 9) for key in range(50)]),
            "RunError": weft.RunError("rank 3 failed\nand says why"),
            "__version__": weft.__version__,
        }
    dist.destroy_process_group()


def blocks() -> weft.BlockModel:
    layers = [torch.nn.Flatten, *[lambda: torch.nn.Linear(64, 64)] * 99]
    return weft.BlockModel(layers, example=torch.zeros(1, 64), classes=64)


def one_device(model: weft.BlockModel) -> Plan:
    """A plan with all layers on one device."""
    layers = range(len(model.layer_graph().layers))
    return make_plan(tiny()).model_copy(
        update={"stages": (Stage(layers=(*layers,), replicas=(Replica(ranks=(0,), micro_batches=4),)),)}
    )


def _comparison(timeline: Timeline) -> object:
    from weft.timeline.compare import compare

    return compare(timeline, dataclasses.replace(timeline, clock="measured"))


def made_of(thing: object) -> Iterator[object]:
    """The values of a thing's public fields and properties, and the first few members of a collection."""
    if isinstance(thing, Mapping):
        yield from list(thing.values())[:3]
    elif isinstance(thing, tuple | list):
        yield from thing[:3]
    if not _is_ours(thing):
        return
    names = {
        name
        for owner in type(thing).__mro__
        if owner is not BaseModel
        for name, value in vars(owner).items()
        if isinstance(value, property | cached_property)
    }
    if dataclasses.is_dataclass(thing):
        names |= {field.name for field in dataclasses.fields(thing)}
    if isinstance(thing, BaseModel):
        names |= set(type(thing).model_fields)
    for name in sorted(names):
        if not name.startswith("_"):
            yield getattr(thing, name)


def _is_ours(thing: object) -> bool:
    """Modules of torch are left to torch, whose way is a tree of them."""
    return type(thing).__module__.split(".")[0] == "weft" and not isinstance(thing, torch.nn.Module)


def walked(level: list[object]) -> list[object]:
    """The things and what they are made of, one of each kind that is weft's own."""
    found: dict[type, object] = {}
    while level:
        following: list[object] = []
        for thing in level:
            if _is_ours(thing):
                if type(thing) in found:
                    continue
                found[type(thing)] = thing
            following += made_of(thing)
        level = following
    return list(found.values())


def test_every_public_object_shows_itself_in_one_short_line(objects):
    assert set(objects) == set(weft.__all__), "a new public name: say here what it is or returns"
    shown = walked(list(objects.values()))
    assert set(NAMED.split()) <= {type(thing).__name__ for thing in shown}
    assert len(shown) > 40
    long = {
        type(thing).__name__: (len(text), text[:LONGEST])
        for thing in shown
        for text in (repr(thing), _printed(thing))
        if len(text) > LONGEST or "\n" in text
    }
    assert not long, "\n".join(f"{name}: {text}" for name, text in long.items())
    unnamed = [repr(thing) for thing in shown if type(thing).__name__ not in repr(thing)]
    assert not unnamed


def _printed(thing: object) -> str:
    """What `print` writes; errors are written for their readers, a line for every mistake."""
    return "" if isinstance(thing, Exception) else str(thing)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Planned", ("gpt-1m", "16xa100-80gb", "step ", "layouts")),
        ("Run", ("runs/gpt-1m", "7 steps", "250 ms", "3.5")),
        ("Runtime", ("rank 0 of 1", "tiny-gpt", "0 steps done")),
        ("BlockModel", ("100 layers", "64 classes")),
        ("CapturedModel", ("Linear of 1 layers, level block",)),
        ("InputError", ("50", "key.0")),
    ],
)
def test_what_a_person_wants_to_know_is_said(objects, name, words):
    thing = objects[name]
    text = repr(thing[0] if isinstance(thing, tuple) else thing)
    assert all(word in text for word in words), text


def test_what_a_program_is_made_of_is_counted(objects):
    planned = objects["plan"]
    assert str(len(planned.job.program)) in repr(planned.job.program)
    assert str(len(planned.simulate())) in repr(planned.simulate())
    assert planned.plan.plan_id in repr(planned.plan)
    assert f"{len(planned.candidates)} layouts" in repr(planned)
    assert "16 devices" in repr(planned.job.problem.job.cluster)


def test_thousands_of_ranks_make_no_longer_lines():
    ranks = tuple(range(10_000))
    replica = make_plan(tiny()).stages[0].replicas[0].model_copy(update={"ranks": ranks})
    prediction = Prediction(
        step_s=1.0,
        step_low_s=0.5,
        step_high_s=2.0,
        first_step_s=2.0,
        peak_bytes=(10**9,) * 10_000,
        source="data sheet",
    )
    many = make_plan(tiny(), dp=2000)
    long_name: Plan = many.model_copy(update={"model": "a-long\nname " * 99})
    mixed = parse_cluster("+".join(f"{count}xa100-80gb" for count in range(8, 800, 8)))
    things: list[object] = [replica, prediction, many, many.stages[0], long_name, mixed]
    for show in (repr, str):
        lengths = {type(thing).__name__: len(_one_line(show, thing)) for thing in things}
        assert max(lengths.values()) <= LONGEST, lengths


def _one_line(show: Callable[[object], str], thing: object) -> str:
    text = show(thing)
    assert "\n" not in text
    return text


def test_public_functions_state_arguments_results_and_errors() -> None:
    faces = [getattr(weft, name) for name in weft.__all__ if name[0].islower()]
    assert len(faces) == 4
    for face in [*faces, weft.Runtime.step]:
        said = inspect.getdoc(face) or ""
        sections = [line for line in said.splitlines() if line in ("Args:", "Returns:", "Raises:")]
        assert sections[0] == "Args:", face
        assert sections[-1] == "Raises:", face
        arguments = said.split("Args:\n")[1].split("\n\n")[0]
        stated = ", ".join(re.findall(r"^    ([a-z_, ]+): ", arguments, re.MULTILINE)).split(", ")
        assert stated == [name for name in inspect.signature(face).parameters if name != "self"]
