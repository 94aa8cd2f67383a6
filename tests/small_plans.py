"""Models and plans small enough for tests; without torch."""

from __future__ import annotations

from dataclasses import replace
from itertools import count, islice
from operator import mul

from weft.describe.added_layers import trained_graph
from weft.describe.families import layer_graph
from weft.describe.model import ModelConfig
from weft.describe.plan import Choice, Plan, Replica, Stage
from weft.planning.compile import compile_plan
from weft.program.program import Program
from weft.program.schedules import get_schedule
from weft.program.schedules.base import Pipeline, placements


def tiny(family: str = "gpt", *, layers: int = 6, tied: bool = False) -> ModelConfig:
    return ModelConfig(
        name=f"tiny-{family}",
        family=family,
        layers=layers,
        hidden=16,
        heads=2,
        key_value_heads=2 if family == "gpt" else 1,
        feed_forward=24,
        vocabulary=19,
        sequence=8,
        tied_embeddings=tied,
    )


def without_padding() -> ModelConfig:
    """A model whose parameters two replicas shard without padding."""
    return replace(tiny(), hidden=32, feed_forward=64)


def make_plan(
    config: ModelConfig,
    *,
    pp: int = 1,
    dp: int = 1,
    loops: int = 1,
    schedule: str = "gpipe",
    micro_batches: int = 4,
    micro_batch_size: int = 2,
    precision: str = "fp64",
    copies: tuple[int, ...] = (),
    degrees: tuple[int, ...] = (),
    unlike: tuple[tuple[int, ...], ...] = (),
    places: tuple[int, ...] = (),
) -> Plan:
    """`micro_batches` per pipeline; the schedule places the stages; rank = pipeline * pp + device.

    `places` are the devices of the stages, for a schedule that leaves them where a plan puts them.

    `copies` are the replicas of each stage in a pipeline, `degrees` the tensor ranks of each of them, where
    they are unlike. `unlike` has the degrees of every pipeline, where pipelines are.
    """
    number, graph = len(places) or pp * loops, layer_graph(config)
    pipeline = Pipeline(pp, number, micro_batches, places=places or None)
    placement = placements(get_schedule(schedule), pipeline)
    share = micro_batches // len(placement)
    borders = [len(graph.layers) * stage // number for stage in range(number + 1)]
    stages = tuple(
        Stage(
            layers=tuple(range(borders[stage], borders[stage + 1])),
            replicas=tuple(
                Replica(ranks=(pipeline * pp + device,), micro_batches=share)
                for pipeline in range(dp)
                for device in devices
            ),
        )
        for stage, devices in enumerate(placement.T.tolist())
    )
    mesh = {"dp": dp, "pp": pp}
    if copies or degrees or unlike:
        copies, each = copies or (1,) * pp, unlike or (degrees or (1,) * pp,) * dp
        stages = _unlike(stages, copies, each, micro_batches)
        mesh = {"dp": dp, "pp": sum(map(mul, copies, each[0]))}
    if unlike:
        mesh = {"pp": sum(map(sum, unlike))}
    return Plan(
        model=config.name,
        model_fingerprint=graph.fingerprint,
        cluster="test",
        cluster_fingerprint="0" * 16,
        sequence=config.sequence,
        global_batch=dp * micro_batches * micro_batch_size,
        micro_batch_size=micro_batch_size,
        precision=precision,
        mesh=mesh,
        stages=stages,
        schedule=Choice(name=schedule),
    )


def _unlike(
    stages: tuple[Stage, ...], copies: tuple[int, ...], each: tuple[tuple[int, ...], ...], micro_batches: int
) -> tuple[Stage, ...]:
    """The stages with so many replicas of so many ranks in every pipeline; ranks go by pipeline and stage."""
    rank = count()
    replicas: list[list[Replica]] = [[] for _ in stages]
    for degrees in each:
        for own, number, degree in zip(replicas, copies, degrees, strict=True):
            share = micro_batches // number
            own += [Replica(ranks=tuple(islice(rank, degree)), micro_batches=share) for _ in range(number)]
    return tuple(
        stage.model_copy(update={"replicas": tuple(own)}) for stage, own in zip(stages, replicas, strict=True)
    )


def make_program(config: ModelConfig, plan: Plan) -> Program:
    return compile_plan(plan, trained_graph(config, plan.methods))


def divisible(family: str, *, sequence: int = 8, heads: int = 2, tied: bool = False) -> ModelConfig:
    """Two blocks; a vocabulary that no number of ranks divides."""
    config = replace(tiny(family, layers=2, tied=tied), sequence=sequence, heads=heads, key_value_heads=heads)
    if family == "llama":
        return replace(config, heads=2 * heads)
    if family == "vit":
        # Nine or four patches and the class token, of which two ranks divide ten and not five.
        size = 6 if sequence % 2 == 0 else 4
        return replace(
            config, image_size=size, patch_size=2, channels=3, sequence=(size // 2) ** 2 + 1, vocabulary=5
        )
    return config
