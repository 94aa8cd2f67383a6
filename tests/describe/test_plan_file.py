"""Plan files: reading an edited one, and everything that keeps a plan from its model and cluster."""

import hashlib
import json

import pytest
from installing import register

from weft.describe.cluster_file import parse_cluster
from weft.describe.families import layer_graph
from weft.describe.layer import Layer
from weft.describe.layer_graph import LayerGraph
from weft.describe.models import PRESETS
from weft.describe.plan import Choice, Plan, Replica, Stage
from weft.describe.plan_file import PlanFile, check_plan, load_plan, load_plan_file, parse_plan_file
from weft.describe.prediction import Prediction
from weft.errors import InputError

GRAPH = layer_graph(PRESETS["gpt-1m"])
CLUSTER = parse_cluster("8xa100-80gb")


def replicas(*ranks: int, micro_batches: int = 4) -> tuple[Replica, ...]:
    return tuple(Replica(ranks=(rank,), micro_batches=micro_batches) for rank in ranks)


PREDICTION = Prediction(
    step_s=1.0, step_low_s=0.9, step_high_s=1.1, first_step_s=1.2, peak_bytes=(1, 2), source="data sheet"
)


def plan(**changes) -> Plan:
    values = {
        "model": GRAPH.name,
        "model_fingerprint": GRAPH.fingerprint,
        "cluster": CLUSTER.name,
        "cluster_fingerprint": CLUSTER.fingerprint,
        "sequence": GRAPH.sequence,
        "global_batch": 32,
        "micro_batch_size": 4,
        "mesh": {"pp": 2, "dp": 2},
        "stages": (
            Stage(layers=(0, 1, 2), replicas=replicas(0, 1)),
            Stage(layers=(3, 4, 5), replicas=replicas(2, 3)),
        ),
        "schedule": Choice(name="1f1b"),
        **changes,
    }
    return Plan(**values)


def problems(changed: Plan) -> list[str]:
    return [str(violation) for violation in check_plan(changed, GRAPH, CLUSTER)]


def test_a_sound_plan_has_no_violation():
    assert problems(plan()) == []


def test_a_plan_reads_back_from_its_file(tmp_path):
    path = tmp_path / "plan.json"
    shared = plan(sharding="zero-3", island=2)
    for one in (
        PlanFile(plan()),
        PlanFile(plan(), PREDICTION),
        PlanFile(shared),
        PlanFile(plan(schedule=Choice(name="x", options={"a": 1.5})), PREDICTION),
    ):
        path.write_text(one.to_json())
        assert load_plan_file(path) == one
        assert load_plan(path) == one.plan
        assert load_plan(path).plan_id == one.plan.plan_id


