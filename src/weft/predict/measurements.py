"""`Measurements`: everything measured about a cluster's devices and steps, from the files in `WEFT_HOME`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from weft.describe.cluster import Cluster
from weft.describe.job import Job
from weft.predict.corrections import UNMEASURED_MEMORY, Correction, MemoryCorrection, fit
from weft.predict.corrections_file import load_residuals
from weft.predict.cost.calibration import load_machine, load_profiles
from weft.predict.cost.compute import ComputeModel
from weft.predict.profile import LayerProfile, MachineMeasurement


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurements:
    """The speeds of a machine, the times of a model's layers, and the correction from measured steps."""

    machine: MachineMeasurement | None = None
    profile: LayerProfile | None = None
    correction: Correction | None = None

    @property
    def memory(self) -> MemoryCorrection:
        """The correction of peaks of memory."""
        return UNMEASURED_MEMORY if self.correction is None else self.correction.memory

    def sources(self, cluster: Cluster, precision: str) -> dict[str, str]:
        """Return the source of compute times for each kind of device of the cluster."""
        compute = ComputeModel(machine=self.machine, profile=self.profile)
        devices = [group.device for group in cluster.groups]
        return {device.name: compute.source_of(device, precision) for device in devices}


UNMEASURED = Measurements()


def load_devices(job: Job, home: Path) -> Measurements:
    """Read the measurements of the kinds of devices of the job's cluster.

    Layer times are of all kinds. Speeds of a machine need one kind: devices of a mixed cluster are several
    machines.

    Raises:
        InputError: when a file is broken.
    """
    names = list(dict.fromkeys(group.device.name for group in job.cluster.groups))
    return Measurements(
        machine=load_machine(names[0], home) if len(names) == 1 else None,
        profile=load_profiles(job.graph.fingerprint, names, job.sequence, job.precision, home),
    )


def load_measurements(job: Job, home: Path) -> Measurements:
    """Read the measurements of the devices, and the correction from steps predicted from the same sources.

    Raises:
        InputError: when a file is broken, or is of something else.
    """
    found = load_devices(job, home)
    residuals = load_residuals(job.graph, job.precision, job.cluster, home)
    correction = fit(residuals.of(found.sources(job.cluster, job.precision)))
    return Measurements(machine=found.machine, profile=found.profile, correction=correction)
