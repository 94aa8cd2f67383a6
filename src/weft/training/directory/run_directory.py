"""The run directory: the inputs of a run before its start, and its results at its end.

The launcher uses it; it does not import torch.

    runs/NAME/
      run.toml plan.json program.txt predicted.parquet      written before the start
      verified.json                                         the launcher's verified digests, for its workers
      then/plan.json ...                                    the same files of a plan that takes over later
      plan-of-all.json                                      the plan of all ranks, while some are lost
      at-hand/RANKS/plan.json ...                           the same files of a plan for so many ranks
      metrics.jsonl events.jsonl slots/ logs/ checkpoints/  written by the workers
      weight_log/                                           few bits of stepped weights, if asked for
      measured.parquet summary.json trace.json report.html  written when the run ends
      evaluation.json                                       written when a checkpoint is evaluated
      run.lock                                              locked while the run is being trained
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from weft.describe.plan import Plan
from weft.describe.plan_file import PlanFile, load_plan, load_plan_file
from weft.describe.plan_subject import PlanSubject, subject_of
from weft.describe.plan_versions import former_ids
from weft.describe.prediction import Prediction
from weft.describe.reading import read_json
from weft.describe.run_file import RUN_ID, RunFile, load_run
from weft.errors import InputError, RunError, Violation
from weft.files import append_record, records_in, write_whole
from weft.planning.lost_replicas import WENT_ON
from weft.planning.planned_job import PlannedJob
from weft.program.program import Program
from weft.program.table import format_program
from weft.run.record.recorder import collect_timeline
from weft.timeline.compare import Comparison, Pair, compare
from weft.timeline.perfetto import write_perfetto
from weft.timeline.store import read_timeline, write_timeline
from weft.timeline.timeline import Timeline
from weft.training.checkpoint.manifest import CHECKPOINTS, generations
from weft.training.directory.verified import write_verified

PROGRAM_ROWS = 4000
PLAN_OF_ALL = "plan-of-all.json"
# The files of each plan in a run directory.
PLAN_FILES = ("plan.json", "program.txt", "predicted.parquet", "verified.json")
# The plans for other numbers of ranks, of which a start takes one.
AT_HAND = "at-hand"
# The files that a resume in another directory needs, and that no step changes.
RESUMED_FILES = ("run.toml", RUN_ID, *PLAN_FILES, PLAN_OF_ALL, *(f"then/{name}" for name in PLAN_FILES))
# The files that a start of a rank reads, under `torchrun`.
STARTING_FILES = ("run.toml", PLAN_FILES[0], PLAN_OF_ALL, f"then/{PLAN_FILES[0]}")


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """Paths and readers of one run directory."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    def prepare(self, planned: PlannedJob) -> None:
        """Write the files that a worker needs at its start and that a comparison needs later."""
        self.path.mkdir(parents=True, exist_ok=True)
        # Each file is written whole or not at all: a kill must not cost a run to resume its plan.
        if (folder := planned.run.checkpoint.folder) is not None:
            self.link_checkpoints(folder / self._name_elsewhere, new=True)
        write_whole(self.path / "run.toml", planned.run.to_toml())
        write_plan(self.path, planned)
        self._plan_of_all.unlink(missing_ok=True)
        if planned.later is None:
            shutil.rmtree(self.then, ignore_errors=True)
        else:
            self.prepare_turn(planned.later.job)

    def prepare_turn(self, planned: PlannedJob) -> None:
        """Write the files of a plan that takes over later."""
        self.then.mkdir(exist_ok=True)
        write_plan(self.then, planned)

    @property
    def run_id(self) -> str:
        """The name of the run in all its directories, made when first asked for."""
        path = self.path / RUN_ID
        if not path.exists():
            write_whole(path, f"{uuid4().hex}\n")
        return path.read_text(encoding="utf-8").strip()

    @property
    def _name_elsewhere(self) -> str:
        return f"{self.name}-{self.run_id[:8]}"

    def storage_url(self, run: RunFile) -> str | None:
        """Return where the run's checkpoints are copied to; None: nowhere."""
        return (url := run.checkpoint.url) and f"{url.rstrip('/')}/{self._name_elsewhere}"

    def starting_files(self) -> list[str]:
        """Return those of `RESUMED_FILES` that the run has."""
        return [name for name in RESUMED_FILES if (self.path / name).exists()]

    def link_checkpoints(self, elsewhere: Path, *, new: bool = False) -> None:
        """Have the checkpoints in another folder, behind a link; make it if it is `new`.

        Raises:
            InputError: if the folder is missing or cannot be made, or there are checkpoints here.
        """
        link, key = self.path / CHECKPOINTS, "checkpoint.directory"
        if link.is_symlink() and link.readlink() == elsewhere and elsewhere.is_dir():
            return
        if any(link.glob("step-*")):
            problem = f"{link} has checkpoints already"
            raise InputError(Violation(key, problem, f"move them to {elsewhere}, or leave the key out"))
        try:
            if new:
                elsewhere.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(Violation(key, f"{elsewhere}: {error.strerror}")) from None
        if not elsewhere.is_dir():
            problem = f"{elsewhere}: no such folder; all nodes must see it"
            raise InputError(Violation(key, problem, "a folder that all nodes share"))
        if link.is_symlink():
            link.unlink()
        elif link.exists():
            link.rmdir()
        link.symlink_to(elsewhere)

    @property
    def then(self) -> Path:
        """The folder of the plan that takes over later."""
        return self.path / "then"

    @property
    def turns(self) -> bool:
        """True if another plan is to take over and has not done so yet."""
        return (self.then / PLAN_FILES[0]).exists()

    @property
    def plan_written_ns(self) -> int:
        """The time at which the plan's file was written, which another plan's file changes."""
        return (self.path / PLAN_FILES[0]).stat().st_mtime_ns

    def turn(self) -> None:
        """Replace the plan's files by the files of the plan that takes over.

        Its `plan.json` comes last: until then a start begins with the former plan, which has no steps left.
        """
        for name in reversed(PLAN_FILES):
            # A killed start may have moved the file already.
            if (self.then / name).exists():
                (self.then / name).replace(self.path / name)
        self.then.rmdir()

    @property
    def _plan_of_all(self) -> Path:
        """The plan of all replicas, while `plan.json` is that of some of them."""
        return self.path / PLAN_OF_ALL

    @property
    def own_plan(self) -> Path:
        """The plan file with which the run starts: that of all replicas."""
        return self._plan_of_all if self._plan_of_all.exists() else self.path / PLAN_FILES[0]

    def turn_to(self, planned: PlannedJob, of_all: PlannedJob) -> None:
        """Replace the plan's files by those of the replicas that are present now, and keep that of all."""
        whole = planned.plan.plan_id == of_all.plan.plan_id
        if not whole:
            write_whole(self._plan_of_all, of_all.file.to_json())
        self.prepare_turn(planned)
        self.turn()
        if whole:
            self._plan_of_all.unlink(missing_ok=True)

    def require(self) -> None:
        """Refuse a path that is not a run directory.

        Raises:
            InputError: naming the missing file, and a run in the folder.
        """
        if self.path.is_file():
            raise InputError(Violation(str(self.path), "a file, not a run directory"))
        for name in ("run.toml", "plan.json"):
            if not (self.path / name).exists():
                near = min(map(str, (found.parent for found in self.path.glob("*/plan.json"))), default="")
                raise InputError(Violation(str(self.path), f"not a run directory: it has no {name}", near))

    def finish(self, file: PlanFile, program: Program) -> dict[str, Any]:
        """Merge the workers' files into `measured.parquet`, `trace.json` and `summary.json`.

        Raises:
            RunError: if the workers left no result.
        """
        plan = file.plan
        measured = collect_timeline(self.path, program, plan.plan_id, self.name, former_ids=former_ids(plan))
        write_timeline(self.path / "measured.parquet", measured)
        write_perfetto(self.path / "trace.json", [self.predicted(), measured], program)
        summary = self.summary_of(self.result(), file)
        write_whole(self.path / "summary.json", json.dumps(summary, indent=1, sort_keys=True) + "\n")
        return summary

    def summary_of(self, result: Mapping[str, Any], file: PlanFile) -> dict[str, Any]:
        plan, prediction, _ = file
        assert prediction is not None, "a plan that runs was predicted"
        return {
            "predicted_step_s": prediction.step_s,
            "predicted_step_low_s": prediction.step_low_s,
            "predicted_step_high_s": prediction.step_high_s,
            "predicted_peak_bytes": list(prediction.peak_bytes),
            "world_size": plan.ranks,
            "plan": "plan.json",
            "plan_id": plan.plan_id,
            **result,
        }

    def plan(self) -> Plan:
        return load_plan(self.path / "plan.json")

    def planned(self, *, of_all: bool = False, ranks: int | None = None) -> tuple[PlanSubject, PlanFile]:
        """Return the plan file, and the run as `run.toml` states it, for the file's model and cluster.

        A plan file without a subject is for what `run.toml` names. `of_all`: take the plan of all replicas,
        also while some are lost. `ranks`: take the plan at hand for so many ranks, if there is one.

        Raises:
            InputError: if a file is broken, or names what cannot be found.
        """
        run = load_run(self.path / "run.toml")
        file = load_plan_file(self.path / PLAN_FILES[0])
        # Asked now: that file is there before another plan takes the place of `plan.json`.
        if of_all and self._plan_of_all.exists():
            file = load_plan_file(self._plan_of_all)
        at_hand = self.path / AT_HAND / str(ranks) / PLAN_FILES[0]
        if ranks is not None and at_hand.exists():
            file = load_plan_file(at_hand)
        subject = file.subject
        return subject_of(run) if subject is None else subject.model_copy(update={"run": run}), file

    def prediction(self) -> Prediction:
        """Return the prediction for which the plan was chosen."""
        found = load_plan_file(self.path / "plan.json").prediction
        assert found is not None, "a prepared run says what is predicted of it"
        return found

    def result(self) -> dict[str, Any]:
        return self._json("result.json", "the run has not finished")

    def summary(self) -> dict[str, Any]:
        return self._json("summary.json", "the run has not finished")

    def is_done(self, planned: PlannedJob) -> bool:
        """Return True if a start with this plan has trained all its steps, and the last one is saved."""
        if not (self.path / "summary.json").exists():
            return False
        summary, steps = self.summary(), planned.run.train.steps
        events, saved = self.events(), generations(self.path / CHECKPOINTS)
        return (
            summary["steps"] == steps
            and planned.run.to_toml() == (self.path / "run.toml").read_text(encoding="utf-8")
            and summary["plan_id"] == planned.plan.plan_id
            and events[-1:] != []
            and events[-1]["event"] == "finished"
            and saved[:1] != []
            and saved[0][0] == steps
        )

    def evaluation(self) -> dict[str, Any]:
        return self._json("evaluation.json", "the run has not been evaluated")

    def metrics(self) -> list[dict[str, Any]]:
        """Return all complete lines of metrics.jsonl, sorted by step; of one step's lines the last wins."""
        return _last_of_each_step(self._lines("metrics.jsonl"))

    def held_out(self) -> list[dict[str, Any]]:
        """Return the figures of held-out samples from events.jsonl, one record per step, as for loggers."""
        records = (held_out_record(event) for event in self._lines("events.jsonl"))
        return _last_of_each_step(record for record in records if record is not None)

    def logger_problems(self) -> list[str]:
        """Return the problems of loggers since the run's last start, one line each."""
        problems: list[str] = []
        for event in self._lines("events.jsonl"):
            if event.get("event") in ("started", "resumed"):
                problems = []
            elif event.get("event") == "logger":
                problems.append(f"logger {event['logger']}: {event['problem']}")
        return problems

    def events(self) -> list[dict[str, Any]]:
        """Return all complete lines of events.jsonl, in their order in the file."""
        return list(self._lines("events.jsonl"))

    def tell(self, event: str, **details: Any) -> None:
        """Append an event to events.jsonl; rank 0 or the launcher calls it."""
        append_record(self.path / "events.jsonl", {"time_s": time.time(), "event": event, **details})

    def compare(self, other: RunDirectory | None = None) -> Comparison:
        """Compare predicted with measured times, or this run's measured times with another run's.

        The step times are from the summaries, so that all reports of a run agree.
        """
        summary = self.summary()
        if other is None:
            step = Pair(predicted_s=summary["predicted_step_s"], measured_s=summary["measured_step_s"])
            return compare(self.predicted(), self.measured(), step=step)
        second_s = other.summary()["measured_step_s"]
        step = Pair(predicted_s=summary["measured_step_s"], measured_s=second_s)
        return compare(self.measured(), other.measured(), step=step)

    def predicted(self) -> Timeline:
        return read_timeline(self.path / "predicted.parquet")

    def measured(self) -> Timeline:
        return read_timeline(self.path / "measured.parquet")

    def _lines(self, name: str) -> Iterator[dict[str, Any]]:
        """Return the records of all complete lines of a file of JSON lines; none if there is no file."""
        path = self.path / name
        return records_in(path.read_bytes().splitlines() if path.exists() else ())

    def _json(self, name: str, missing: str) -> dict[str, Any]:
        path = self.path / name
        if not path.exists():
            raise RunError(f"{path}: missing; {missing}")
        record = read_json(path)
        if not isinstance(record, dict):
            raise InputError(Violation(str(path), "not the table that a run writes"))
        return record


