"""The rules of Hagemann et al. (arXiv 2311.05610), looked for in a sweep that knows none of them.

Every function takes the predicted layouts of one case and says what the rule compares. Layouts that do not
fit count for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from layouts import Case, Predicted

# Steps that differ by less are equal: neither is said to be faster.
EQUAL = 0.002
# The paper finds that dividing the tokens helps beyond these sizes.
LARGE_PARAMETERS, LONG_TOKENS = 30e9, 2048


@dataclass(frozen=True, slots=True)
class Finding:
    """Whether a rule is what the predictions say, with their figures; None where they cannot say."""

    rule: str
    emerges: bool | None
    figures: str


def fastest(found: Iterable[Predicted]) -> Predicted | None:
    """The shortest step of those that fit; of equal ones the first."""
    return min((one for one in found if one.fits), key=lambda one: one.step_s, default=None)


def behind(one: Predicted, other: Predicted) -> float:
    """How much longer the step of `other` is than that of `one`, as a fraction."""
    return other.step_s / one.step_s - 1.0


def micro_batch_of_one(case: Case, found: Sequence[Predicted]) -> Finding:
    """(i) The fastest layout has micro-batches of one sample."""
    rule, best = "micro-batch size 1 first", fastest(found)
    if best is None:
        return Finding(rule, None, "nothing fits")
    figures = [f"best: {best.choice} ({best.mfu:.1%})"]
    for size in sorted({one.choice.micro_batch_size for one in found}):
        other = fastest(one for one in found if one.choice.micro_batch_size == size)
        figures.append(f"{size}: {behind(best, other):+.1%}" if other else f"{size}: does not fit")
    return Finding(rule, best.choice.micro_batch_size == 1, "; ".join(figures))


def model_parallel_instead_of_recomputation(case: Case, found: Sequence[Predicted]) -> Finding:
    """(ii) The fastest layout that keeps everything beats the fastest that recomputes whole layers."""
    return _pair(
        "more tp/pp instead of recomputation",
        ("none", fastest(one for one in found if one.choice.recompute == "none")),
        ("full", fastest(one for one in found if one.choice.recompute == "full")),
    )


def larger_micro_batches_last(case: Case, found: Sequence[Predicted]) -> Finding:
    """(iii) Memory that more tp or pp frees is not worth a larger micro-batch.

    Of layouts that keep everything, the fastest with micro-batches of several samples and more than the least
    tp x pp is no faster than the fastest with the least.
    """
    rule = "larger micro-batches only where less tp/pp is impossible"
    kept = [one for one in found if one.fits and one.choice.recompute == "none"]
    least = min((one.choice.ways for one in kept), default=0)
    few = fastest(one for one in kept if one.choice.ways == least)
    many = fastest(one for one in kept if one.choice.ways > least and one.choice.micro_batch_size > 1)
    return _pair(rule, (f"tp x pp {least}", few), ("more, with a larger micro-batch", many))


def divided_tokens(case: Case, found: Sequence[Predicted]) -> Finding:
    """(iv) With tensor ranks the tokens of large models and long sequences are better divided.

    Elsewhere the rule says nothing: the fastest layout may have one tensor rank, or gain as well.
    """
    speaks = case.parameters > LARGE_PARAMETERS or case.sequence > LONG_TOKENS
    rule = "tokens divided beyond 30 B or 2k tokens, with tp > 1"
    several = [one for one in found if one.choice.tp > 1]
    divided, whole = (
        fastest(one for one in several if one.choice.sequence_parallel == wanted) for wanted in (True, False)
    )
    finding = _pair(rule, ("divided", divided), ("whole", whole))
    overall = (
        fastest(one for one in found if one.choice.tp == 1 or one.choice.sequence_parallel),
        fastest(one for one in found if not one.choice.sequence_parallel),
    )
    gain = "" if divided is None or None in overall else f"; of all layouts {behind(*overall):+.1%}"
    return replace(finding, emerges=finding.emerges if speaks else None, figures=finding.figures + gain)


def pipeline_rather_than_tensor(case: Case, found: Sequence[Predicted]) -> Finding:
    """(v) Of the splits of one product of tp and pp the one with the fewest tensor ranks is the fastest.

    Of layouts that keep everything, for the rule against recomputation comes first.
    """
    rule = "pp rather than tp at an equal product"
    plain = [one for one in found if one.choice.recompute == "none"]
    figures, kept = [], []
    for ways in sorted({one.choice.ways for one in plain}):
        splits = {
            tensor: best
            for tensor in sorted({one.choice.tp for one in plain})
            if (best := fastest(one for one in plain if _split(one) == (ways, tensor))) is not None
        }
        if len(splits) < 2:
            continue
        fewest, *more = splits.values()
        other = min(more, key=lambda one: one.step_s)
        kept.append(behind(fewest, other) > -EQUAL)
        figures.append(
            f"{ways}: tp {fewest.choice.tp} before tp {other.choice.tp} by {behind(fewest, other):+.1%}"
        )
    if not kept:
        return Finding(rule, None, "no two splits to compare")
    return Finding(rule, all(kept), "; ".join(figures))


def _split(one: Predicted) -> tuple[int, int]:
    return one.choice.ways, one.choice.tp


def parts_of_layers(case: Case, found: Sequence[Predicted]) -> Finding:
    """(vi) With flash attention what is recomputed are norms and activations, not whole layers."""
    flash = [one for one in found if one.choice.attention == "flash2"]
    return _pair(
        "recompute parts of layers, not whole ones",
        ("parts", fastest(one for one in flash if one.choice.recompute == "selective")),
        ("whole", fastest(one for one in flash if one.choice.recompute == "full")),
    )


def kernel_of_norms(case: Case, found: Sequence[Predicted]) -> Finding:
    """The fused kernel of norms, which holds less and moves less."""
    flash = [one for one in found if one.choice.attention == "flash2"]
    return _pair(
        "one kernel for a norm",
        ("fused", fastest(one for one in flash if one.choice.norm == "fused")),
        ("unfused", fastest(one for one in flash if one.choice.norm == "unfused")),
    )


def kernel_of_attention(case: Case, found: Sequence[Predicted]) -> Finding:
    """Attention that stores no scores against kernels that do, norms alike."""
    plain = [one for one in found if one.choice.norm == "unfused"]
    best = {
        name: fastest(one for one in plain if one.choice.attention == name)
        for name in ("flash2", "flash1", "fused", "math")
    }
    first = best["flash2"]
    others = [(name, other) for name, other in best.items() if other is not None and other is not first]
    if first is None or not others:
        return Finding("flash attention", None, "no two kernels to compare")
    figures = [f"flash2: {first.mfu:.1%}", *(f"{name}: {other.mfu:.1%}" for name, other in others)]
    return Finding(
        "flash attention", all(behind(first, one) > EQUAL for _, one in others), "; ".join(figures)
    )


def _pair(rule: str, better: tuple[str, Predicted | None], worse: tuple[str, Predicted | None]) -> Finding:
    """Whether the first of two is the faster one."""
    (name, one), (other_name, other) = better, worse
    if one is None or other is None:
        missing = name if one is None else other_name
        return Finding(rule, None, f"nothing fits: {missing}")
    figures = (
        f"{name}: {one.choice} ({one.mfu:.1%}); {other_name}: {other.choice} ({other.mfu:.1%}), "
        f"{behind(one, other):+.1%}"
    )
    return Finding(rule, behind(one, other) > EQUAL, figures)


Rule = Callable[[Case, Sequence[Predicted]], Finding]
RULES: tuple[Rule, ...] = (
    micro_batch_of_one,
    model_parallel_instead_of_recomputation,
    larger_micro_batches_last,
    divided_tokens,
    pipeline_rather_than_tensor,
    parts_of_layers,
    kernel_of_norms,
    kernel_of_attention,
)
