"""What ``attnlab report`` does: pages for run folders, and the ledger of claims."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attnlab.provenance import write_atomic
from attnlab.reports.ledger_page import claims_json, claims_page
from attnlab.reports.results import load_results
from attnlab.reports.run_pages import run_page
from attnlab.reports.runs import read_run

__all__ = ["report_claims", "report_runs"]


def report_runs(runs: Sequence[Path | str], *, out: Path | str = "report.html") -> dict[str, Any]:
    """Write one page for the run folders; returns where it is and what the runs' results say."""
    path = write_atomic(out, run_page(runs))
    found = [read_run(folder) for folder in runs]
    return {
        "page": str(path),
        "runs": [
            {
                "name": r.name,
                "folder": str(r.folder),
                "finished": r.finished,
                "metrics": (r.result or {}).get("metrics", {}),
            }
            for r in found
        ],
    }


def report_claims(
    *, results: Path | str = "results", out: Path | str = "claims.html", markdown: Path | str | None = None
) -> dict[str, Any]:
    """Write the ledger as a page, and as Markdown on request; returns where they are and every verdict."""
    if not Path(results).is_dir():
        raise ValueError(f"{results} is no folder; give the folder with the results' JSON files")
    found = load_results(results)
    page, text = claims_page(found)
    written = {"page": str(write_atomic(out, page))}
    if markdown is not None:
        written["markdown"] = str(write_atomic(markdown, text))
    return {**written, "claims": claims_json(found)}
