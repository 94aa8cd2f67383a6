"""Names of loggers: the known ones, modules like wandb, and the nearest to anything else."""

import tomllib
from pathlib import Path

import pytest

from weft.describe.loggers import KNOWN_LOGGERS, LoggerNeeds, needs_of, require_logger, wandb_module
from weft.describe.run_file import parse_run
from weft.errors import InputError

ROOT = Path(__file__).parents[2]


def report_of(*names: str):
    return parse_run({"model": {"preset": "gpt-1m"}, "report": {"log": list(names)}}).report


def test_by_default_nothing_is_logged() -> None:
    assert parse_run({"model": {"preset": "gpt-1m"}}).report.log == ()


@pytest.mark.parametrize(
    ("name", "module", "needs"),
    [
        ("csv", None, LoggerNeeds()),
        ("tensorboard", None, LoggerNeeds(("tensorboard", "tensorboardX"), "loggers")),
        ("wandb", "wandb", LoggerNeeds(("wandb",), "loggers")),
        ("trackio", None, LoggerNeeds(("trackio",), "loggers")),
        ("wandb:my.own_module", "my.own_module", LoggerNeeds(("my.own_module",))),
    ],
)
def test_a_name_says_what_it_needs(name: str, module: str | None, needs: LoggerNeeds) -> None:
    assert require_logger(name) == name
    assert wandb_module(name) == module
    assert needs_of(name) == needs
    assert report_of(name).log == (name,)


def test_the_extras_of_loggers_are_those_of_the_package() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for needs in KNOWN_LOGGERS.values():
        if needs.modules:
            package = needs.modules[0].replace(".", "-")
            assert [one for one in extras[needs.extra] if one.startswith(package)], needs


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("tensorbord", "tensorboard"),
        ("trakio", "trackio"),
        ("open-telemetry", "opentelemetry"),
        ("wandb:", "wandb"),
        ("wandb:a-b", "wandb"),
        ("", "csv"),
    ],
)
def test_other_names_are_refused_with_the_nearest(name: str, near: str) -> None:
    with pytest.raises(InputError) as refusal:
        report_of("csv", name)
    (violation,) = refusal.value.violations
    assert violation.where == "run: report.log[1]"
    assert violation.nearest == near
    assert "wandb:package.module" in violation.problem


def test_a_logger_given_twice_is_refused() -> None:
    with pytest.raises(InputError, match=r"'csv' is given twice \(nearest valid: log = \[\"csv\"\]\)"):
        report_of("csv", "csv")


def test_a_run_file_with_loggers_reads_back() -> None:
    run = parse_run({"model": {"preset": "gpt-1m"}, "report": {"log": ["csv", "wandb:swanlab"]}})
    assert '[report]\nlog = ["csv", "wandb:swanlab"]' in run.to_toml()