def write_plan(folder: Path, planned: PlannedJob) -> None:
    """Write the files of a plan, `PLAN_FILES`, into a folder."""
    write_whole(folder / "plan.json", planned.file.to_json())
    write_whole(folder / "program.txt", format_program(planned.program, max_rows=PROGRAM_ROWS))
    write_timeline(folder / "predicted.parquet", planned.predicted.simulation.timeline)
    write_verified(folder, planned)


def complete_plan(folder: Path, planned: PlannedJob) -> None:
    """Write a plan's files into a folder that lacks some, as that of a node that was sent `plan.json`."""
    if not all((folder / name).exists() for name in PLAN_FILES):
        write_plan(folder, planned)


def held_out_record(event: Mapping[str, Any]) -> dict[str, float] | None:
    """Return an event's figures of held-out samples, each named `held_out_...`; None if it has none."""
    if "held_out_loss" not in event:
        return None
    figures = {name: value for name, value in event.items() if isinstance(value, float) and name != "time_s"}
    named = {name if name.startswith("held_out_") else f"held_out_{name}": figures[name] for name in figures}
    return {"step": event["step"], **named}


def _last_of_each_step(records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Sort records by step; of one step's records the last wins."""
    rows = {int(record["step"]): record for record in records if "step" in record}
    return [rows[step] for step in sorted(rows)]


def fresh_directory(parent: Path, name: str) -> Path:
    """Return `parent/name`, or the first free one of `parent/name-2`, `-3`, ... if it exists."""
    candidate = parent / name
    number = 2
    while candidate.exists():
        candidate = parent / f"{name}-{number}"
        number += 1
    return candidate


_STARTS = ("started", "resumed", WENT_ON)


def last_plan_id(directory: RunDirectory) -> str | None:
    """Return the plan id of the run's last start, or None before its first start."""
    return _plan_at(directory.events(), float("inf"))


def plan_since(events: Iterable[Mapping[str, Any]]) -> int:
    """Return the first step under the plan of the run's last start, by the run's events."""
    changes = [event["step"] for event in events if event.get("event") == "plan changed" and "step" in event]
    return int(changes[-1]) if changes else 0


def plans_with_the_same_tensors(directory: RunDirectory, plan_id: str) -> set[str]:
    """Return the ids of the run's plans from which this one differs by codecs alone.

    Under any of them, a rank has the same tensors.
    """
    former = {
        event["now"]: event["former"] for event in directory.events() if event["event"] == "codec changed"
    }
    found: set[str] = set()
    while (plan_id := former.get(plan_id, "")) and plan_id not in found:
        found.add(plan_id)
    return found


def recorded_loss(directory: RunDirectory, step: int, plan_ids: Collection[str]) -> float | None:
    """Return the last recorded loss of a step; None if there is none, or another plan trained the step.

    `plan_ids` are all ids of the plan, also the ids from earlier versions of weft.
    """
    for row in directory.metrics():
        if row["step"] == step and _plan_at(directory.events(), row["time_s"]) in plan_ids:
            return float(row["loss"])
    return None


def checkpoint_figures(directory: RunDirectory) -> dict[str, float]:
    """Return the number of checkpoints of all starts, with their total seconds of stall and of writing.

    The bytes are those of the last one.
    """
    saved = [event for event in directory.events() if event["event"] == "checkpoint"]
    return {
        "checkpoints": len(saved),
        "checkpoint_bytes": saved[-1]["bytes"] if saved else 0,
        "checkpoint_stall_s": sum(event["stall_s"] for event in saved),
        "checkpoint_write_s": sum(event["write_s"] for event in saved),
    }


def _plan_at(events: Sequence[dict[str, Any]], time_s: float) -> str | None:
    """Return the plan of the last start before a moment."""
    found = [
        event.get("plan_id") for event in events if event["event"] in _STARTS and event["time_s"] <= time_s
    ]
    return found[-1] if found else None
