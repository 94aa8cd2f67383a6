"""Going on under another plan: what is taken over, what is refused, and what a refusal leaves behind."""

from __future__ import annotations

from pathlib import Path

import pytest
from pooled_runs import prepared

import weft
from weft.cli.main import run
from weft.errors import InputError
from weft.planning.lost_replicas import job_among
from weft.training.directory.resuming import kept_if_refused
from weft.training.directory.run_directory import PLAN_OF_ALL, RunDirectory
from weft.training.session import job_to_train, reopen

RUN = """
[model]
preset = "gpt-1m"
[task]
sequence = 32
[train]
{train}
precision = "fp32"
[cluster]
use = "2xv100-32gb"
[plan]
{plan}
"""


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)


def run_file(tmp_path: Path, name: str, *, plan: str = "pp = 2", train: str = "global_batch = 8") -> Path:
    path = tmp_path / f"{name}.toml"
    path.write_text(RUN.format(train=train, plan=plan))
    return path


@pytest.fixture
def started(tmp_path: Path) -> Path:
    """The directory of a run on a pipeline of two."""
    _, directory = prepared(run_file(tmp_path, "first"), directory=tmp_path / "run")
    (directory.path / "metrics.jsonl").touch()
    return directory.path


def test_the_precision_of_reductions_stays_until_the_run_file_says_another(tmp_path: Path) -> None:
    plan = "pp = 1\ndp = 2"
    train = 'global_batch = 8\nreduce_precision = "bf16"'
    _, directory = prepared(run_file(tmp_path, "first", plan=plan, train=train), directory=tmp_path / "run")
    (directory.path / "metrics.jsonl").touch()
    prepared(run_file(tmp_path, "silent", plan=plan), resume=directory.path)
    assert RunDirectory(directory.path).plan().reduce_precision == "bf16"
    # As with another precision that rounds no weight, the run goes on.
    another = run_file(tmp_path, "another", plan=plan, train=train.replace("bf16", "fp32"))
    prepared(another, resume=directory.path)
    assert RunDirectory(directory.path).plan().reduce_precision == "fp32"
    wrong = run_file(tmp_path, "wrong", plan=plan, train=train.replace("bf16", "fp16"))
    assert refusals(wrong, resume=directory.path) == [
        "reduce_precision: fp16 has room for gradients of scaled losses, and fp32 scales none "
        "(nearest valid: bf16)"
    ]
    assert RunDirectory(directory.path).plan().reduce_precision == "fp32"


def test_a_synchronisation_left_to_the_planner_stays_that_of_the_run(tmp_path: Path) -> None:
    plan = 'pp = 1\ndp = 2\n[goal]\ncontract = "empirical"\n[sync]\nmethod = '
    first = run_file(tmp_path, "first", plan=f'{plan}"local-averaging"\nevery = 3')
    _, directory = prepared(first, directory=tmp_path / "run")
    (directory.path / "metrics.jsonl").touch()
    former = directory.plan().sync
    prepared(run_file(tmp_path, "auto", plan=f'{plan}"auto"'), resume=directory.path)
    assert RunDirectory(directory.path).plan().sync == former


def refusals(source: Path, **options: Path) -> list[str]:
    with pytest.raises(InputError) as refused:
        prepared(source, **options)
    return [str(violation) for violation in refused.value.violations]


def test_another_plan_takes_the_place_of_the_former_one_whole(tmp_path: Path, started: Path) -> None:
    former = RunDirectory(started).plan()
    planned, directory = prepared(run_file(tmp_path, "second", plan="pp = 1\ndp = 2"), resume=started)
    assert directory.path == started
    assert directory.plan().plan_id == planned.plan.plan_id != former.plan_id
    assert directory.plan().mesh == {"dp": 2, "pp": 1}
    assert "dp = 2" in (started / "run.toml").read_text()
    assert "ranks [0, 1]" in (started / "program.txt").read_text()
    assert weft.plan(started / "run.toml").plan.mesh == {"dp": 2, "pp": 1}


def test_another_global_batch_and_a_precision_that_rounds_nothing_are_taken(
    tmp_path: Path, started: Path
) -> None:
    source = run_file(tmp_path, "second", train="global_batch = 12")
    source.write_text(source.read_text().replace('"fp32"', '"fp64"'))
    planned, directory = prepared(source, resume=started)
    assert (planned.plan.global_batch, planned.plan.precision) == (12, "fp64")
    assert directory.plan().plan_id == planned.plan.plan_id
    (line,) = refusals(run_file(tmp_path, "third"), resume=started)
    assert line == (
        f"{started}: saved with precision fp64, this run has fp32, which rounds the weights "
        "(nearest valid: fp64)"
    )


