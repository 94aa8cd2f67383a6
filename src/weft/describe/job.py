"""`Job`: a training job without its layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from weft.describe.cluster import Cluster
from weft.describe.layer_choices import job_problems, with_choices
from weft.describe.layer_graph import LayerGraph
from weft.describe.one_line import one_line
from weft.describe.optimizers import ADAMW, OptimizerWork
from weft.describe.plan import SERVERS, Choice, Launch, LayerChoice, precision_words
from weft.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A training job without its layout: model, cluster, batch, sequence and precision.

    `reduce_precision`: the precision of sums over replicas, where it is not that of the gradients.
    `methods`: methods that the job requests by name. `optimizer`: the memory and traffic of optimizer steps.
    `sync_options`: options of the synchronisation, if the job chooses one. `layer_choices`: requests for
    single layers; the layers of `graph` include them. `transport`: the way of messages and sums, `host` or
    `device`; None is `device` where the device is not its own host. `launch`: that of `Plan`.
    """

    graph: LayerGraph
    cluster: Cluster
    global_batch: int
    sequence: int
    precision: str = "fp32"
    reduce_precision: str | None = None
    methods: tuple[Choice, ...] = ()
    optimizer: OptimizerWork = ADAMW
    sync_options: Mapping[str, int | float | str | bool] = field(default_factory=dict)
    layer_choices: tuple[LayerChoice, ...] = ()
    transport: str | None = None
    launch: Launch = "eager"

    @property
    def servers(self) -> int:
        """The devices behind those of the stages that only add up gradients."""
        return int(self.sync_options.get(SERVERS, 0))

    @property
    def stage_devices(self) -> int:
        """The most devices that may hold stages."""
        return self.cluster.ranks - self.servers

    def method(self, name: str) -> Choice | None:
        """Return the choice of a method by name; None without a choice."""
        return next((one for one in self.methods if one.name == name), None)

    def choosing(self, choices: tuple[LayerChoice, ...]) -> Job:
        """Return the job with these choices for single layers, and no others.

        Raises:
            InputError: with every fault of the choices.
        """
        if choices == self.layer_choices:
            return self
        if problems := job_problems(choices, self):
            raise InputError(problems)
        return replace(self, graph=with_choices(self.graph, choices), layer_choices=choices)

    def __repr__(self) -> str:
        return one_line(self, str(self))

    def __str__(self) -> str:
        asked = f"global batch {self.global_batch}, sequence {self.sequence}, {precision_words(self)}"
        return f"{self.graph.name} on {self.cluster.name}: {asked}"
