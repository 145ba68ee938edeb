"""``attnlab report``: run folders as one page of learning curves and tables."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attnlab.commands._output import Answer
from attnlab.commands._shared import check_page, page_argument
from attnlab.progress import showing

__all__ = ["arguments", "report_runs", "run"]


def arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folders")
    page_argument(parser, "report.html")


def run(options: argparse.Namespace) -> Answer:
    """Write the page."""
    check_page(options.out, json=options.json)
    with showing("reading", at_once=False):
        report = report_runs(options.runs, out=options.out)
    return Answer(report, written=[options.out])


def report_runs(runs: Sequence[Path | str], *, out: Path | str = "report.html") -> dict[str, Any]:
    """Write one page for the run folders; returns where it is and what the runs' results say."""
    from attnlab.pages.run_pages import run_page
    from attnlab.pages.runs import read_run
    from attnlab.provenance import write_atomic

    path = write_atomic(out, run_page(runs))
    return {
        "page": str(path),
        "runs": [
            {
                "name": run.name,
                "folder": str(run.folder),
                "finished": run.finished,
                "metrics": (run.result or {}).get("metrics", {}),
            }
            for run in map(read_run, runs)
        ],
    }