@pytest.mark.parametrize("precision", ["", 'precision = "any"'])
def test_what_makes_a_job_and_is_left_open_is_as_before(
    tmp_path: Path, started: Path, precision: str
) -> None:
    source = run_file(tmp_path, "second", plan="pp = 1", train="steps = 9")
    left_open = source.read_text().replace("sequence = 32", "").replace('precision = "fp32"', precision)
    source.write_text(left_open)
    planned, _ = prepared(source, resume=started)
    assert (planned.plan.global_batch, planned.plan.sequence, planned.plan.precision) == (8, 32, "fp32")
    assert planned.run.train.steps == 9


def test_another_job_is_refused_with_every_difference_and_nothing_changes(
    tmp_path: Path, started: Path
) -> None:
    before = {path: path.read_bytes() for path in started.iterdir()}
    source = run_file(tmp_path, "second", train="seed = 7")
    source.write_text(source.read_text().replace("gpt-1m", "gpt-10m"))
    model, seed = refusals(source, resume=started)
    assert model == (
        f"{started}: saved with model.preset gpt-1m, this run has gpt-10m; a run resumes with the same "
        "(nearest valid: gpt-1m)"
    )
    assert seed == (
        f"{started}: saved with seed 0, this run has 7; a run resumes with the same (nearest valid: 0)"
    )
    assert {path: path.read_bytes() for path in started.iterdir()} == before


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (("sequence = 32", "sequence = 16"), "task.sequence 32, this run has 16"),
        (("sequence = 32", "sequence = 32\npacking = true"), "task.packing False, this run has True"),
        (("[train]", "[lora]\nrank = 4\n[train]"), "lora.rank nothing, this run has 4"),
    ],
)
def test_a_key_that_another_job_changes_is_named(
    tmp_path: Path, started: Path, change: tuple[str, str], told: str
) -> None:
    source = run_file(tmp_path, "second")
    source.write_text(source.read_text().replace(*change))
    lines = refusals(source, resume=started)
    assert any(f"saved with {told}; a run resumes with the same" in line for line in lines), lines
    assert not any("saved with model " in line for line in lines)


@pytest.mark.parametrize(
    ("former", "now", "goes_on"),
    [
        ('"adamw"', '"lamb"', True),
        ('"adamw"', '"sgd"', False),
        ('"sgd"', '"adamw"', False),
        ('"sgd"\nmomentum = 0.0', '"adamw"', True),
        ('"adamw"', '"sgd"\nmomentum = 0.0', False),
        ('"muon"', '"adamw"', False),
        ('"adamw"', '"muon"', False),
    ],
)
def test_a_run_goes_on_with_an_optimizer_of_the_same_states(
    tmp_path: Path, former: str, now: str, goes_on: bool
) -> None:
    files = [run_file(tmp_path, name) for name in ("first", "second")]
    for path, name in zip(files, (former, now), strict=True):
        path.write_text(f"{path.read_text()}\n[optimizer]\nname = {name}\n")
    _, directory = prepared(files[0], directory=tmp_path / "run")
    (directory.path / "metrics.jsonl").touch()
    if goes_on:
        prepared(files[1], resume=directory.path)
        return
    (line,) = refusals(files[1], resume=directory.path)
    assert line.startswith(f"{directory.path}: saved with optimizer states mom")
    assert "; a run resumes with the same" in line


def test_a_run_that_was_started_is_not_written_over(tmp_path: Path, started: Path) -> None:
    (line,) = refusals(tmp_path / "first.toml", directory=started)
    assert f"--resume {started}" in line
    assert f"(nearest valid: {tmp_path / 'run-2'})" in line


def test_a_run_that_was_only_prepared_can_be_prepared_again(tmp_path: Path, started: Path) -> None:
    (started / "metrics.jsonl").unlink()
    prepared(run_file(tmp_path, "second", plan="pp = 1\ndp = 2"), directory=started)
    assert RunDirectory(started).plan().mesh == {"dp": 2, "pp": 1}


def test_contradicting_directories_are_refused(tmp_path: Path, started: Path) -> None:
    (line,) = refusals(tmp_path / "first.toml", directory=tmp_path / "other", resume=started)
    assert "give one of directory and resume" in line
    for name in ("resume", "directory"):
        (line,) = refusals(started, **{name: started})
        assert f"--{name} goes with a run file" in line
    (line,) = refusals(tmp_path / "first.toml", resume=tmp_path / "absent")
    assert "not a run directory" in line
    # A folder of runs is named in place of one of them.
    with pytest.raises(InputError, match=rf"it has no run.toml \(nearest valid: {started}\)"):
        RunDirectory(started.parent).require()
    with pytest.raises(InputError, match=r"run.toml: a file, not a run directory"):
        RunDirectory(started / "run.toml").require()


