"""Models and plans small enough for tests; without torch."""

from __future__ import annotations

from dataclasses import replace

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
) -> Plan:
    """`micro_batches` per pipeline; the schedule places the stages; rank = pipeline * pp + device.

    `copies` are the replicas of each stage in a pipeline, where they are unlike.
    """
    count, graph = pp * loops, layer_graph(config)
    placement = placements(get_schedule(schedule), Pipeline(pp, count, micro_batches))
    share = micro_batches // len(placement)
    borders = [len(graph.layers) * stage // count for stage in range(count + 1)]
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
    if copies:
        stages, pp = _dealt(stages, copies, dp, micro_batches), sum(copies)
    return Plan(
        model=config.name,
        model_fingerprint=graph.fingerprint,
        cluster="test",
        cluster_fingerprint="0" * 16,
        sequence=config.sequence,
        global_batch=dp * micro_batches * micro_batch_size,
        micro_batch_size=micro_batch_size,
        precision=precision,
        mesh={"dp": dp, "pp": pp},
        stages=stages,
        schedule=Choice(name=schedule),
    )


def _dealt(
    stages: tuple[Stage, ...], copies: tuple[int, ...], dp: int, micro_batches: int
) -> tuple[Stage, ...]:
    """The stages with so many replicas each in every pipeline, stage by stage."""
    return tuple(
        stage.model_copy(
            update={
                "replicas": tuple(
                    Replica(
                        ranks=(pipeline * sum(copies) + sum(copies[:index]) + copy,),
                        micro_batches=micro_batches // count,
                    )
                    for pipeline in range(dp)
                    for copy in range(count)
                )
            }
        )
        for index, (stage, count) in enumerate(zip(stages, copies, strict=True))
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
