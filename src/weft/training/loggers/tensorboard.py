"""Event files for TensorBoard, in the folder `tensorboard` of the run directory."""

from __future__ import annotations

import json
from typing import Any

from weft.training.loggers.feed import Opening, Record

FOLDER = "tensorboard"


class TensorBoardLogger:
    """A logger into event files, one scalar per figure; a resumed run hides the records that it redoes."""

    def __init__(self, opening: Opening) -> None:
        self._writer = _writer_class()(
            log_dir=str(opening.run_dir / FOLDER), purge_step=opening.first_step or None
        )
        config = json.dumps(opening.config, indent=1, sort_keys=True)
        # TensorBoard shows text as Markdown; an indented block is code.
        self._writer.add_text("config", "\n".join("    " + line for line in config.splitlines()))

    def log(self, record: Record) -> None:
        step, time_s = int(record["step"]), record.get("time_s")
        for name, value in record.items():
            if name not in ("step", "time_s"):
                self._writer.add_scalar(name, value, step, walltime=time_s)

    def flush(self) -> None:
        self._writer.flush()

    def finish(self) -> None:
        self._writer.close()


def _writer_class() -> Any:
    """Return torch's writer, which needs the package tensorboard, or else the one of tensorboardX."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        import tensorboardX

        return tensorboardX.SummaryWriter
    return SummaryWriter
