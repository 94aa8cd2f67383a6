"""Notebooks of the site run, and what is kept of them is small and whole."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from docs.notebook_pages import NOTEBOOKS, executed, page

MOST_BYTES = 200_000


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_are_kept_and_small(path: Path) -> None:
    assert path.stat().st_size < MOST_BYTES
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == [*range(1, len(cells) + 1)]
    kinds = [output["output_type"] for cell in cells for output in cell["outputs"]]
    assert kinds
    assert "error" not in kinds


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_page_has_all_cells_and_outputs(path: Path) -> None:
    notebook = json.loads(path.read_text())
    text = page(notebook, path.stem)
    for cell in notebook["cells"]:
        assert "".join(cell["source"]) in text
    outputs = [output for cell in notebook["cells"] for output in cell.get("outputs", ())]
    assert len(re.findall(r'^```text$|^<div class="output">', text, re.MULTILINE)) == len(outputs)
    assert text.startswith("# ")


@pytest.mark.examples
@pytest.mark.processes
@pytest.mark.timeout(600)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path) -> None:
    pytest.importorskip("nbclient", reason="the package nbclient is not installed")
    notebook = executed(path)
    assert len(json.dumps(notebook)) < MOST_BYTES
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    shown = [output.data["text/html"] for output in outputs if "text/html" in output.get("data", {})]
    assert len(shown) == 1
    assert "<svg" in shown[0]
    assert "peak memory" in shown[0]


def test_a_large_plan_shows_itself_in_little_room() -> None:
    import weft

    plan = weft.plan(model="llama-13b", on="16xa100-80gb", global_batch=128, pp=4, dp=4, schedule="1f1b")
    assert len(plan._repr_html_()) < MOST_BYTES
