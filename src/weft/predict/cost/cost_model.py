"""The common basis of the prices of all plans of one model on one cluster."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from weft.describe.cluster import Cluster
from weft.describe.layer_graph import LayerGraph
from weft.describe.one_line import one_line
from weft.predict.corrections import Correction
from weft.predict.cost.compute import ComputeModel
from weft.predict.cost.network import Network
from weft.predict.profile import LayerProfile, MachineMeasurement


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """A model, a cluster, their measurements, and the correction from measured steps.

    Create one for many plans: they share evaluated layers and links. No price depends on earlier prices.
    """

    graph: LayerGraph
    cluster: Cluster
    machine: MachineMeasurement | None = None
    profile: LayerProfile | None = None
    correction: Correction | None = None

    __repr__ = one_line

    @cached_property
    def compute(self) -> ComputeModel:
        return ComputeModel(machine=self.machine, profile=self.profile, correction=self.correction)

    @cached_property
    def network(self) -> Network:
        return Network(cluster=self.cluster, machine=self.machine, correction=self.correction)