def test_a_prediction_stands_beside_the_decisions(tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(PlanFile(plan(), PREDICTION).to_json())
    record = json.loads(path.read_text())
    assert record["prediction"]["step_s"] == PREDICTION.step_s
    assert record["plan_id"] == plan().plan_id
    record["prediction"]["step_s"] = -1.0
    with pytest.raises(InputError) as caught:
        parse_plan_file(record, "plan.json")
    (line,) = map(str, caught.value.violations)
    assert line.startswith("plan.json: prediction.step_s: -1.0: must be greater than 0")


def test_only_plans_with_islands_say_so():
    plain, islands = plan(sharding="zero-3"), plan(sharding="zero-3", island=2)
    assert "island" not in PlanFile(plain).to_json()
    assert '"island": 2' in PlanFile(islands).to_json()
    left_out: dict[str, object] = dict.fromkeys(
        ("island", "reduce_precision", "methods", "layer_choices", "stack", "buffers", "launch", "optimizer"),
        True,
    )
    record = plain.model_dump(mode="json", exclude=left_out | {"stages": {"__all__": {"splits"}}})
    canonical = json.dumps(record, sort_keys=True, separators=(",", ":"))
    assert plain.plan_id == hashlib.sha256(canonical.encode()).hexdigest()[:16]
    assert plain.plan_id != islands.plan_id


def test_only_plans_with_methods_say_so(tmp_path):
    plain, clipped = plan(), plan(methods=(Choice(name="gradient-norm"),))
    assert "methods" not in PlanFile(plain).to_json()
    assert plain.plan_id != clipped.plan_id
    assert plain.method("gradient-norm") is None
    assert clipped.method("gradient-norm") == clipped.methods[0]
    (tmp_path / "plan.json").write_text(PlanFile(clipped).to_json())
    assert load_plan(tmp_path / "plan.json") == clipped
    assert problems(clipped) == []


def test_methods_that_nobody_contributes_are_refused():
    (line,) = problems(plan(methods=(Choice(name="gradient-norn"),)))
    assert line.startswith("plan: methods: 'gradient-norn' is not one of ")
    assert line.endswith(" (nearest valid: gradient-norm)")
    twice = plan(methods=2 * (Choice(name="gradient-norm"),))
    assert problems(twice) == ["plan: methods: 'gradient-norm': each can be named once"]


def test_ways_to_agree_that_no_runtime_knows_are_refused(packages):
    register(packages, "weft-other", {"weft.synchronisers": {"rounded": "weft_absent:Rounded"}})
    assert problems(plan(sync=Choice(name="rounded"))) == []
    (line,) = problems(plan(sync=Choice(name="roundd")))
    assert line.startswith("plan: sync: 'roundd' is not one of clan, cser, dense, ")
    assert line.endswith(" (nearest valid: rounded)")
    for name in ("rounded", "dense"):
        (line,) = problems(plan(sync=Choice(name=name, options={"bits": 4})))
        assert line == f"plan: sync: '{name}' takes no options, given bits"


def test_a_wrong_item_of_a_list_is_one_mistake():
    record = json.loads(PlanFile(plan()).to_json())
    record["stages"][0]["replicas"] = [{"ranks": [-1], "micro_batches": 1}]
    with pytest.raises(InputError) as refused:
        parse_plan_file(record)
    (line,) = map(str, refused.value.violations)
    assert line.startswith("plan: stages[0].replicas[0].ranks[0]: -1: ")
    record["stages"][0]["replicas"] = []
    with pytest.raises(InputError, match=r"^plan: stages\[0\].replicas: \[\]: must have at least 1 item$"):
        parse_plan_file(record)


def test_methods_of_others_refuse_plans(packages):
    (packages / "weft_other.py").write_text(
        "from weft.bundles import Bundle\n"
        "from weft.describe.plan_file import PlanRule\n"
        "from weft.errors import Violation\n"
        "def threes(plan, graph):\n"
        "    if plan.global_batch % 3:\n"
        "        yield Violation('plan: global_batch', f'{plan.global_batch} is not for three', '33')\n"
        "BUNDLE = Bundle(name='threes', parts=(PlanRule(refuse=threes),))\n"
    )
    register(packages, "weft-other", {"weft.methods": {"threes": "weft_other:BUNDLE"}})
    expected = "plan: global_batch: 32 is not for three (nearest valid: 33)"
    assert problems(plan()) == [expected]
    found = problems(plan(blocking=("messages", "messages"), sharding="zero-1", island=3))
    assert [line.split(":")[1] for line in found] == [" island", " global_batch", " blocking"]


def test_the_mesh_says_how_many_ranks_divide_the_tokens(tmp_path):
    divided = plan(mesh={"pp": 2, "dp": 1, "cp": 2})
    assert (plan().cp, divided.cp) == (1, 2)
    (tmp_path / "plan.json").write_text(PlanFile(divided).to_json())
    assert load_plan(tmp_path / "plan.json") == divided


def test_an_edited_plan_is_legal_and_another_plan(tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(PlanFile(plan()).to_json().replace('"name": "1f1b"', '"name": "gpipe"'))
    edited = load_plan(path)
    assert edited.schedule.name == "gpipe"
    assert edited.plan_id != plan().plan_id


def test_an_edited_plan_has_no_prediction_until_it_is_predicted_anew():
    record = json.loads(PlanFile(plan(), PREDICTION).to_json())
    assert parse_plan_file(record).prediction == PREDICTION
    assert parse_plan_file(record | {"global_batch": 2 * record["global_batch"]}).prediction is None
    # Nobody has edited one that was written without an id.
    del record["plan_id"]
    assert parse_plan_file(record).prediction == PREDICTION


def test_every_violation_of_a_file_is_listed():
    record = json.loads(PlanFile(plan()).to_json())
    record["shedule"] = record.pop("schedule")
    record["global_batch"] = "32"
    record["precision"] = "fp8"
    record["stages"][1]["replicas"][0]["ranks"] = [-1]
    record["stages"][0]["layers"] = []
    record["sharding"] = "zero-4"
    record["sync"]["options"] = {"bits": [1]}
    with pytest.raises(InputError) as refused:
        parse_plan_file(record, "plan.json")
    lines = str(refused.value).splitlines()
    for key in (
        "shedule: unknown key",
        "schedule: missing",
        "plan.json: global_batch",
        "plan.json: precision",
        "stages[1].replicas[0].ranks[0]",
        "stages[0].layers",
        "plan.json: sharding",
        "sync.options.bits: [1]: must be a number, text, true or false",
    ):
        assert sum(key in line for line in lines) == 1, key
    assert any("nearest valid: schedule" in line for line in lines)


@pytest.mark.parametrize(
    "content", ["", "[]", "null", "{", "NaN", '{"a": Infinity}', '{"a": 1e999}', "[" * 100000, '"\\ud800"']
)
def test_what_is_not_a_plan_is_refused(tmp_path, content):
    path = tmp_path / "plan.json"
    path.write_text(content)
    with pytest.raises(InputError):
        load_plan(path)


def test_a_plan_for_something_else_is_named_so():
    found = problems(plan(model="other", model_fingerprint="0" * 16, cluster_fingerprint="1" * 16))
    assert len(found) == 2
    assert "the plan is for 'other'" in found[0]
    assert CLUSTER.fingerprint in found[1]
    (changed,) = problems(plan(model_fingerprint="0" * 16))
    assert "is not as it was when the plan was made; plan it again" in changed


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ((0, 1), None),
        (
            (0, 1, 2),
            "plan: stages: tp 3 does not divide 4 heads, 512 feed-forward columns; nearest tp: 2",
        ),
    ],
)
def test_tensor_ranks_must_divide_the_layers(ranks, expected):
    wide = Stage(layers=tuple(range(len(GRAPH.layers))), replicas=(Replica(ranks=ranks, micro_batches=1),))
    found = problems(plan(stages=(wide,)))
    about = [line for line in found if "tp " in line]
    assert about == ([] if expected is None else [expected])


