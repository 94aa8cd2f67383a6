"""Notebooks as pages of the site: `python docs/notebook_pages.py` runs them and keeps their outputs."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def executed(path: Path) -> Any:
    """Run a notebook in a folder of its own, which also has all that weft remembers of it.

    Raises:
        nbclient.exceptions.CellExecutionError: when a cell fails.
    """
    import nbclient
    import nbformat

    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        place = {"metadata": {"path": folder}}
        environment = os.environ | {"WEFT_HOME": str(Path(folder) / "home"), "COLUMNS": "100"}
        client = nbclient.NotebookClient(
            notebook, timeout=600, kernel_name="python3", resources=place, coalesce_streams=True
        )
        client.execute(env=environment)
    for cell in notebook.cells:
        # Times and places differ in each execution.
        cell.metadata.pop("execution", None)
        for output in cell.get("outputs", ()):
            if "text" in output:
                output.text = output.text.replace(folder, ".")
    return notebook


def page(notebook: dict[str, Any], name: str) -> str:
    """Return a notebook as a page of the site."""
    parts = [text for cell in notebook["cells"] for text in _cell(cell)]
    return "\n\n".join([*parts, f"This page is a notebook: [{name}.ipynb]({name}.ipynb)."]) + "\n"


def _cell(cell: dict[str, Any]) -> Iterator[str]:
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        yield source
        return
    yield f"```python\n{source}\n```"
    for output in cell["outputs"]:
        shown = output.get("data", {})
        if "text/html" in shown:
            yield f'<div class="output">{"".join(shown["text/html"])}</div>'
        else:
            text = "".join(output.get("text", shown.get("text/plain", "")))
            yield f"```text\n{text.rstrip()}\n```"


def main() -> None:
    import nbformat

    for path in NOTEBOOKS:
        nbformat.write(executed(path), path)
        print(f"ran {path.name}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
