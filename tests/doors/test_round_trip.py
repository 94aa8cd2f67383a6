"""A plan in the words of another stack is the same when it is read again, but for what is said to be lost."""

from __future__ import annotations

from typing import Any

import pytest
from doors.jobs import planned, run_of
from hypothesis import assume, given
from hypothesis import strategies as st

from weft.doors.checks import findings
from weft.doors.checks.base import Severity
from weft.doors.configuration import Configuration
from weft.doors.emit import emit
from weft.doors.explain import READERS, read_configuration
from weft.errors import InputError
from weft.planning.planned_job import PlannedJob

STACKS = {
    "megatron": "Megatron-LM",
    "torchtitan": "torchtitan",
    "torchtitan-toml": "torchtitan",
    "deepspeed": "DeepSpeed",
    "accelerate": "Accelerate",
}
# A job, and a layout of it.
Choices = tuple[dict[str, Any], dict[str, Any]]
LOOPED = ("depth-first", "breadth-first")


@st.composite
def choices(draw: st.DrawFn) -> Choices:
    """Layouts of a Llama on up to 32 devices, with a step of a few micro-batches."""
    pipeline = draw(st.sampled_from([1, 2, 4]))
    tensor, context = draw(st.sampled_from([(1, 1), (2, 1), (4, 1), (1, 2)]))
    data = draw(st.sampled_from([1, 2, 4]))
    size = draw(st.sampled_from([1, 2, 3]))
    micro_batches = pipeline * draw(st.sampled_from([1, 2, 4]))
    loops = draw(st.sampled_from([1, 2, 4])) if pipeline > 1 else 1
    schedule = draw(
        st.sampled_from(LOOPED if loops > 1 else ("1f1b", "gpipe") if pipeline > 1 else ("1f1b",))
    )
    sharding = draw(st.sampled_from(["zero-0", "zero-1", "zero-2", "zero-3"])) if data > 1 else "zero-0"
    island = 2 if data == 4 and sharding != "zero-0" and draw(st.booleans()) else None
    layout = {
        "pp": pipeline,
        "dp": data,
        "loops": loops,
        "micro_batch_size": size,
        "schedule": schedule,
        "tp": tensor,
        "cp": context,
        "sharding": sharding,
        "island": island,
        "recompute": draw(st.sampled_from(["none", "selective", "full"])),
    }
    job = {
        "model": draw(st.sampled_from(["llama-1b", "gpt2"])),
        "on": f"{pipeline * tensor * context * data}xa100-80gb",
        "global_batch": data * size * micro_batches,
        "precision": draw(st.sampled_from(["bf16", "fp32"])),
        "sequence": 1024,
    }
    return job, layout


def job_of(given: Choices, stack: str) -> PlannedJob:
    """The planned job; what the schedule or the stack refuses is left out."""
    job, layout = given
    assume(not stack.startswith("torchtitan") or job["model"].startswith("llama"))
    try:
        return planned(run_of(**job), **layout)
    except InputError:
        assume(False)
        raise


def said(configuration: Configuration) -> dict[str, Any]:
    """What a file says, with 1 for every axis that it leaves out."""
    axes = ("pp", "tp", "cp", "loops")
    return {axis: getattr(configuration.layout, axis) or 1 for axis in axes} | {
        "dp": configuration.replicas,
        "micro_batch_size": configuration.layout.micro_batch_size,
        "global_batch": configuration.samples_per_step,
        "sharding": configuration.layout.sharding,
        "island": configuration.layout.island,
        "recompute": configuration.layout.recompute or "none",
        "precision": configuration.precision,
        "schedule": configuration.layout.schedule,
    }


# What the text of a loss says of an attribute that then comes back otherwise.
WORDS = {
    "sharding": ("zero-",),
    "island": ("islands", "zero-"),
    "recompute": ("recompute", "recomputation"),
    "schedule": ("schedule", "loops", "stages per device", "micro-batches in loops"),
    "loops": ("loops", "stages per device"),
    "global_batch": ("micro-batches in loops", "micro-batches on"),
}


@pytest.mark.parametrize("stack", STACKS)
@given(drawn=choices())
def test_what_is_emitted_is_read_back_but_for_what_is_said_to_be_lost(stack: str, drawn: Choices) -> None:
    job = job_of(drawn, stack)
    emitted = emit(job, stack)
    configuration = read_configuration(emitted.text, emitted.file)
    assert configuration.stack == STACKS[stack]
    plan, found = job.plan, said(configuration)
    layout_stages = plan.mesh["pp"]
    wanted: dict[str, Any] = {
        "pp": layout_stages,
        "tp": plan.mesh.get("tp", 1),
        "cp": plan.cp,
        "loops": len(plan.stages) // layout_stages,
        "dp": plan.mesh["dp"],
        "micro_batch_size": plan.micro_batch_size,
        "global_batch": plan.global_batch,
        "sharding": plan.sharding,
        "island": plan.island,
        "recompute": plan.stages[0].recompute,
        "precision": plan.precision,
        "schedule": plan.schedule.name,
    }
    if stack == "accelerate":
        # The samples of a micro-batch are the program's, in the launch line.
        assert f"--per_device_train_batch_size {plan.micro_batch_size} " in emitted.launch
        assert emitted.launch.endswith(f"--gradient_accumulation_steps {micro_batches_of(job)}")
        for attribute in ("micro_batch_size", "global_batch"):
            found[attribute] = wanted[attribute]
    lost = " ".join(str(loss) for loss in emitted.losses)
    for attribute, value in wanted.items():
        if found[attribute] != value:
            assert any(word in lost for word in WORDS.get(attribute, ())), (attribute, found, emitted.losses)
    wrong = [one for one in findings(configuration) if one.severity is not Severity.SLOW]
    # Micro-batches that cannot fill Megatron-LM's loops are said to be lost.
    assert not wrong or "micro-batches" in lost, wrong


def micro_batches_of(job: PlannedJob) -> int:
    """Micro-batches of one replica."""
    return job.plan.stages[0].replicas[0].micro_batches


@pytest.mark.parametrize("stack", STACKS)
def test_every_file_is_recognised_by_one_reader_only(stack: str) -> None:
    job = planned(run_of(), pp=4, dp=4, sharding="zero-1")
    emitted = emit(job, stack)
    readers = [name for name, reader in READERS.items() if reader.recognises(emitted.text, emitted.file)]
    assert readers == [STACKS[stack]]
