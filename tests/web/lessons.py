"""What is learned from several measured steps, kept in the home of the test."""

from __future__ import annotations

from predict.cost.machines import CPU, MODEL, cluster
from predict.observed import observed, several

from weft.describe.families import layer_graph
from weft.files import weft_home
from weft.planning.residuals import Lesson, lessons_in
from weft.predict.corrections_file import empty_residuals, save_residuals

RATIOS = (1.9, 2.0, 2.0, 2.1, 2.2)


def learned() -> tuple[Lesson, ...]:
    some = [*several(RATIOS, computations=2.0), observed(0.5, source="layer profile", half_width=0.1)]
    residuals = empty_residuals(layer_graph(MODEL), "fp32", cluster(device=CPU))
    save_residuals(residuals.with_more(some), weft_home())
    return lessons_in(weft_home())
