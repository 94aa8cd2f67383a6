"""The log of the payloads in which replicas tell each other their stepped weights, since a checkpoint.

    weight_log/step-00000100/rank-00003.log       of rank 3, since the checkpoint of step 100

Replicas add each other's payloads to the same weights. So a checkpoint and the payloads of all ranks give the
weights of every later step, as a database's redo log does. Check-N-Run (Eisenman et al., arXiv 2010.08679)
writes such differences as its checkpoints; here replicas have made and sent them anyway.

A file has one line of JSON, `LogHeader`, and one frame for every payload: step, stage, bytes and CRC-32 in
little-endian order, then the payload. A kill leaves at most the last frame torn, which readers drop.
"""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple
from zlib import crc32

import torch

from weft.files import naming
from weft.training.checkpoint.manifest import generation_path, generations

LOG = "weight_log"
_FORMAT = 1
_HEAD = struct.Struct("<QIQ")
_CHECKSUM = struct.Struct("<I")


@dataclass(frozen=True, slots=True, kw_only=True)
class LogHeader:
    """The writer of a file.

    Attributes:
        places: by stage, the rank's place among the ranks that share the stage, and their number.
    """

    plan_id: str
    rank: int
    places: Mapping[int, tuple[int, int]]


class WeightLog:
    """One rank's log. It keeps nothing before `begin`; all ranks call `begin` between the same two steps."""

    def __init__(self, folder: Path, header: LogHeader) -> None:
        self._folder = folder
        self._header = header
        self._file: BinaryIO | None = None
        self._bytes = 0
        self._steps: tuple[int, int] | None = None

    @property
    def step_bytes(self) -> float:
        """The mean bytes of this rank's payloads in a step; 0 before the first one."""
        if self._steps is None:
            return 0.0
        first, last = self._steps
        return self._bytes / (last - first + 1)

    def keep(self, step: int, stage: int, payload: torch.Tensor) -> None:
        """Append a payload, uint8, shape (bytes,), with which the weights of a step are made.

        An accelerator's payload is copied to the host, which waits for it.
        """
        if self._file is None:
            return
        content = payload.cpu().numpy().tobytes()
        head = _HEAD.pack(step, stage, len(content))
        with naming(Path(self._file.name)):
            self._file.write(head + _CHECKSUM.pack(crc32(content, crc32(head))) + content)
            # The operating system has it now, so a kill of this process does not lose it.
            self._file.flush()
        self._bytes += len(content)
        self._steps = (step if self._steps is None else self._steps[0], step)

    def begin(self, step: int) -> None:
        """Append from now on to a new file, since the checkpoint of `step`.

        Rank 0 removes the logs of later steps: a run that resumes takes these steps again.
        """
        self.close()
        if self._header.rank == 0:
            for later, path in generations(self._folder):
                if later > step:
                    shutil.rmtree(path)
        path = log_file(self._folder, step, self._header.rank)
        with naming(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(path, "wb")  # noqa: SIM115  (`close` closes it)
            self._file.write(json.dumps({"format": _FORMAT, **asdict(self._header)}).encode() + b"\n")
            self._file.flush()

    def prune(self, step: int) -> None:
        """Remove the logs since checkpoints before `step`, of all ranks; rank 0 does it."""
        if self._header.rank == 0:
            for earlier, path in generations(self._folder):
                if earlier < step:
                    shutil.rmtree(path)

    def close(self) -> None:
        """End the file; the log keeps nothing until the next `begin`."""
        if self._file is not None:
            self._file.close()
            self._file = None


class LoggedPayload(NamedTuple):
    """The place of a payload in a file."""

    file: Path
    offset: int
    length: int

    def read(self) -> torch.Tensor:
        """Return the payload, uint8, shape (length,)."""
        with open(self.file, "rb") as file:
            file.seek(self.offset)
            return torch.frombuffer(bytearray(file.read(self.length)), dtype=torch.uint8)


@dataclass(frozen=True, slots=True)
class RankLog:
    """A file's header, and its whole payloads by step and stage."""

    header: LogHeader
    payloads: Mapping[tuple[int, int], LoggedPayload]


def log_file(folder: Path, step: int, rank: int) -> Path:
    """Return the path of a rank's log since the checkpoint of a step."""
    return generation_path(folder, step) / f"rank-{rank:05d}.log"


def read_log(path: Path) -> RankLog | None:
    """Return the content of a file up to its first torn frame; None if the header is torn.

    Raises:
        OSError: if the file cannot be read.
    """
    payloads = {}
    with open(path, "rb") as file:
        header = _header(file.readline())
        if header is None:
            return None
        while head := file.read(_HEAD.size + _CHECKSUM.size):
            if len(head) < _HEAD.size + _CHECKSUM.size:
                break
            step, stage, length = _HEAD.unpack_from(head)
            (expected,) = _CHECKSUM.unpack_from(head, _HEAD.size)
            offset = file.tell()
            # A torn length may be any number.
            content = file.read(length) if offset + length <= path.stat().st_size else b""
            if len(content) != length or crc32(content, crc32(head[: _HEAD.size])) != expected:
                break
            payloads[step, stage] = LoggedPayload(path, offset, length)
    return RankLog(header, payloads)


def _header(line: bytes) -> LogHeader | None:
    try:
        record = json.loads(line)
        if not line.endswith(b"\n") or record.pop("format") != _FORMAT:
            return None
        places = {int(stage): (int(place), int(size)) for stage, (place, size) in record["places"].items()}
        return LogHeader(plan_id=str(record["plan_id"]), rank=int(record["rank"]), places=places)
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
