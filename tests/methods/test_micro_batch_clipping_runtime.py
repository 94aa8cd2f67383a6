"""Laws of clipped sums, whatever the gradients: what clipping promises, and no number that is none."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_plans import make_plan, tiny

from weft.describe.families import layer_graph
from weft.describe.plan import Choice
from weft.errors import InputError
from weft.methods.micro_batch_clipping.options import NAME, ClipTable
from weft.methods.micro_batch_clipping.runtime.clipped_sum import ClippedSum, _kept
from weft.methods.micro_batch_clipping.runtime.state import MicroBatchClipping
from weft.planning.compile import compile_part
from weft.run.methods import Making

SIZE = 5
MIN = ClipTable(samples=1)
GROUPS = st.integers(2, 6)
SEEDS = st.integers(0, 1000)


def drawn(groups: int, seed: int) -> list[torch.Tensor]:
    """The mean gradients of micro-batches, with norms that differ by much."""
    generator = torch.Generator().manual_seed(seed)
    sizes = 10 ** (2 * torch.rand(groups, 1, generator=generator, dtype=torch.float64) - 1)
    return list(sizes * torch.randn(groups, SIZE, generator=generator, dtype=torch.float64))


def clipped(
    table: ClipTable, means: Sequence[torch.Tensor], factor: float = 1.0, sources: Sequence[int] = ()
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """What a step has of the mean gradients of its micro-batches."""
    found, norms = ClippedSum(table, len(means), [torch.zeros_like(means[0])]), []
    owners = sources or [0] * len(means)
    for mean, source in zip(means, owners, strict=True):
        own = mean * factor / len(means)
        norms.append(found.add([own.clone()], own.square().sum(), factor, source))
    result = torch.full_like(means[0], math.nan)
    numbers = found.finish(torch.stack(norms), torch.tensor(owners), [result])
    return result, numbers


@given(groups=GROUPS, seed=SEEDS, data=st.data())
def test_each_source_is_clipped_as_if_it_were_alone(groups: int, seed: int, data: st.DataObject) -> None:
    means = drawn(groups, seed)
    sources = data.draw(st.lists(st.integers(0, 2), min_size=groups, max_size=groups))
    found, numbers = clipped(ClipTable(samples=1, sources=3), means, sources=sources)
    expected, bounds = torch.zeros_like(found), [math.nan] * groups
    for source in set(sources):
        places = [at for at, own in enumerate(sources) if own == source]
        part, alone = clipped(MIN, [means[at] for at in places])
        expected += part * len(places) / groups
        for at in places:
            bounds[at] = alone["clip_bound"].item()
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-13)
    assert numbers["clip_bounds"].tolist() == pytest.approx(bounds)
    assert numbers["clip_bound"].item() == pytest.approx(sum(bounds) / groups)


@given(groups=GROUPS, seed=SEEDS, cut=st.integers(0, SIZE), micro=st.sampled_from(["min", "quantile"]))
def test_a_gradient_in_parts_is_clipped_as_a_whole(groups: int, seed: int, cut: int, micro: str) -> None:
    """The stages of a device have parts of a gradient, and one norm."""
    means = drawn(groups, seed)
    table = ClipTable(samples=1, micro=micro, quantile=0.5) if micro == "quantile" else MIN
    total = ClippedSum(table, groups, [means[0][:cut], means[0][cut:]])
    norms = [
        total.add([one[:cut].clone(), one[cut:].clone()], one.square().sum())
        for one in (mean / groups for mean in means)
    ]
    result = torch.full_like(means[0], math.nan)
    numbers = total.finish(
        torch.stack(norms), torch.zeros(groups, dtype=torch.long), [result[:cut], result[cut:]]
    )
    whole, expected = clipped(table, means)
    assert torch.equal(result, whole)
    assert torch.equal(numbers["clip_norms"], expected["clip_norms"])


def test_a_source_without_micro_batches_keeps_its_quantile() -> None:
    table = ClipTable(samples=1, micro="quantile", quantile=0.5, sources=2)
    total = ClippedSum(table, 2, [torch.zeros(1, dtype=torch.float64)])
    told = []
    for sources, sizes in (([0, 1], [1.0, 8.0]), ([0, 0], [2.0, 4.0]), ([1, 0], [9.0, 3.0])):
        norms = [
            total.add(
                [torch.full((1,), size / 2).double()], torch.tensor(size / 2).double() ** 2, 1.0, source
            )
            for source, size in zip(sources, sizes, strict=True)
        ]
        result = torch.empty(1, dtype=torch.float64)
        told.append(total.finish(torch.stack(norms), torch.tensor(sources), [result])["clip_bounds"].tolist())
    # The first step has no bound. Then the first source has 1, then 2; the second one keeps 8.
    assert told == [[1.0, 8.0], [1.0, 1.0], [8.0, 2.0]]
    assert result.item() == pytest.approx((8.0 + 2.0) / 2)


@given(groups=GROUPS, seed=SEEDS)
def test_the_least_norm_scales_the_mean_of_directions(groups: int, seed: int) -> None:
    means = drawn(groups, seed)
    norms = [one.norm() for one in means]
    found, numbers = clipped(MIN, means)
    expected = min(norms) * torch.stack([one / norm for one, norm in zip(means, norms, strict=True)]).mean(0)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
    assert found.norm() <= min(norms) * (1 + 1e-12)
    assert numbers["clip_bound"].item() == pytest.approx(min(norms).item())
    assert numbers["clipped"].item() == pytest.approx(1 - 1 / groups)


@given(groups=GROUPS, seed=SEEDS, scale=st.floats(1.0, 1e6))
def test_a_larger_gradient_changes_nothing(groups: int, seed: int, scale: float) -> None:
    means = drawn(groups, seed)
    least = min(range(groups), key=lambda at: means[at].norm())
    grown = [one if at == least else one * scale for at, one in enumerate(means)]
    torch.testing.assert_close(clipped(MIN, grown)[0], clipped(MIN, means)[0], rtol=1e-11, atol=1e-13)


@given(groups=GROUPS, seed=SEEDS, scale=st.floats(1e-3, 1e3))
def test_scaled_and_permuted_gradients_scale_and_permute(groups: int, seed: int, scale: float) -> None:
    means = drawn(groups, seed)
    found, _ = clipped(MIN, means)
    torch.testing.assert_close(
        clipped(MIN, [scale * one for one in means])[0], scale * found, rtol=1e-11, atol=1e-13 * scale
    )
    torch.testing.assert_close(clipped(MIN, means[::-1])[0], found, rtol=1e-11, atol=1e-13)


@given(groups=GROUPS, seed=SEEDS)
def test_equal_norms_and_wide_bounds_leave_the_mean(groups: int, seed: int) -> None:
    means = [one / one.norm() for one in drawn(groups, seed)]
    mean = torch.stack(means).mean(0)
    torch.testing.assert_close(clipped(MIN, means)[0], mean, rtol=1e-12, atol=1e-14)
    whole = sum((one / groups for one in means), torch.zeros(SIZE, dtype=torch.float64))
    found, numbers = clipped(ClipTable(samples=1, micro="fixed", bound=1.5), means)
    assert torch.equal(found, whole)
    assert numbers["clipped"].item() == 0.0


def test_a_single_micro_batch_is_left_as_it_is() -> None:
    [mean] = drawn(1, 0)
    found, numbers = clipped(MIN, [mean])
    assert torch.equal(found, mean)
    assert numbers["clipped"].item() == 0.0


@given(groups=GROUPS, seed=SEEDS)
def test_a_replaced_sample_moves_a_fixed_bound_by_twice_its_share(groups: int, seed: int) -> None:
    means, bound = drawn(groups, seed), 0.7
    other = [*means[:-1], drawn(1, seed + 1)[0]]
    table = ClipTable(samples=1, micro="fixed", bound=bound)
    moved = (clipped(table, means)[0] - clipped(table, other)[0]).norm().item()
    assert moved <= 2 * bound / groups + 1e-12


@given(groups=GROUPS, seed=SEEDS, power=st.integers(-10, 10))
def test_the_factor_of_losses_scales_the_result_and_no_norm(groups: int, seed: int, power: int) -> None:
    means, factor = drawn(groups, seed), 2.0**power
    for table in (MIN, ClipTable(samples=1, micro="fixed", bound=0.5)):
        (plain, numbers), (scaled, same) = clipped(table, means), clipped(table, means, factor)
        assert torch.equal(scaled, plain * factor)
        assert torch.equal(numbers["clip_norms"], same["clip_norms"])


@given(
    kinds=st.lists(st.sampled_from(["plain", "zero", "infinite", "nan"]), min_size=1, max_size=6),
    micro=st.sampled_from(["min", "fixed", "quantile"]),
    seed=SEEDS,
)
def test_no_result_is_not_finite_and_drops_are_counted(kinds: list[str], micro: str, seed: int) -> None:
    changed = {"zero": 0.0, "infinite": math.inf, "nan": math.nan}
    means = [
        torch.full_like(one, changed[kind]) if kind in changed else one
        for one, kind in zip(drawn(len(kinds), seed), kinds, strict=True)
    ]
    options = {"fixed": {"bound": 0.5}, "quantile": {"quantile": 0.5}}.get(micro, {})
    found, numbers = clipped(ClipTable.model_validate({"samples": 1, "micro": micro, **options}), means)
    assert found.isfinite().all()
    dropped = [kind in ("infinite", "nan") for kind in kinds]
    assert numbers["dropped"].item() == pytest.approx(sum(dropped) / len(dropped))
    kept = [one for one, out in zip(means, dropped, strict=True) if not out]
    counted = [one for one in kept if one.norm() > 0]
    if micro == "min" and counted and len(kinds) > 1:
        least = min(one.norm() for one in counted)
        # A gradient of zeros adds nothing, and keeps its weight.
        expected = least * sum(one / one.norm() for one in counted) / len(kept)
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-13)
    if micro == "fixed" and kept:
        bounded = [one * min(1.0, 0.5 / max(one.norm().item(), 1e-300)) for one in kept]
        torch.testing.assert_close(found, torch.stack(bounded).mean(0), rtol=1e-11, atol=1e-13)


def test_an_accelerator_leaves_out_without_reading_the_norm() -> None:
    """Its host knows no value of a tensor, as on the meta device."""
    gradient, finite = (torch.ones(3, device="meta"), torch.ones((), dtype=torch.bool, device="meta"))
    assert _kept(gradient, finite).is_meta


def test_a_quantile_bounds_the_step_after() -> None:
    table = ClipTable(samples=1, micro="quantile", quantile=0.5)
    total, result = (
        ClippedSum(table, 3, [torch.zeros(2, dtype=torch.float64)]),
        torch.zeros(2, dtype=torch.float64),
    )
    # The first step has no bound, and tells its largest norm.
    for expected in (3.0, 2.0):
        norms = []
        for size in (3.0, 1.0, 2.0):
            own = torch.tensor([size, 0.0], dtype=torch.float64) / 3
            norms.append(total.add([own.clone()], own.square().sum()))
        numbers = total.finish(torch.stack(norms), torch.zeros(3, dtype=torch.long), [result])
        assert numbers["clip_bound"].item() == expected
    assert result.tolist() == pytest.approx([(2.0 + 1.0 + 2.0) / 3, 0.0])


@given(samples=st.integers(1, 3), more=st.integers(-3, 3))
def test_sources_of_a_step_are_those_of_its_samples(samples: int, more: int) -> None:
    choice = Choice(name=NAME, options={"micro": "min", "samples": samples, "sources": 2})
    plan = make_plan(tiny(), micro_batches=4, micro_batch_size=samples).model_copy(
        update={"methods": (choice,)}
    )
    part = compile_part(plan, layer_graph(tiny()), 0)
    groups = SimpleNamespace(collective=defaultdict(lambda: SimpleNamespace(place=0)))
    state = MicroBatchClipping(
        Making(plan=plan, program=part, stages={}, groups=groups, device=torch.device("cpu"))
    )
    owners = np.arange(4 * samples + more) // samples % 2
    state.take_sources(lambda step: owners)
    if more:
        with pytest.raises(InputError, match=rf"^clip: sources: shape \[{len(owners)}\]; a step has "):
            state.sources_of(0)
    else:
        assert state.sources_of(0).tolist() == [0, 1, 0, 1]
