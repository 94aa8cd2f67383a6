"""Laws of the prices of K-FAC on tensor ranks: divided products, and exchanges of rows and gradients."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
from filled_plans import kfac
from predict.cost.machines import GPU, MODEL, cluster
from predict.plans import plan_of

from weft.describe.cluster import Link
from weft.describe.families import layer_graph
from weft.methods.kfac.kinds import CURVATURES, INVERSIONS, PRECONDITION, REDUCTIONS
from weft.methods.kfac.linears import treated_in
from weft.planning.compile import compile_plan
from weft.predict.cost.collective_library import SHARE_BETWEEN
from weft.predict.cost.placed_plan import CostModel
from weft.predict.cost.price import Priced, price
from weft.program.program import Program

# So large that no kernel waits for its launch.
WIDE = replace(MODEL, layers=2, hidden=512, heads=4, key_value_heads=4, feed_forward=2048, sequence=4096)
GRAPH = layer_graph(WIDE)
SLOW_BYTES_PER_S, FAST_BYTES_PER_S = 1e9, 1e15
FP32 = 4


class Prices(NamedTuple):
    """A program of one stage, and its prices."""

    program: Program
    priced: Priced

    def seconds(self, kind: int) -> float:
        """Of the first row of a kind."""
        row = np.flatnonzero(self.program.columns.kind == kind)[0]
        return float(self.priced.costs.occupancy[row]) / 1e9


def prices(tp: int, bytes_per_s: float, form: str = "inverse") -> Prices:
    """Of ranks on devices of different nodes, and a link without latency."""
    device = replace(GPU, launch_s=0.0)
    where = replace(
        cluster(nodes=2, devices=1, device=device), links={("node", "node"): Link(bytes_per_s, 0.0)}
    )
    plan = plan_of(GRAPH, where, pp=1, tp=tp, micro_batches=2)
    plan = plan.model_copy(update={"methods": (kfac(WIDE, form=form),)})
    program = compile_plan(plan, GRAPH)
    return Prices(program, price(CostModel(graph=GRAPH, cluster=where), program, plan))


def test_tensor_ranks_divide_products_and_not_inverses() -> None:
    one, two = prices(1, FAST_BYTES_PER_S), prices(2, FAST_BYTES_PER_S)
    for kind in (*CURVATURES, PRECONDITION):
        assert two.seconds(kind) == pytest.approx(one.seconds(kind) / 2, rel=0.1)
    for kind in INVERSIONS:
        assert two.seconds(kind) == pytest.approx(one.seconds(kind))


@pytest.mark.parametrize(("form", "gathers"), [("inverse", 1), ("eigen", 2)])
def test_tensor_ranks_exchange_features_of_rows_and_gather_gradients(form: str, gathers: int) -> None:
    """Half of what a rank has goes to the other one, or comes from it."""
    slow, fast = (prices(2, one, form) for one in (SLOW_BYTES_PER_S, FAST_BYTES_PER_S))
    tokens, hidden, inner = 2 * WIDE.sequence, WIDE.hidden, WIDE.feed_forward
    weights = WIDE.layers * (3 * hidden**2 + hidden**2 + 2 * hidden * inner)
    expected = {
        # Inputs of both products divided by rows; outputs of queries, keys and values, and the wide ones.
        CURVATURES[0]: tokens * (hidden + inner) / 2 / 2,
        CURVATURES[1]: tokens * (3 * hidden + inner) / 2 / 2,
        PRECONDITION: gathers * weights / 2,
    }
    for kind, elements in expected.items():
        taken = slow.seconds(kind) - fast.seconds(kind)
        assert taken == pytest.approx(FP32 * elements / (SHARE_BETWEEN * SLOW_BYTES_PER_S), rel=0.01)
    assert all(slow.seconds(kind) > fast.seconds(kind) for kind in REDUCTIONS)


def test_tensor_ranks_hold_whole_matrices_and_their_share_of_rows() -> None:
    one, two = (prices(tp, FAST_BYTES_PER_S).priced.held["curvature"].value[0].item() for tp in (1, 2))
    layers = treated_in(WIDE).values()
    sizes = [size for layer in layers for side in (0, 1) for size in layer.sizes(side)]
    # Of two micro-batches.
    rows = FP32 * 2 * 2 * WIDE.sequence * sum(sizes)
    assert one == 3 * FP32 * sum(size**2 for size in sizes) + rows
    assert two == one - rows // 2
