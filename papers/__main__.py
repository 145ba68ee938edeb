"""``python -m papers``: the experiments of the papers by name, each with its own arguments; alone it lists them."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence

from attnlab.cli import run_reporting, until_nobody_reads
from papers.common.folders import Experiment, experiments_like, folder_of, list_of_experiments, modules

__all__ = ["main"]


@until_nobody_reads
def main(argv: Sequence[str] | None = None) -> int:
    """Run one experiment; the exit code is 0, 2 for something the user can mend, 130 for Ctrl-C."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    name = next((argument for argument in arguments if not argument.startswith("-")), None)
    experiments = experiments_like(name)
    if name not in experiments:
        experiments = experiments_like(None)
    if not arguments:
        print(list_of_experiments(experiments))
        return 0
    options = _parser(experiments).parse_args(arguments)
    return run_reporting(_run, options, program="python -m papers")


def _parser(experiments: dict[str, Experiment]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m papers", description="The papers' experiments.")
    names = parser.add_subparsers(dest="name", metavar="EXPERIMENT", required=True)
    for name, experiment in experiments.items():
        sub = names.add_parser(name, help=experiment.summary, description=experiment.summary)
        experiment.arguments(sub)
        _add_shared(sub, experiment)
    return parser


def _add_shared(parser: argparse.ArgumentParser, experiment: Experiment) -> None:
    """The options that every experiment has."""
    # An experiment may have configs of its own instead.
    shared = bool(experiment.configs) and "--config" not in parser._option_string_actions
    if shared:
        paper = f"; paper: {experiment.paper}" if experiment.paper is not None else ""
        smoke = "; smoke: a minute on two cores, no evidence, into runs/quick" if experiment.quick else ""
        about = f"small: ours (the default){smoke}{paper}"
        parser.add_argument("--config", choices=experiment.configs, default="small", help=about)
    parser.add_argument("--quick", action="store_true", help="short for --config smoke")
    if experiment.settings is not None:
        parser.add_argument("--dry-run", action="store_true", help="print the settings as JSON and run nothing")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser.set_defaults(experiment=experiment, shared_config=shared)


def _run(options: argparse.Namespace) -> None:
    """Run the experiment and say which claims its results support."""
    if options.quick or getattr(options, "config", None) == "smoke":
        print("smoke: a small setting, to see that it runs; its numbers are no evidence", file=sys.stderr)
        from papers.common.quick import use_quick_setting

        use_quick_setting(options)
    if getattr(options, "dry_run", False):
        print(json.dumps(options.experiment.settings(options), indent=1, default=str))
        return
    out = getattr(options, "out", None)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
    from attnlab.progress import showing

    began = time.monotonic()
    with showing(options.name):
        written = options.experiment.run(options)
    if written is None:
        return
    # A run that only collects says nothing of how long the experiment takes.
    if not getattr(options, "collect", False) and not getattr(options, "tables_only", False):
        from papers.common.row_store import note_seconds

        note_seconds(written, time.monotonic() - began)
    print(f"wrote {written.resolve()}")
    if options.quick:
        from papers.common.quick import mark_quick

        mark_quick(written)
        return
    from papers.common.claims import verdicts_on

    folder = folder_of(options.name)
    declared = [] if folder is None else modules(folder, options.experiment.claims)
    for line in verdicts_on(written, [claim for module in declared for claim in module.CLAIMS]):
        print(line)


if __name__ == "__main__":
    sys.exit(main())
