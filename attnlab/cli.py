"""The command line: a command's name -> the function that does it. What a user can mend is one line, exit code 2."""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from attnlab import __version__

__all__ = ["COMMANDS", "Command", "main"]


@dataclass(frozen=True)
class Command:
    """One command: what it does, an example, its arguments, and the function that runs it."""

    summary: str
    example: str
    arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], None]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code is 0, 2 for something the user can mend, 130 for Ctrl-C."""
    parser = _parser()
    options = parser.parse_args(argv)
    if options.command is None:
        print(_overview())
        return 0
    try:
        COMMANDS[options.command].run(options)
    except KeyboardInterrupt as stopped:
        print(f"attnlab: {stopped or 'interrupted'}", file=sys.stderr)
        return 130
    except _mendable() as error:
        if options.debug:
            traceback.print_exc()
        else:
            print(f"attnlab: {_one_line(error)}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="attnlab", description="A laboratory for attention.")
    parser.add_argument("--version", action="version", version=f"attnlab {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, command in COMMANDS.items():
        sub = commands.add_parser(
            name, help=command.summary, description=f"{command.summary} Example: {command.example}"
        )
        command.arguments(sub)
        sub.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


def _overview() -> str:
    lines = [f"attnlab {__version__}: a laboratory for attention. What one can do:", ""]
    for name, command in COMMANDS.items():
        lines += [f"  {name:<10} {command.summary}", f"             $ {command.example}", ""]
    return "\n".join([*lines, "attnlab COMMAND --help lists a command's options."])


def _mendable() -> tuple[type[Exception], ...]:
    """What a user can do something about; only asked for when there is an error, as it imports torch."""
    from attnlab.training import RunError

    return ValueError, OSError, ImportError, RunError


def _one_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error) or type(error).__name__


def _comparison_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-m", "--mechanism", action="append", metavar="SPEC", help="a mechanism; repeat for more")
    parser.add_argument("--length", type=int, help="tokens in a window (default: 256, or what the model can take)")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of the text to read (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=8, help="windows in a batch (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="which tokens are masked (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON instead of a table")


def _compare_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a model folder or a hub name")
    parser.add_argument("--text", type=Path, help="a UTF-8 text file (default: the text shipped with attnlab)")
    _comparison_arguments(parser)
    parser.add_argument("-o", "--out", type=Path, default=Path("compare.html"), help="the page (default: %(default)s)")
    parser.add_argument("--trust-remote-code", action="store_true", help="let the model's own code run")
    parser.add_argument("--device", default="cpu", help="where the model runs, such as cuda (default: %(default)s)")
    parser.add_argument(
        "--sweep", choices=("r",), help="also measure quality and error against r, the number of keys a query may use"
    )
    parser.add_argument(
        "--recommend",
        nargs="?",
        const="layers",
        choices=("layers", "heads"),
        help="also find which layers (or heads) can take which mechanism, per loss of quality",
    )
    parser.add_argument("--plans", type=Path, metavar="DIR", help="write the recommended plans as JSON files here")


def _compare(options: argparse.Namespace) -> None:
    from attnlab.data import bundled_text, read_text
    from attnlab.experiments.compare import compare
    from attnlab.experiments.parts import moved_to
    from attnlab.experiments.recommend import write_plans
    from attnlab.hf import load_model
    from attnlab.provenance import check_writable, write_atomic
    from attnlab.reports import compare_page

    check_writable(options.out)
    if options.plans is not None and options.recommend is None:
        raise ValueError("--plans writes what --recommend finds; give both")
    if options.plans is not None:
        options.plans.mkdir(parents=True, exist_ok=True)
    config = replace(_compare_config(options), sweep=options.sweep == "r", recommend=options.recommend)
    text = bundled_text() if options.text is None else read_text(options.text)
    loaded = load_model(options.model, trust_remote_code=options.trust_remote_code)
    moved_to(options.device, loaded.model)
    text_name = "shipped" if options.text is None else options.text.name
    result = compare(loaded, text, config=config, model_name=Path(options.model).name, text_name=text_name)
    write_atomic(options.out, compare_page(result))
    written = [options.out]
    if options.plans is not None:
        write_plans(options.plans, result["recommendation"])
        written.append(options.plans)
    _show(result, options, written=written)


def _compare_config(options: argparse.Namespace) -> Any:
    from attnlab.experiments.compare import DEFAULT_MECHANISMS, CompareConfig
    from attnlab.registry import mechanism

    specs = tuple(options.mechanism or DEFAULT_MECHANISMS)
    for spec in specs:
        # A misspelt mechanism is told before a large model is loaded.
        mechanism(spec)
    return CompareConfig(
        mechanisms=specs, length=options.length, tokens=options.tokens, batch=options.batch, seed=options.seed
    )


def _show(result: dict[str, Any], options: argparse.Namespace, *, written: Sequence[Path]) -> None:
    from attnlab.experiments.compare import table_lines
    from attnlab.experiments.recommend import recommend_lines
    from attnlab.experiments.sweep import sweep_lines

    if options.json:
        print(json.dumps(result, indent=1, ensure_ascii=False))
    else:
        print("\n".join(table_lines(result)))
        if "sweeps" in result:
            print("", *sweep_lines(result), sep="\n")
        if "recommendation" in result:
            print("", *recommend_lines(result["recommendation"]), sep="\n")
    for path in written:
        print(f"wrote {path.resolve()}", file=sys.stderr if options.json else sys.stdout)


def _demo_arguments(parser: argparse.ArgumentParser) -> None:
    _comparison_arguments(parser)
    parser.add_argument("--out", type=Path, default=Path("demo"), help="the folder to write (default: %(default)s)")


def _demo(options: argparse.Namespace) -> None:
    from attnlab.experiments.demo import demo, demo_exploration
    from attnlab.provenance import check_writable, write_atomic, write_json
    from attnlab.reports import compare_page

    options.out.mkdir(parents=True, exist_ok=True)
    page, numbers, explorer = (options.out / name for name in ("index.html", "results.json", "explorer.html"))
    check_writable(page)
    result, maps = demo(_compare_config(options))
    write_json(numbers, result)
    demo_exploration().save(explorer)
    write_atomic(page, compare_page(result | maps | {"explorer": explorer.name}))
    _show(result, options, written=[page, explorer, numbers])


def _train_arguments(parser: argparse.ArgumentParser) -> None:
    from attnlab.experiments.train_command import arguments

    arguments(parser)


def _train(options: argparse.Namespace) -> None:
    from attnlab.experiments.train_command import run

    run(options)


def _report_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="*", metavar="RUN", help="run folders")
    parser.add_argument("--claims", action="store_true", help="the papers' claims beside our results, instead of runs")
    parser.add_argument(
        "--results", type=Path, default=Path("results"), help="where results lie (default: %(default)s)"
    )
    parser.add_argument("-o", "--out", type=Path, help="the page (default: report.html or claims.html)")
    parser.add_argument("--json", action="store_true", help="print what was found as JSON")


def _report(options: argparse.Namespace) -> None:
    from attnlab.provenance import check_writable
    from attnlab.reports.command import report_claims, report_runs

    out = options.out or Path("claims.html" if options.claims else "report.html")
    check_writable(out)
    if options.claims:
        told = report_claims(results=options.results, out=out, markdown=None)
    elif options.runs:
        told = report_runs(options.runs, out=out)
    else:
        raise ValueError("name the run folders to report on, or --claims for the papers' claims")
    if options.json:
        print(json.dumps(told, indent=1, ensure_ascii=False))
    else:
        print(f"wrote {out.resolve()}")


def _bench_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-m", "--mechanism", action="append", metavar="SPEC", help="a mechanism; repeat for more")
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8192], help="in tokens (default: 1024 to 8192)"
    )
    parser.add_argument("--heads", type=int, default=8, help="(default: %(default)s)")
    parser.add_argument("--width", type=int, default=64, help="of a head (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=1, help="texts at once (default: %(default)s)")
    parser.add_argument("--bidirectional", action="store_true", help="not causal")
    parser.add_argument("--backward", action="store_true", help="forward and backward")
    parser.add_argument("--repeats", type=int, default=3, help="of which the median counts (default: %(default)s)")
    parser.add_argument("--device", default="cpu", help="such as cuda (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON instead of a table")


def _bench(options: argparse.Namespace) -> None:
    from attnlab.experiments.bench import BenchConfig, bench, bench_lines

    config = BenchConfig(
        mechanisms=tuple(options.mechanism or BenchConfig.mechanisms),
        lengths=tuple(options.lengths),
        heads=options.heads,
        width=options.width,
        batch=options.batch,
        causal=not options.bidirectional,
        backward=options.backward,
        repeats=options.repeats,
        device=options.device,
    )
    result = bench(config)
    print(json.dumps(result, indent=1) if options.json else "\n".join(bench_lines(result)))


def _reproduce_arguments(parser: argparse.ArgumentParser) -> None:
    from attnlab.experiments.reproduce import EXPERIMENTS

    names = parser.add_subparsers(dest="experiment", metavar="EXPERIMENT", required=True)
    for name, experiment in EXPERIMENTS.items():
        experiment.arguments(names.add_parser(name, help=experiment.summary, description=experiment.summary))


def _reproduce(options: argparse.Namespace) -> None:
    from attnlab.experiments.reproduce import EXPERIMENTS

    EXPERIMENTS[options.experiment].run(options)


def _explore_arguments(parser: argparse.ArgumentParser) -> None:
    from attnlab.experiments.explore_command import arguments

    arguments(parser)


def _explore(options: argparse.Namespace) -> None:
    from attnlab.experiments.explore_command import run

    run(options)


def _diagnose_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", type=Path, metavar="SOURCE", help="sentences, one a line; or a tsv of pairs")
    parser.add_argument("target", type=Path, nargs="?", metavar="TARGET", help="their translations, line by line")
    parser.add_argument("--lines", type=int, help="read only the first so many pairs")
    parser.add_argument("--seed", type=int, default=0, help="of the random pairings (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def _diagnose(options: argparse.Namespace) -> None:
    from attnlab.experiments.ktiw.diagnose import diagnose_files, diagnosis_lines

    found = diagnose_files(options.source, options.target, lines=options.lines, seed=options.seed)
    print(json.dumps(found, indent=1, ensure_ascii=False) if options.json else "\n".join(diagnosis_lines(found)))


COMMANDS: dict[str, Command] = {
    "demo": Command(
        "Compare approximations of attention on the small model that is shipped with attnlab, and write a page.",
        "attnlab demo",
        _demo_arguments,
        _demo,
    ),
    "compare": Command(
        "Put mechanisms in place of a model's attention: its quality, their error, time and memory.",
        "attnlab compare ./my-model --text book.txt -m top-r:r=16 -m value-aware:r=1",
        _compare_arguments,
        _compare,
    ),
    "explore": Command(
        "Look at a model's attention over a text, or at a run's over training: one offline page.",
        'attnlab explore ./my-model "The old ferry stayed in the harbour." --all -o page.html',
        _explore_arguments,
        _explore,
    ),
    "train": Command(
        "Train a masked or causal language model, with any mechanism as its attention, on your text.",
        "attnlab train --text corpus.txt --model attnlab-lm --task causal --attention kernel:elu --out runs/elu",
        _train_arguments,
        _train,
    ),
    "report": Command(
        "Turn run folders into one page of learning curves and tables, or results into the ledger of claims.",
        "attnlab report runs/seed-0 runs/seed-1 -o report.html",
        _report_arguments,
        _report,
    ),
    "bench": Command(
        "Time and peak memory of mechanisms against torch's SDPA, over lengths, as ratios in one run.",
        "attnlab bench -m kernel:elu --lengths 4096 8192",
        _bench_arguments,
        _bench,
    ),
    "diagnose": Command(
        "Say before training whether word translation can be learned from a parallel corpus' co-occurrence counts.",
        "attnlab diagnose train.en train.de",
        _diagnose_arguments,
        _diagnose,
    ),
    "reproduce": Command(
        "Run a paper's experiment and write its tables beside the paper's.",
        "attnlab reproduce value-aware --corpus stores --out results/value-aware.json --work runs/value-aware",
        _reproduce_arguments,
        _reproduce,
    ),
}
