"""`build_stage`: the layers a plan gives to one stage, as a module with initial values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from weft.bundles import runtime_parts
from weft.describe.amount import Shape
from weft.describe.families import layer_graph
from weft.describe.families.own import FAMILY, own_model
from weft.describe.layer_graph import LayerGraph
from weft.describe.model import ModelConfig
from weft.describe.plan import Choice, Plan
from weft.describe.replica_grid import ReplicaGrid
from weft.errors import InputError, Violation, require_choice
from weft.randomness import counter_seed
from weft.run.parallel.context.ranks import ContextRanks
from weft.run.parallel.expert_ranks import ExpertRanks
from weft.run.parallel.tensor_parallel import TensorRanks
from weft.run.stage.batch_norm import hold_statistics
from weft.run.stage.families import STAGE_FAMILIES, stage_family
from weft.run.stage.families.own import OwnStage, own_stage
from weft.run.stage.layer_choices import apply_choices
from weft.run.stage.stage_module import ChangedStageOf, Filling, StageModule, materialise
from weft.run.stage.unfilled import unfilled
from weft.run.state.precision import PRECISIONS

DRAWN = Filling()


def build_stage(
    model_config: ModelConfig,
    layers: Sequence[int],
    seed: int,
    dtype: torch.dtype,
    *,
    tensor_share: tuple[int, int] = (0, 1),
    context_share: tuple[int, int] = (0, 1),
    expert_share: tuple[int, int] = (0, 1),
    methods: Iterable[Choice] = (),
    frozen_dtype: torch.dtype | None = None,
    filling: Filling = DRAWN,
) -> StageModule | OwnStage:
    """Build a stage of a known family's model, or of a user's own model, in host memory.

    Args:
        layers: positions in the family's LayerGraph, rising; in a chain without a gap, where 0 is the
            embedding, 1 to n are the blocks, n + 1 is the final norm with the head.
        seed, dtype: every parameter is drawn in fp32, keyed by (seed, its name in `transformers`), then cast,
            so that any cut has the same values.
        tensor_share: (place, number) of its tensor share; a runtime connects the ranks with the others.
        context_share: (place, number) of its tokens' share; ranks with the same tokens divide the stage.
        expert_share: (place, number) of its share of experts and samples.
        methods: the methods that the job names; they may add modules to the stage.
        frozen_dtype: the type of frozen parameters that are not packed; None: `dtype`.
        filling: the parameters whose values are read later; stages of own models draw all.

    Raises:
        InputError: for an unknown family, layers that do not exist or do not follow each other, or a number
            of shares that does not divide them or the tokens.
    """
    grid = ReplicaGrid(tensor_share[1], context_share[1], expert_share[1])
    if model_config.family == FAMILY:
        # Its function may draw values, too: those of a whole module.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(counter_seed(seed))
            model = own_model(model_config.name)
        graph = model.layer_graph()
        _require_grid(model_config, graph, grid)
        _require_layers(model_config, layers, follow=graph.is_chain)
        return own_stage(model, layers, seed, dtype)
    if grid.ranks > 1:
        _require_grid(model_config, layer_graph(model_config), grid)
    require_choice(f"model {model_config.name}", model_config.family, STAGE_FAMILIES)
    _require_layers(model_config, layers, follow=not model_config.is_graph)
    with unfilled():
        stage = stage_family(model_config.family)(model_config, layers)
    if grid.tensor > 1:
        divides_sequence = Shape(1, model_config.sequence, *grid).sequence_parallel > 1
        stage.divide(TensorRanks(*tensor_share, divides_sequence=divides_sequence))
    if grid.context > 1:
        stage.spread(ContextRanks(*context_share))
    if grid.expert > 1:
        stage.share_experts(ExpertRanks(*expert_share))
    _change(stage, layers, methods)
    materialise(stage, seed, dtype, frozen_dtype or dtype, filling)
    hold_statistics(stage, dtype)
    return stage


def build_stages(
    plan: Plan,
    model_config: ModelConfig,
    rank: int,
    seed: int,
    dtype: torch.dtype,
    *,
    filling: Filling = DRAWN,
) -> dict[int, StageModule | OwnStage]:
    """Build one rank's stages of a plan, or its shares of them, by number, with the plan's layer choices.

    Frozen parameters lie in the plan's precision.

    Raises:
        InputError: as `build_stage`.
    """
    stages = {}
    for index, copy in plan.stages_of(rank).items():
        layers, ranks = plan.stages[index].layers, plan.stages[index].replicas[copy].ranks
        tensor, context, expert = plan.grid(index, copy).shares(ranks.index(rank))
        stages[index] = build_stage(
            model_config,
            layers,
            seed,
            dtype,
            tensor_share=tensor,
            context_share=context,
            expert_share=expert,
            methods=plan.methods,
            frozen_dtype=PRECISIONS[plan.precision],
            filling=filling,
        )
        apply_choices(plan.layer_choices, stages[index], layers)
    return stages


def _change(stage: StageModule, layers: Sequence[int], methods: Iterable[Choice]) -> None:
    """Let methods change a stage with these layers, still on the meta device."""
    asked = {choice.name: choice for choice in methods}
    for one in runtime_parts(ChangedStageOf) if asked else ():
        if one.method in asked:
            with unfilled():
                one.change(stage, layers, asked[one.method])


def _require_grid(config: ModelConfig, graph: LayerGraph, grid: ReplicaGrid) -> None:
    reason = graph.refuse_grid(grid, config.sequence) if grid.ranks > 1 else None
    if reason is not None:
        raise InputError(Violation(f"model {config.name}", reason))


def _require_layers(config: ModelConfig, layers: Sequence[int], *, follow: bool = True) -> None:
    where = f"model {config.name}"
    count = config.layers + 2
    problems = []
    if not layers or not 0 <= min(layers) <= max(layers) < count:
        problems.append(
            Violation(where, f"stage layers {list(layers)} must be at least one of 0 to {count - 1}")
        )
    elif follow and list(layers) != list(range(layers[0], layers[0] + len(layers))):
        whole = str(list(range(min(layers), max(layers) + 1)))
        problems.append(Violation(where, f"stage layers {list(layers)} must follow each other", whole))
    if problems:
        raise InputError(problems)