@pytest.mark.parametrize(
    ("cp", "ranks", "sequence", "expected"),
    [
        (2, (0, 1), 256, None),
        (
            3,
            (0, 1, 2),
            256,
            "plan: mesh.cp: cp 3: sequence 256 is not a multiple of 2 x cp = 6; nearest sequence: 252",
        ),
        (
            4,
            (0, 1, 2, 3),
            5,
            "plan: mesh.cp: cp 4: sequence 5 is not a multiple of 2 x cp = 8; nearest sequence: 8",
        ),
        (2, (0, 1, 2, 3), 256, None),
        (
            2,
            (0, 1, 2, 3),
            86,
            "plan: mesh.cp: cp 2: sequence 86 is not a multiple of 2 x cp = 4; nearest sequence: 84",
        ),
        (
            2,
            (0, 1, 2),
            256,
            "plan: mesh.cp: 2 context ranks, but replicas with 3 ranks (nearest valid: 1)",
        ),
    ],
)
def test_context_ranks_must_divide_the_tokens(cp, ranks, sequence, expected):
    wide = Stage(layers=tuple(range(len(GRAPH.layers))), replicas=(Replica(ranks=ranks, micro_batches=1),))
    found = problems(plan(stages=(wide,), mesh={"cp": cp, "tp": len(ranks) // cp}, sequence=sequence))
    about = [line for line in found if "mesh.cp" in line]
    assert about == ([] if expected is None else [expected])


def stage(layers: tuple[int, ...], ranks: tuple[int, ...]) -> Stage:
    return Stage(layers=layers, replicas=replicas(*ranks))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"stages": (stage((0, 1), (0, 1)), stage((3, 4, 5), (2, 3)))},
            ["no stage has layers 2"],
        ),
        (
            {"stages": (stage((0, 1, 2, 3), (0, 1)), stage((3, 4, 5), (2, 3)))},
            ["layers 3 are held more than once"],
        ),
        (
            {"stages": (stage((0, 1, 2), (0, 1)), stage((3, 4, 5, 6), (2, 3)))},
            ["stages[1].layers: 6: layers 0 to 5 exist (nearest valid: 5)"],
        ),
        (
            {"stages": (stage((0, 1, 4, 5), (0, 1)), stage((2, 3), (2, 3)))},
            ["stages 0, 1 wait for each other; a stage must be convex"],
        ),
        (
            {"stages": (stage((0, 1, 2), (0, 0)), stage((3, 4, 5), (2, 1)))},
            ["stages[0].replicas: ranks 0 hold this stage more than once", "mesh: pp 2 x dp 2 is 4 ranks"],
        ),
        (
            {"stages": (stage((0, 1, 2), (0, 1)), stage((3, 4, 5), (2, 8)))},
            ["ranks 8: '8xa100-80gb' has ranks 0 to 7", "ranks 3, 4, 5, 6, 7 hold no stage"],
        ),
        ({"mesh": {"pp": 2}}, ["mesh: pp 2 is 2 ranks, the stages use 4"]),
        ({"mesh": {"pp": 2, "dq": 2}}, ["mesh: 'dq' is not one of pp, dp, ep, cp, tp (nearest valid: dp)"]),
        ({"mesh": {"pp": 2, "tp": 2}}, ["mesh.tp: 2, but replicas divide layers by 1 (nearest valid: 1)"]),
        (
            {
                "stages": (stage((0, 1, 2), (0,)), stage((3, 4, 5), (1,))),
                "mesh": {"pp": 2},
                "global_batch": 16,
                "sharding": "zero-2",
            },
            ["sharding: zero-2 shares states out over replicas; stages 0, 1 have one (nearest valid: zero-"],
        ),
        (
            {"island": 2},
            ["island: islands of 2 replicas share states out, and zero-0 shares nothing (nearest valid"],
        ),
        (
            {"island": 3, "sharding": "zero-3"},
            ["island: 2 replicas cannot make whole islands of 3 (nearest valid: 2)"],
        ),
        (
            {"island": 1, "sharding": "zero-1"},
            ["island: an island of 1 replica has nobody to share with (nearest valid: 2)"],
        ),
        ({"blocking": ("messages", "messages")}, ["blocking: messages, messages: each can be named once"]),
        ({"global_batch": 33}, ["33 is not divisible by micro_batch_size = 4 (nearest valid: 32)"]),
        (
            {"global_batch": 64},
            ["stages[0].replicas: 8 micro-batches in all", "stages[1].replicas: 8 micro-batches in all"],
        ),
    ],
)
def test_everything_that_keeps_a_plan_from_running_is_named(changes, expected):
    found = problems(plan(**changes))
    assert len(found) == len(expected), found
    for line, part in zip(found, expected, strict=True):
        assert part in line


