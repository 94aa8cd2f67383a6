"""Whatever a file holds, the parsers answer with a value or an InputError, never with anything else."""

import copy
import json
import tomllib

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from weft.describe.cluster_file import cluster_of, load_cluster, parse_cluster
from weft.describe.cluster_tables import to_toml
from weft.describe.families import layer_graph
from weft.describe.models import PRESETS, resolve_model
from weft.describe.plan import Choice, Plan, Replica, Stage
from weft.describe.plan_file import PlanFile, check_plan, load_plan, parse_plan_file
from weft.describe.run_file import commented_run_file, load_run, parse_run
from weft.errors import InputError

CLUSTER = parse_cluster("16xa100-80gb+2xt4")
GRAPH = layer_graph(PRESETS["gpt-1m"])
PLAN = Plan(
    model=GRAPH.name,
    model_fingerprint=GRAPH.fingerprint,
    cluster=CLUSTER.name,
    cluster_fingerprint=CLUSTER.fingerprint,
    sequence=256,
    global_batch=8,
    micro_batch_size=2,
    mesh={"pp": 2},
    stages=tuple(
        Stage(layers=layers, replicas=(Replica(ranks=(rank,), micro_batches=4),))
        for rank, layers in enumerate([(0, 1, 2), (3, 4, 5)])
    ),
    schedule=Choice(name="1f1b"),
)
TEXTS = {"run": commented_run_file(), "cluster": to_toml(CLUSTER), "plan": PlanFile(PLAN).to_json()}
LOADERS = {"run": load_run, "cluster": load_cluster, "plan": load_plan}
CONFIG = {"model_type": "gpt2", "n_layer": 2, "n_embd": 8, "n_head": 2, "vocab_size": 11, "n_positions": 16}

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([10**30, -(10**30), 10**400, 0, -1]),
    st.floats(),
    st.text(max_size=20),
    st.sampled_from(["80 GB", "1e999 GB/s", "-3 us", "nan", "this-machine", "zero-3", "a100-80gb"]),
)
# Besides any text, the words that the validator itself uses in its locations.
keys = st.text(max_size=8) | st.sampled_from(["int", "str", "[key]", "literal"])
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3),
    max_leaves=6,
)


def places(record, path=()):
    """Paths of all values inside nested tables and lists."""
    yield path
    items = (
        record.items() if isinstance(record, dict) else enumerate(record) if isinstance(record, list) else ()
    )
    for key, value in items:
        yield from places(value, (*path, key))


@st.composite
def mutated(draw, record):
    """`record` with one to three values replaced, removed, added or doubled."""
    record = copy.deepcopy(record)
    for _ in range(draw(st.integers(1, 3))):
        spots = [path for path in places(record) if path]
        if not spots:
            break
        *path, key = draw(st.sampled_from(spots))
        parent = record
        for part in path:
            parent = parent[part]
        action = draw(st.sampled_from(["replace", "remove", "add", "double"]))
        if action == "remove":
            del parent[key]
        elif action == "replace":
            parent[key] = draw(values)
        elif isinstance(parent, list):
            parent.append(copy.deepcopy(parent[key]) if action == "double" else draw(values))
        else:
            parent[draw(keys)] = draw(values)
    return record


def refused_or_accepted(call, *arguments):
    """The result of a parser, or None after a refusal whose every violation is one line with a place."""
    try:
        return call(*arguments)
    except InputError as error:
        violations = error.violations
    assert violations
    assert all(violation.where and "\n" not in str(violation) for violation in violations)
    return None


@given(mutated(tomllib.loads(TEXTS["run"])))
@settings(max_examples=300)
def test_mutated_run_tables(record):
    run = refused_or_accepted(parse_run, record, "file")
    if run is not None:
        assert parse_run(tomllib.loads(run.to_toml())) == run


@given(mutated(tomllib.loads(TEXTS["cluster"])))
@settings(max_examples=300)
def test_mutated_cluster_tables(record):
    cluster = refused_or_accepted(cluster_of, record, "file")
    if cluster is not None:
        assert cluster_of(tomllib.loads(to_toml(cluster)), "file") == cluster


@given(mutated(json.loads(TEXTS["plan"])))
@settings(max_examples=300)
def test_mutated_plans(record):
    found = refused_or_accepted(parse_plan_file, record, "file")
    if found is not None:
        assert all("\n" not in str(violation) for violation in check_plan(found.plan, GRAPH, CLUSTER))
        assert parse_plan_file(json.loads(PlanFile(found.plan).to_json())).plan == found.plan


@given(mutated(CONFIG))
@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_mutated_model_configurations(tmp_path, record):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(record))
    config = refused_or_accepted(resolve_model, str(path))
    if config is not None:
        assert config.hidden % config.heads == 0


@pytest.mark.parametrize("kind", list(TEXTS))
@given(data=st.data())
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_damaged_texts(tmp_path, kind, data):
    """Bytes of a valid file are cut out, overwritten or inserted anywhere."""
    content = TEXTS[kind].encode()
    start = data.draw(st.integers(0, len(content)))
    end = data.draw(st.integers(start, min(len(content), start + 40)))
    path = tmp_path / "file"
    path.write_bytes(content[:start] + data.draw(st.binary(max_size=20)) + content[end:])
    refused_or_accepted(LOADERS[kind], path)


@pytest.mark.parametrize("kind", list(TEXTS))
@given(content=st.binary(max_size=100) | st.text(max_size=100).map(str.encode))
@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_random_bytes(tmp_path, kind, content):
    path = tmp_path / "file"
    path.write_bytes(content)
    refused_or_accepted(LOADERS[kind], path)


@given(st.text(max_size=60))
def test_random_words_for_clusters_and_models(text):
    refused_or_accepted(parse_cluster, text)
    refused_or_accepted(resolve_model, text)
