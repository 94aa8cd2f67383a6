from __future__ import annotations

import string
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from program.layouts import pipelines, schedule_layout, training_program
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    _Action,
    _validate_schedule,
)
from torch_orders import orders_from_csv, orders_to_csv

from weft.errors import InputError
from weft.program.arrays import Ints
from weft.program.build import build_training_program, program_orders
from weft.program.kinds import STEP
from weft.program.schedules import SCHEDULES, get_schedule
from weft.program.schedules.base import ComputeOrder, Options, Pipeline, paths_of
from weft.program.verify import verify

Case = tuple[str, int, int, tuple[int, ...], int]


def one_path(max_devices: int) -> st.SearchStrategy[Case]:
    """Pipelines that torch can say."""
    return pipelines(max_devices).filter(lambda case: paths_of(get_schedule(case[0])) == 1)


def orders_of(name: str, pipeline: Pipeline) -> list[ComputeOrder]:
    return [get_schedule(name).order(pipeline, device, {}) for device in range(pipeline.devices)]


def same(one: list[ComputeOrder], two: list[ComputeOrder]) -> bool:
    return len(one) == len(two) and all(
        np.array_equal(left, right)
        for mine, yours in zip(one, two, strict=True)
        for left, right in zip(mine, yours, strict=True)
    )


@given(one_path(max_devices=5))
def test_every_order_comes_back_from_its_file(case: Case) -> None:
    name, devices, stages, micro_batches, _ = case
    orders = orders_of(name, Pipeline(devices, stages, micro_batches[0]))
    assert same(orders_from_csv(orders_to_csv(orders), "file"), orders)


@given(pipelines())
def test_a_program_gives_back_the_orders_it_was_built_from(case: Case) -> None:
    name, devices, stages, micro_batches, _ = case
    one = (name, devices, stages, micro_batches[:1])
    orders = orders_of(name, Pipeline(devices, stages, micro_batches[0]))
    assert same(program_orders(training_program(*one)), orders)


