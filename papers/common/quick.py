"""``--config smoke``: an experiment in a setting that ends in about a minute on two cores, to see that it runs.

Its numbers are no evidence. So its results never lie among the papers' results, its trainings never in a folder that a
whole run would go on with, its file says that it is quick, and no claim is judged by it.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from attnlab.provenance import write_json
from papers.common.folders import RESULTS, Experiment

__all__ = ["FOLDER", "mark_quick", "use_quick_setting"]

# Where quick results and their trainings lie.
FOLDER = Path("runs/quick")
# What a quick run, which trains anew, cannot do.
OTHER_RUNS = ("resume", "collect", "tables_only")


def use_quick_setting(options: argparse.Namespace) -> None:
    """Change the options of an experiment to those of its quick setting."""
    experiment: Experiment = options.experiment
    # A config of the experiment's own needs no other options.
    changes = {} if not options.shared_config and not options.quick else experiment.quick
    options.quick = True
    if options.shared_config:
        options.config = "small"
    for other in OTHER_RUNS:
        if getattr(options, other, None):
            raise ValueError(f"--config smoke trains anew; leave out --{other.replace('_', '-')}")
    for name, value in changes.items():
        setattr(options, name, value)
    if getattr(options, "dry_run", False):
        return
    FOLDER.mkdir(parents=True, exist_ok=True)
    # Settings that train write into a new folder; the others read what there is.
    if changes and hasattr(options, "work"):
        work = Path(tempfile.mkdtemp(prefix=f"{options.name}-", dir=FOLDER))
        options.work = [work] if isinstance(options.work, list) else work
    _redirect(options)


def mark_quick(written: Path) -> None:
    """Say in a results file that it is of a quick run."""
    content = json.loads(written.read_text(encoding="utf-8"))
    write_json(written, {**content, "quick": True})


def _redirect(options: argparse.Namespace) -> None:
    """Results that would go among the papers' own go into the quick folder; where they are sent there, refuse."""
    out = getattr(options, "out", None)
    if out is None or (not out.resolve().is_relative_to(RESULTS.resolve()) and out.parent != Path("papers/results")):
        return
    parser = argparse.ArgumentParser()
    options.experiment.arguments(parser)
    if out != parser.get_default("out"):
        raise ValueError(f"--config smoke results are no evidence and do not go into {out.parent}; name another --out")
    # Named after the experiment: some share a results file, with settings that must be the same there.
    options.out = FOLDER / f"{options.name}{out.suffix}"
