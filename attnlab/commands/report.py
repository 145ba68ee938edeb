"""``attnlab report``: run folders as one page of learning curves and tables."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attnlab.commands._shared import check_page, notices, print_json

__all__ = ["arguments", "report_runs", "run"]


def arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folders")
    parser.add_argument("-o", "--out", type=Path, default=Path("report.html"), help="the page (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print what the runs' results say as JSON")


def run(options: argparse.Namespace) -> None:
    """Write the page."""
    check_page(options.out, json=options.json)
    report = report_runs(options.runs, out=options.out)
    if options.json:
        print_json(report)
    else:
        print(f"wrote {options.out.resolve()}", file=notices(options.out))


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
