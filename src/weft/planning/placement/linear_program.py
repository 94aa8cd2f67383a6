"""`LinearProgram`: rows of sums of columns, solved by HiGHS."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from weft.program.arrays import Floats, Ints
from weft.solver import silent_solver


class Solution(NamedTuple):
    """The values of columns, shape (columns,), and whether no others cost less."""

    columns: Floats
    proved: bool


@dataclass
class LinearProgram:
    """Columns between 0 and `most`, and rows whose sums have a least value.

    Attributes:
        most: shape (columns,).
        whole: the columns that take whole numbers only.
    """

    most: Floats
    whole: npt.NDArray[np.int32] = field(default_factory=lambda: np.empty(0, dtype=np.int32))
    _columns: list[Ints] = field(default_factory=list)
    _values: list[Floats] = field(default_factory=list)
    _lengths: list[Ints] = field(default_factory=list)
    _least: list[Floats] = field(default_factory=list)

    def require(self, columns: Ints, values: Floats, least: Floats) -> None:
        """Add rows with equally many terms: shapes (rows, terms), (rows, terms) and (rows,)."""
        self._columns.append(columns.ravel())
        self._values.append(values.ravel())
        self._lengths.append(np.full(len(columns), columns.shape[1], dtype=np.int64))
        self._least.append(least)

    def require_sums(self, row: Ints, columns: Ints, least: Floats) -> None:
        """Add a row for each number in `row`: the sum of its `columns`, where two or more.

        Args:
            least: the least sum of each row, by its number.
        """
        order = np.argsort(row, kind="stable")
        numbers, lengths = np.unique(row, return_counts=True)
        several = lengths >= 2
        chosen = columns[order][np.repeat(several, lengths)]
        self._columns.append(chosen)
        self._values.append(np.ones(len(chosen)))
        self._lengths.append(lengths[several].astype(np.int64))
        self._least.append(least[numbers[several]])

    def minimum(self, costs: Floats, seconds: float) -> Solution | None:
        """Return a solution with the least costs; None if there is none, or it is not found in time.

        With whole columns, the best solution within the time counts, as proved or not.
        """
        import highspy

        solver = silent_solver()
        solver.setOptionValue("time_limit", seconds)
        if not len(self.whole):
            solver.setOptionValue("solver", "simplex")
        else:
            solver.setOptionValue("mip_rel_gap", 0.0)
        count = len(self.most)
        solver.addVars(count, np.zeros(count), self.most)
        solver.changeColsCost(count, np.arange(count, dtype=np.int32), costs)
        if len(self.whole):
            kinds = np.full(len(self.whole), highspy.HighsVarType.kInteger)
            solver.changeColsIntegrality(len(self.whole), self.whole, kinds)
        lengths = np.concatenate(self._lengths)
        starts = np.concatenate([[0], np.cumsum(lengths)])
        least = np.concatenate(self._least)
        solver.addRows(
            len(least),
            least,
            np.full(len(least), np.inf),
            int(starts[-1]),
            starts[:-1].astype(np.int32),
            np.concatenate(self._columns).astype(np.int32),
            np.concatenate(self._values),
        )
        solver.run()
        proved = solver.getModelStatus() == highspy.HighsModelStatus.kOptimal
        if not proved and not (len(self.whole) and solver.getInfo().primal_solution_status == 2):
            return None
        return Solution(np.array(solver.getSolution().col_value), proved)
