"""The experts of a mixture: tokens sorted by expert, two grouped products, and weighted sums by token.

They take the place of the experts of `transformers`, with its weights: `gate_up_proj` (experts, 2 columns,
hidden) and `down_proj` (experts, hidden, columns). Without a `Capacity`, no token is dropped. All sums have
one order, so a result has the same bits in every run.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from weft.run.parallel.expert_ranks import ExpertRanks
from weft.run.parallel.function import Function
from weft.run.parallel.permutation import inverse

# The word by which a configuration of `transformers` asks for these experts.
IMPLEMENTATION = "weft"
# Types for which torch has a grouped product, and the bytes of which its rows are multiples.
_GROUPED = (torch.float32, torch.bfloat16, torch.float16)
_ALIGNED_BYTES = 16


class Capacity(NamedTuple):
    """The most tokens of an expert in a sample; those that come later lose the expert.

    It counts in samples, so that a plan's micro-batches do not matter. The first tokens keep their experts
    (GShard, arXiv 2006.16668, algorithm 1), so that no token depends on later ones.

    Attributes:
        most: tokens of one expert in one sample.
        tokens: of a sample.
    """

    most: int
    tokens: int

    def keeps(self, chosen: torch.Tensor, experts: int) -> torch.Tensor:
        """Return which pairs keep their expert, (tokens, choices)."""
        of_samples = chosen.view(-1, self.tokens, chosen.shape[1])
        taken = of_samples.new_zeros(*of_samples.shape[:2], experts, dtype=torch.int32)
        so_far = taken.scatter_(2, of_samples, 1).cumsum(1, dtype=torch.int32)
        return (so_far.gather(2, of_samples) <= self.most).view_as(chosen)


class Sorted(NamedTuple):
    """The rows of tokens in the order of their experts.

    Attributes:
        order: position by place: row `order[i]` of all (token, choice) pairs stands at place i, (kept,).
        place: the inverse, (pairs,). Dropped pairs have places behind all others.
        counts: rows of each expert, (experts,).
    """

    order: torch.Tensor
    place: torch.Tensor
    counts: torch.Tensor

    def by_pair(self, rows: torch.Tensor) -> torch.Tensor:
        """Return rows (kept pairs, ...) in the order of all pairs, with zeros for dropped ones."""
        missing = len(self.place) - len(rows)
        padded = torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])]) if missing else rows
        return padded.index_select(0, self.place)


def sort_rows(chosen: torch.Tensor, experts: int, keeps: torch.Tensor | None = None) -> Sorted:
    """Sort pairs by expert, and those of an expert by token.

    Args:
        chosen: experts of each token, (tokens, choices).
        keeps: which pairs keep their expert, as `chosen`; by default all.
    """
    flat = (chosen if keeps is None else chosen.masked_fill(~keeps, experts)).flatten()
    order = torch.argsort(flat, stable=True)
    # A count of bins would wait for the largest number.
    counts = flat.new_zeros(experts + 1).scatter_add_(0, flat, torch.ones_like(flat))
    kept = len(order) if keeps is None else int(counts[:experts].sum())
    return Sorted(order[:kept], inverse(order), counts[:experts])


class _Scatter(Function):
    """Tokens (tokens, hidden) to rows by expert (pairs, hidden)."""

    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, rows: Sorted, choices: int) -> torch.Tensor:
        ctx.rows, ctx.choices = rows, choices
        return tokens.index_select(0, rows.order // choices)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        by_token = ctx.rows.by_pair(gradient).view(-1, ctx.choices, gradient.shape[-1])
        return by_token.sum(1), None, None


class _Gather(Function):
    """Rows by expert (pairs, hidden) and weights (tokens, choices) to sums by token (tokens, hidden)."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weights: torch.Tensor, places: Sorted) -> torch.Tensor:
        ctx.save_for_backward(rows, weights)
        ctx.places = places
        wide = torch.promote_types(rows.dtype, weights.dtype)
        by_token = places.by_pair(rows).view(*weights.shape, -1).to(wide)
        return torch.einsum("tkh,tk->th", by_token, weights.to(wide)).to(rows.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        rows, weights = ctx.saved_tensors
        order = ctx.places.order
        by_row = gradient.index_select(0, order // weights.shape[1])
        of_rows = of_weights = None
        if ctx.needs_input_grad[0]:
            of_rows = (by_row * weights.flatten()[order].unsqueeze(-1)).to(rows.dtype)
        if ctx.needs_input_grad[1]:
            wide = torch.promote_types(rows.dtype, weights.dtype)
            in_order = torch.linalg.vecdot(by_row.to(wide), rows.to(wide))
            of_weights = ctx.places.by_pair(in_order).view_as(weights).to(weights.dtype)
        return of_rows, of_weights, None


class _GroupedProduct(Function):
    """Rows (pairs, inner) times the matrix (outer, inner) of their expert, group by group."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, matrices: torch.Tensor, counts: list[int]) -> torch.Tensor:
        ctx.save_for_backward(rows, matrices)
        ctx.counts = counts
        product = rows.new_empty(len(rows), matrices.shape[1])
        for matrix, own, result in zip(matrices, rows.split(counts), product.split(counts), strict=True):
            torch.mm(own, matrix.t(), out=result)
        return product

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        rows, matrices = ctx.saved_tensors
        gradients = gradient.split(ctx.counts)
        of_rows = of_matrices = None
        if ctx.needs_input_grad[0]:
            of_rows = torch.empty_like(rows)
            for own, matrix, result in zip(gradients, matrices, of_rows.split(ctx.counts), strict=True):
                torch.mm(own, matrix, out=result)
        if ctx.needs_input_grad[1]:
            of_matrices = torch.empty_like(matrices)
            for own, read, result in zip(gradients, rows.split(ctx.counts), of_matrices, strict=True):
                torch.mm(own.t(), read, out=result)
        return of_rows, of_matrices, None


def grouped_product(rows: torch.Tensor, matrices: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Multiply rows (pairs, inner), sorted by expert, with matrices (experts, outer, inner).

    An accelerator reads the counts of torch's grouped product itself, so that the host does not wait. Where
    torch has none, for double precision and odd sizes, the product runs expert by expert.
    """
    aligned = all(size * rows.itemsize % _ALIGNED_BYTES == 0 for size in matrices.shape[1:])
    if rows.dtype not in _GROUPED or not aligned:
        product: torch.Tensor = _GroupedProduct.apply(rows, matrices, counts.tolist())
        return product
    ends = counts.cumsum(0, dtype=torch.int32)
    return nn.functional.grouped_mm(rows, matrices.transpose(-2, -1), offs=ends)


class Scattered(NamedTuple):
    """The rows of a mixture on their way to its experts.

    Attributes:
        rows: sorted by expert, (pairs, hidden).
        weights: of each token's experts, (tokens, choices).
        places: of the rows.
    """

    rows: torch.Tensor
    weights: torch.Tensor
    places: Sorted


def compute_experts(
    experts: Any, tokens: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Return the weighted sums of the experts' results, as the experts of `transformers` do.

    Args:
        experts: a module of `transformers` with gated experts; they have no common type. With `ranks`, it has
            the experts of one rank, and rows are exchanged. With `places`, (experts,), each expert is at its
            place among those of all ranks, one rank after the other. With a `capacity`, tokens are those of
            whole samples.
        tokens: (tokens, hidden).
        chosen, weights: the experts of each token and their weights, (tokens, choices).

    Returns:
        The sums (tokens, hidden), or zeros if the caller exchanges the `Scattered` rows that are left to it.
    """
    ranks: ExpertRanks | None = getattr(experts, "ranks", None)
    places: torch.Tensor | None = getattr(experts, "places", None)
    capacity: Capacity | None = getattr(experts, "capacity", None)
    count = len(experts.gate_up_proj) * (1 if ranks is None else ranks.size)
    keeps = None if capacity is None else capacity.keeps(chosen, count)
    rows = sort_rows(chosen if places is None else places[chosen], count, keeps)
    scattered: torch.Tensor = _Scatter.apply(tokens, rows, chosen.shape[1])
    if ranks is None:
        return add_results(compute_rows(experts, scattered, rows.counts), weights, rows)
    if ranks.elsewhere:
        ranks.left.append(Scattered(scattered, weights, rows))
        return torch.zeros_like(tokens)
    route = ranks.route(rows.counts)
    results = route.back(compute_rows(experts, route.there(scattered), route.counts))
    return add_results(results, weights, rows)


def compute_rows(experts: Any, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Return the results of rows (pairs, hidden), sorted by expert."""
    gate, columns = grouped_product(rows, experts.gate_up_proj, counts).chunk(2, dim=-1)
    return grouped_product(experts.act_fn(gate) * columns, experts.down_proj, counts)


def add_results(results: torch.Tensor, weights: torch.Tensor, places: Sorted) -> torch.Tensor:
    """Return the weighted sums by token (tokens, hidden) of results (pairs, hidden)."""
    summed: torch.Tensor = _Gather.apply(results, weights, places)
    return summed


ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, compute_experts)
