"""The tutorials as notebooks: ``python -m tools.tutorials`` runs those that changed, ``make site`` shows their outputs.

A tutorial is a page of docs/tutorials, so a change to it can be read. Its blocks of ``python`` are the cells of a
notebook, the text between them the rest. The notebook is run from top to bottom by nbclient in an empty folder and
kept, with its outputs, as build/tutorials/NAME.ipynb; it is run again when its code or the package has changed. Outputs
are not in the repository: they are of the machine and day of the build, and cannot go stale.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGES = ROOT / "docs" / "tutorials"
NOTEBOOKS = ROOT / "build" / "tutorials"
CELL = re.compile(r"^```python\n(.*?)^```\n?", re.DOTALL | re.MULTILINE)
# Seconds that a cell may take before its tutorial has failed.
LONGEST_CELL = 180


def tutorials() -> list[Path]:
    """The pages that are notebooks: all but the overview."""
    return sorted(page for page in PAGES.glob("*.md") if page.name != "index.md")


def cells(page: str) -> Iterator[tuple[str, str]]:
    """The cells of a page, in order: ("markdown" or "code", source).

    >>> list(cells("One.\\n```python\\n1 + 1\\n```\\nTwo.\\n"))
    [('markdown', 'One.'), ('code', '1 + 1'), ('markdown', 'Two.')]
    """
    for place, text in enumerate(CELL.split(page)):
        if text.strip():
            yield ("markdown", "code")[place % 2], text.strip("\n")


def fingerprint(page: Path) -> str:
    """Of all that a tutorial's outputs depend on here: its code and the package."""
    code = [source for kind, source in cells(page.read_text(encoding="utf-8")) if kind == "code"]
    digest = hashlib.sha256("\0".join(code).encode())
    for source in sorted((ROOT / "attnlab").rglob("*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()


def as_notebook(page: Path) -> Any:
    """The page as a notebook that was not run."""
    import nbformat

    make = {"markdown": nbformat.v4.new_markdown_cell, "code": nbformat.v4.new_code_cell}
    parts = [make[kind](source) for kind, source in cells(page.read_text(encoding="utf-8"))]
    for number, part in enumerate(parts):
        part["id"] = f"cell-{number}"
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    return nbformat.v4.new_notebook(cells=parts, metadata=kernel)


def executed(page: Path) -> Any:
    """The page as a notebook that was run from top to bottom; a cell that fails is nbclient's error."""
    from nbclient import NotebookClient

    notebook = as_notebook(page)
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": paths, "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    # Models are tiny: threads that wait for each other on a busy machine took minutes for what one does in seconds.
    environment.setdefault("OMP_NUM_THREADS", "1")
    start, before = time.perf_counter(), _processor_seconds()
    with tempfile.TemporaryDirectory() as folder:
        folders = {"metadata": {"path": folder}}
        client = NotebookClient(notebook, timeout=LONGEST_CELL, coalesce_streams=True, resources=folders)
        client.execute(env=environment)
    notebook.metadata["attnlab"] = {
        "of": fingerprint(page),
        "seconds": round(time.perf_counter() - start, 1),
        "processor_seconds": round(_processor_seconds() - before, 1),
    }
    return notebook


def _processor_seconds() -> float:
    """What the processes that ended, kernels among them, have used of the processors, however busy these were."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def kept(page: Path) -> Any:
    """The page's notebook with the outputs of its last run; None where its code or the package has changed since.

    The text between the cells is the page's as it is now.
    """
    import nbformat

    file = NOTEBOOKS / f"{page.stem}.ipynb"
    if not file.exists():
        return None
    run = nbformat.read(file, as_version=4)
    if run.metadata.get("attnlab", {}).get("of") != fingerprint(page):
        return None
    notebook = as_notebook(page)
    notebook.metadata["attnlab"] = run.metadata["attnlab"]
    for cell, before in zip(code_cells(notebook), code_cells(run), strict=True):
        cell.outputs, cell.execution_count = before.outputs, before.execution_count
    return notebook


def code_cells(notebook: Any) -> list[Any]:
    """The cells of a notebook that have outputs."""
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def main(arguments: list[str]) -> None:
    """Runs the tutorials that changed, one after the other."""
    import nbformat

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="tutorials to run (default: all that changed)")
    options = parser.parse_args(arguments)
    NOTEBOOKS.mkdir(parents=True, exist_ok=True)
    for page in tutorials():
        if page.stem in options.names or (not options.names and kept(page) is None):
            notebook = executed(page)
            nbformat.write(notebook, NOTEBOOKS / f"{page.stem}.ipynb")
            print(f"{page.stem}: {notebook.metadata['attnlab']['seconds']} s", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