class Loader(PipelineScheduleMulti):
    """torch's reader and checks without its process groups."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline_order: dict[int, list[_Action | None]] = {}
        self.pp_group_size, self._num_stages = pipeline.devices, pipeline.stages
        self._n_microbatches, self._stages = pipeline.micro_batches, []


@pytest.mark.parametrize("name", [name for name, schedule in SCHEDULES.items() if paths_of(schedule) == 1])
@pytest.mark.parametrize(("devices", "micro_batches"), [(1, 1), (2, 4), (4, 8)])
def test_torch_loads_what_weft_writes(tmp_path: Path, name: str, devices: int, micro_batches: int) -> None:
    twice = Pipeline(devices, 2 * devices, micro_batches)
    schedule = get_schedule(name)
    pipeline = twice if schedule.refuse(twice, {}) is None else Pipeline(devices, devices, micro_batches)
    path = tmp_path / "order.csv"
    path.write_text(orders_to_csv(orders_of(name, pipeline)))
    loader = Loader(pipeline)
    loader._load_csv(str(path))
    places = _validate_schedule(loader.pipeline_order, devices, pipeline.stages, micro_batches)
    assert places == dict(enumerate(schedule.placement(pipeline).tolist()))
    assert loader.stage_index_to_group_rank == places


def test_two_paths_cannot_be_said_in_torch() -> None:
    with pytest.raises(InputError) as caught:
        orders_to_csv(orders_of("chimera", Pipeline(2, 2, 2)))
    assert [str(violation) for violation in caught.value.violations] == [
        "order of device 1: stage 0 is on device 0, too; torch has each on one device"
    ]


class Imported:
    """A schedule read from a file."""

    name = "imported"
    synonyms = ()
    options: dict[str, str] = {}  # noqa: RUF012

    def __init__(self, orders: list[ComputeOrder]) -> None:
        self._orders = orders

    def refuse(self, pipeline: Pipeline, options: Options) -> str | None:
        return None

    def placement(self, pipeline: Pipeline) -> Ints:
        placement = np.empty(pipeline.stages, dtype=np.int64)
        for device, order in enumerate(self._orders):
            placement[order.stage] = device
        return placement

    def order(self, pipeline: Pipeline, device: int, options: Options) -> ComputeOrder:
        return self._orders[device]


def test_what_torch_writes_becomes_a_program_with_idle_slots_left_out() -> None:
    text = "0F0,0F1,,,0B0,0I1, 0W1 \n,1F0,1B0,1F1,1I1,1W1\n"
    orders = orders_from_csv(text, "torch.csv")
    layout = schedule_layout("gpipe", 2, 2, (2,))
    program = build_training_program(layout, Imported(orders), {})
    assert verify(program) == []
    assert orders_to_csv(program_orders(program)) == "0F0,0F1,0B0,0I1,0W1\n1F0,1B0,1F1,1I1,1W1\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["empty"]),
        ("\n", ["no action"]),
        ("0F0,0B0\n\n", ["line 2", "no action"]),
        ("0F0,0SEND_F0,xyz,0B\n", ["cell 2", "'0SEND_F0'", "cell 3", "'xyz'", "cell 4", "'0B'"]),
        ("0F0,(0F1;0B0)OVERLAP_F_B\n", ["cell 2", "OVERLAP_F_B"]),
        ("0F0,0B0,0F0\n", ["0F0 is there more than once"]),
        ("0B0,0F0\n", ["0B0 comes before 0F0"]),
        ("0F0,0W0,0I0\n", ["0W0 comes before 0I0"]),
        ("0F0,0B0\n0F1,0B1\n", ["0F1: stage 0 is on line 1, too"]),
        ("0F0,0B0\n2F0,2B0\n", ["stage 2 but no stage 1"]),
        ("0F1,0B1\n", ["micro-batch 1 but no micro-batch 0"]),
        ("0F0,0F1,0B1\n", ["stage 0, micro-batch 0 has F;"]),
        ("0F0,0B0,0I0,0W0\n", ["has F B I W"]),
        ("0F0,0B0\n1F1,1B1\n", ["stage 0, micro-batch 1 has nothing", "stage 1, micro-batch 0 has nothing"]),
        ("999999999F0,999999999B0\n", ["no stage 0"]),
        ("99999999999999999999F0\n", ["cell 1"]),
        ("\x00\n", ["line 1"]),
    ],
)
def test_a_broken_file_is_refused_in_words(text: str, words: list[str]) -> None:
    with pytest.raises(InputError) as refused:
        orders_from_csv(text, "order.csv")
    assert all("order.csv" in violation.where for violation in refused.value.violations)
    assert [word for word in words if word not in str(refused.value)] == []


@given(one_path(max_devices=3), st.data())
def test_a_file_with_one_action_missing_or_doubled_is_refused(case: Case, data: st.DataObject) -> None:
    name, devices, stages, micro_batches, _ = case
    pipeline = Pipeline(devices, stages, micro_batches[0])
    rows = [line.split(",") for line in orders_to_csv(orders_of(name, pipeline)).splitlines()]
    row = data.draw(st.sampled_from(rows))
    place = data.draw(st.integers(0, len(row) - 1))
    row[place : place + 1] = data.draw(st.sampled_from([[], [row[place]] * 2]))
    with pytest.raises(InputError):
        orders_from_csv("\n".join(",".join(row) for row in rows), "order.csv")


TWO_RANKS = st.tuples(st.permutations(["0F0", "0B0", ""]), st.permutations(["1F0", "1B0", " "]))


@example("0F0, ,0I0,0W0")
@given(
    st.one_of(
        st.text(alphabet=string.digits[:3] + "FBIW,\n \"'", max_size=30),
        # Of which every fourth is an order, as by chance no text is.
        TWO_RANKS.map(lambda rows: "\n".join(map(",".join, rows))),
    )
)
def test_any_text_is_read_or_refused_with_its_name(text: str) -> None:
    try:
        orders, problems = orders_from_csv(text, "order.csv"), ()
    except InputError as refused:
        orders, problems = [], refused.violations
    assert all("order.csv" in problem.where for problem in problems)
    if not problems:
        assert same(orders_from_csv(orders_to_csv(orders), "again"), orders)


def test_only_computations_have_actions() -> None:
    step = np.array([STEP], dtype=np.int64)
    with pytest.raises(InputError, match="device 0"):
        orders_to_csv([ComputeOrder(step, step, step)])
