"""Names of loggers: the known ones, modules like wandb, and the nearest to anything else."""

import pytest

from weft.describe.loggers import logger_packages, require_logger, wandb_module
from weft.describe.run_file import parse_run
from weft.errors import InputError


def report_of(*names: str):
    return parse_run({"model": {"preset": "gpt-1m"}, "report": {"log": list(names)}}).report


def test_by_default_nothing_is_logged() -> None:
    assert parse_run({"model": {"preset": "gpt-1m"}}).report.log == ()


@pytest.mark.parametrize(
    ("name", "module", "packages"),
    [
        ("csv", None, ()),
        ("tensorboard", None, ("tensorboard", "tensorboardX")),
        ("wandb", "wandb", ("wandb",)),
        ("wandb:my.own_module", "my.own_module", ("my.own_module",)),
    ],
)
def test_a_name_says_what_it_needs(name: str, module: str | None, packages: tuple[str, ...]) -> None:
    assert require_logger(name) == name
    assert wandb_module(name) == module
    assert logger_packages(name) == packages
    assert report_of(name).log == (name,)


@pytest.mark.parametrize(
    ("name", "near"),
    [("tensorbord", "tensorboard"), ("wandb:", "wandb"), ("wandb:a-b", "wandb"), ("", "csv")],
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
    run = parse_run({"model": {"preset": "gpt-1m"}, "report": {"log": ["csv", "wandb:trackio"]}})
    assert '[report]\nlog = ["csv", "wandb:trackio"]' in run.to_toml()