def test_a_precision_the_device_does_not_have_is_refused():
    cluster = parse_cluster("8xv100-16gb")
    changed = plan(precision="bf16", cluster_fingerprint=cluster.fingerprint)
    (violation,) = check_plan(changed, GRAPH, cluster)
    assert "v100-16gb does not support bf16" in str(violation)
    assert violation.nearest == "fp32"


def test_stages_of_two_branches_that_wait_for_each_other_are_found():
    # 0 -> 1 and 2 -> 3 join in 4: {0, 3} and {1, 2} are convex alone but form a circle.
    names = ("source", "left", "other", "right", "join")
    graph = LayerGraph(
        name="branches",
        layers=tuple(Layer(name=name, kind="block") for name in names),
        edges=((0, 1), (2, 3), (1, 4), (3, 4)),
        sequence=8,
    )
    changes = {"model_fingerprint": graph.fingerprint, "mesh": {"pp": 3}}
    stages = (stage((0, 3), (0,)), stage((1, 2), (1,)), stage((4,), (2,)))
    batch = {"global_batch": 16}
    found = check_plan(plan(stages=stages, **changes, **batch), graph, CLUSTER)
    assert [str(one) for one in found] == [
        "plan: stages: stages 0, 1 wait for each other; a stage must be convex"
    ]
    stages = (stage((0, 1), (0,)), stage((2, 3), (1,)), stage((4,), (2,)))
    assert check_plan(plan(stages=stages, **changes, **batch), graph, CLUSTER) == []
