"""The published rules about layouts come out of a small sweep that knows none of them."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

# The first of them compiles the engine, which need not be done by two at once.
pytestmark = pytest.mark.xdist_group("examples")
FOLDER = Path(__file__).parents[2] / "examples" / "layouts"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The modules of the example."""
    monkeypatch.syspath_prepend(FOLDER)
    return SimpleNamespace(**{name: importlib.import_module(name) for name in ("layouts", "rules", "sweep")})


def small_sweep(layouts: ModuleType) -> tuple[object, list]:
    """LLaMA 13B on 64 A100, some seventy layouts."""
    case = layouts.Case("llama-13b", 2048, 64)
    kernels = (layouts.KERNELS[0], *layouts.KERNELS[-2:])
    return case, layouts.sweep(
        case, layouts.choices(degrees=(1, 2), stages=(1, 2), sizes=(1, 2), kernels=kernels)
    )


def test_rules_emerge_without_being_applied(example: SimpleNamespace) -> None:
    rules = example.rules
    case, found = small_sweep(example.layouts)
    for rule in (
        rules.micro_batch_of_one,
        rules.model_parallel_instead_of_recomputation,
        rules.larger_micro_batches_last,
        rules.pipeline_rather_than_tensor,
        rules.parts_of_layers,
        rules.kernel_of_norms,
        rules.kernel_of_attention,
    ):
        finding = rule(case, found)
        assert finding.emerges, finding
    best = rules.fastest(found).choice
    assert (best.tp, best.pp, best.norm) == (1, 1, "fused")
    # A share of the peak times a step is the work of the step, which is every layout's.
    assert {round(one.mfu * one.step_s, 9) for one in found} == {round(found[0].mfu * found[0].step_s, 9)}


def test_gradients_added_up_by_kernels_of_their_own_make_larger_micro_batches_faster(
    example: SimpleNamespace,
) -> None:
    layouts, rules = example.layouts, example.rules
    case = layouts.Case("llama-13b", 2048, 64)
    chosen = list(layouts.choices(degrees=(1,), stages=(1, 2), sizes=(1, 2), kernels=layouts.KERNELS[-1:]))
    fused, separate = (layouts.sweep(case, chosen, how) for how in ("fused", "separate"))
    assert rules.micro_batch_of_one(case, fused).emerges
    assert not rules.micro_batch_of_one(case, separate).emerges
    for one, other in zip(fused, separate, strict=True):
        assert one.step_s < other.step_s
        assert one.peak_bytes == other.peak_bytes


def test_stages_win_over_tensor_ranks_in_a_sheet_of_the_paper(example: SimpleNamespace) -> None:
    case = example.layouts.Case("llama-65b", 2048, 128)
    chosen = [
        one
        for one in example.sweep.of_sheet(case)
        if one.recompute == "none" and one.norm == "fused" and one.micro_batch_size < 4
    ]
    assert chosen
    assert not any(one.sequence_parallel for one in chosen)
    finding = example.rules.pipeline_rather_than_tensor(case, example.layouts.sweep(case, chosen))
    assert finding.emerges, finding
    assert finding.figures.count("before") == 3


def test_dividing_tokens_gains_where_tensor_ranks_are_needed(example: SimpleNamespace) -> None:
    layouts, rules = example.layouts, example.rules
    case = layouts.Case("llama-65b", 2048, 64)
    chosen = layouts.choices(degrees=(2, 4), stages=(4,), sizes=(1,), kernels=layouts.KERNELS[-1:])
    finding = rules.divided_tokens(case, layouts.sweep(case, chosen))
    assert finding.emerges, finding


def test_what_does_not_fit_says_nothing(example: SimpleNamespace) -> None:
    layouts, rules = example.layouts, example.rules
    case = layouts.Case("llama-65b", 2048, 64)
    choice = layouts.Choice(tp=1, pp=1)
    found = layouts.sweep(case, [choice, layouts.Choice(tp=3, pp=1)])
    assert [one.choice for one in found] == [choice]
    assert not found[0].fits
    for rule in rules.RULES:
        assert rule(case, found).emerges is None


def test_the_report_says_of_every_rule_what_became_of_it(
    example: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    layouts, sweep = example.layouts, example.sweep
    few = [layouts.Choice(tp=1, pp=1, recompute=one) for one in layouts.RECOMPUTE]
    monkeypatch.setattr(sweep, "choices", lambda: few)
    monkeypatch.setattr(
        sweep, "CASES", (layouts.Case("llama-13b", 2048, 64), layouts.Case("llama-7b", 2048, 64))
    )
    sweep.main(["--separate", "llama-13b"])
    said = capsys.readouterr().out
    assert said.startswith("llama-13b, 2k tokens, 64 devices: 3 of 3 layouts fit\n")
    assert "llama-7b" not in said
    assert "more tp/pp instead of recomputation: emerges in 1\n" in said
    assert "pp rather than tp at an equal product: says nothing in 1\n" in said