def test_the_command_refuses_in_one_line(
    tmp_path: Path, started: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = run_file(tmp_path, "second", train="seed = 7")
    assert run(["train", str(source), "--resume", str(started)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "saved with seed 0" in line


def test_what_the_workers_refuse_leaves_the_former_files(started: Path) -> None:
    before = {path: path.read_bytes() for path in started.iterdir()}

    def refuse() -> None:
        with kept_if_refused(started):
            (started / "plan.json").write_text("{}")
            (started / "run.toml").unlink()
            raise InputError("other data")

    with pytest.raises(InputError, match="other data"):
        refuse()
    assert {path: path.read_bytes() for path in started.iterdir()} == before


def test_a_new_run_that_is_refused_leaves_what_it_wrote(tmp_path: Path) -> None:
    def refuse() -> None:
        with kept_if_refused(tmp_path):
            (tmp_path / "plan.json").write_text("{}")
            raise InputError("no data")

    with pytest.raises(InputError, match="no data"):
        refuse()
    assert (tmp_path / "plan.json").read_text() == "{}"


def test_a_run_that_ended_without_a_lost_replica_resumes_with_the_plan_of_all(tmp_path: Path) -> None:
    text = RUN.format(
        train="global_batch = 12", plan='pp = 1\ndp = 3\ntp = 1\nmicro_batch_size = 4\nschedule = "1f1b"'
    )
    keys = 'method = "cser"\nreset_ratio = 2\nevery = 2\nkeep_errors = true'
    source = tmp_path / "lossy.toml"
    cluster = text.replace("2xv100-32gb", "4xv100-32gb")
    source.write_text(f'{cluster}[goal]\ncontract = "empirical"\n[sync]\n{keys}\n[run]\non_death = "go-on"\n')
    whole, directory = prepared(source, directory=tmp_path / "run")
    some = job_among(whole, [0, 2])
    directory.turn_to(some, whole)
    assert directory.plan() == some.plan
    assert reopen(directory.path).plan == some.plan
    assert reopen(directory.path, of_all=True).plan == whole.plan
    # With its plan, or as a run file with an open batch says.
    assert job_to_train(directory.path)[0].plan == whole.plan
    source.write_text(source.read_text().replace("global_batch = 12\n", ""))
    assert job_to_train(source, resume=directory.path)[0].plan.global_batch == 12
    directory.turn_to(whole, whole)
    assert directory.plan() == whole.plan
    assert not (directory.path / PLAN_OF_ALL).exists()
    directory.turn_to(some, whole)
    directory.prepare(whole)
    assert directory.plan() == whole.plan
    assert not (directory.path / PLAN_OF_ALL).exists()


def checkpoints_in(tmp_path: Path, name: str, folder: str) -> Path:
    path = run_file(tmp_path, name)
    path.write_text(f'{path.read_text()}[checkpoint]\ndirectory = "{folder}"\n')
    return path


def test_checkpoints_elsewhere_are_behind_a_link_in_a_folder_of_each_run(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    path = checkpoints_in(tmp_path, "elsewhere", str(shared))
    links = []
    for number in range(2):
        _, directory = prepared(path, directory=tmp_path / str(number) / "run")
        (directory.path / "metrics.jsonl").touch()
        links.append((directory.path / "checkpoints").readlink())
        prepared(path, resume=directory.path)
        assert (directory.path / "checkpoints").readlink() == links[-1]
    assert sorted(shared.iterdir()) == sorted(links)
    assert len(set(links)) == 2


def test_checkpoints_do_not_vanish_behind_a_link(started: Path, tmp_path: Path) -> None:
    (started / "checkpoints" / "step-00000001").mkdir(parents=True)
    before = (started / "run.toml").read_bytes()
    path = checkpoints_in(tmp_path, "elsewhere", str(tmp_path / "shared"))
    with pytest.raises(InputError, match=r"checkpoint\.directory: .* has checkpoints already .*move them to"):
        prepared(path, resume=started)
    assert (started / "checkpoints" / "step-00000001").is_dir()
    assert (started / "run.toml").read_bytes() == before


@pytest.mark.parametrize(
    ("folder", "said"),
    [
        ("./shared", r"checkpoint\.directory: '\./shared' is no absolute path.*nearest valid: /shared"),
        ("file://shared", r"'file://shared' is no absolute path.*nearest valid: file:///shared"),
        ("s3://", r"checkpoint\.directory: 's3://' is no URL with a protocol and a place"),
        ("://bucket", r"checkpoint\.directory: '://bucket' is no URL with a protocol and a place"),
        ("/dev/null/shared", r"checkpoint\.directory: /dev/null: is not a folder"),
    ],
)
def test_a_folder_for_checkpoints_that_cannot_be_is_refused(tmp_path: Path, folder: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        prepared(checkpoints_in(tmp_path, "wrong", folder), directory=tmp_path / "run")
    assert not (tmp_path / "run").exists()
