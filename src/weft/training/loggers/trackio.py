"""trackio: a database of this user's runs, or a server of trackio; every start fills a new run."""

from __future__ import annotations

from weft.files import write_whole
from weft.training.loggers.feed import Opening, Record
from weft.training.loggers.wandb import description_of, figures_of

# The file with trackio's id of the run of the newest start.
RUN_ID = "trackio-run-id"


class TrackioLogger:
    """A logger to trackio, set by its environment variables (TRACKIO_DIR, TRACKIO_SERVER_URL, ...).

    trackio never replaces a logged step, and finds a run to resume by its name only. So a start logs the kept
    records of earlier starts again, into a new run. On this machine, that run replaces the former one.
    """

    def __init__(self, opening: Opening) -> None:
        import trackio

        path = opening.run_dir / RUN_ID
        former = path.read_text().strip() if path.exists() else ""
        self._run = trackio.init(**description_of(opening), resume="never", embed=False)
        if former and self._run.url is None:
            trackio.api.Run(self._run.project, self._run.name, run_id=former).delete()
        write_whole(path, f"{self._run.id}\n")
        for record in sorted((*opening.held_out, *opening.steps), key=lambda one: one["step"]):
            self.log(record)

    def log(self, record: Record) -> None:
        self._run.log(figures_of(record), step=int(record["step"]))

    def flush(self) -> None:
        """Do nothing: trackio writes twice a second."""

    def finish(self) -> None:
        self._run.finish()
