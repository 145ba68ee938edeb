"""``attnlab compare``: mechanisms in place of a model's own attention, judged by quality, error and cost."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnlab.commands._shared import check_mechanisms, check_page, loaded_with_text, notices, print_json
from attnlab.progress import Progress

if TYPE_CHECKING:
    from attnlab.evaluation.compare import CompareConfig

__all__ = ["arguments", "comparison_arguments", "comparison_config", "run", "show_as_it_comes", "show_comparison"]


def arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("model", metavar="MODEL", help="a model folder or a hub name")
    parser.add_argument("--text", type=Path, help="a UTF-8 text file (default: the text shipped with attnlab)")
    comparison_arguments(parser)
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
        help="also find which layers (or heads) can take which mechanism, per loss of quality, and write the plan that "
        "is recommended beside the page",
    )
    parser.add_argument("--plans", type=Path, metavar="DIR", help="write every plan that pays as a JSON file here")


def run(options: argparse.Namespace) -> None:
    """Compare, and write the page and the plans."""
    progress = Progress("comparing", plain=True)
    progress.stage("reading the model and the text")
    from attnlab.evaluation.compare import compare
    from attnlab.evaluation.plans import write_plans
    from attnlab.pages import compare_page
    from attnlab.provenance import write_atomic, write_json

    check_page(options.out, json=options.json)
    if options.plans is not None and options.recommend is None:
        raise ValueError("--plans writes what --recommend finds; give both")
    if options.plans is not None:
        options.plans.mkdir(parents=True, exist_ok=True)
    config = replace(comparison_config(options), sweep=options.sweep == "r", recommend=options.recommend)
    loaded, text, names = loaded_with_text(options)

    def write(result: dict[str, Any]) -> list[Path]:
        """The page and the plans of what there is; what was written."""
        write_atomic(options.out, compare_page(result))
        written = [options.out]
        recommendation = result.get("recommendation") or {}
        # Which plans pay is known at the end.
        if "recommended" in recommendation and options.plans is not None:
            write_plans(options.plans, recommendation)
            written.append(options.plans)
        if recommendation.get("recommended"):
            written.append(write_json(options.out.with_suffix(".plan.json"), recommendation["recommended"]))
        return written

    def measure(keep: Callable[[dict[str, Any]], None]) -> None:
        compare(loaded, text, config=config, progress=progress, on_result=keep, **names)

    show_as_it_comes(measure, options, write=write, progress=progress)


def show_as_it_comes(
    measure: Callable[[Callable[[dict[str, Any]], None]], Any],
    options: argparse.Namespace,
    *,
    write: Callable[[dict[str, Any]], list[Path]],
    progress: Progress,
) -> None:
    """Write what there is each time that ``measure`` has more of it, and show it at the end, or where it is stopped."""
    last: list[tuple[dict[str, Any], list[Path]]] = []

    def keep(result: dict[str, Any]) -> None:
        last[:] = [(result, write(result))]

    try:
        measure(keep)
    except KeyboardInterrupt:
        progress.close()
        if not last:
            raise KeyboardInterrupt("stopped before the first mechanism was finished") from None
        show_comparison(last[0][0], options, written=last[0][1])
        raise KeyboardInterrupt("stopped; what was finished is kept") from None
    finally:
        progress.close()
    show_comparison(last[0][0], options, written=last[0][1])


def comparison_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that demo and compare share: the mechanisms, and how much text is read."""
    parser.add_argument("-m", "--mechanism", action="append", metavar="SPEC", help="a mechanism; repeat for more")
    parser.add_argument(
        "--reading",
        metavar="NAME",
        action="append",
        default=[],
        help="also the error of each mechanism's map by this reading (attnlab explore --list-readings); repeatable",
    )
    parser.add_argument("--length", type=int, help="tokens in a window (default: 256, or what the model can take)")
    parser.add_argument(
        "--tokens",
        type=int,
        help="tokens of the text to read (default: 8192, fewer for a model of over 24 million weights)",
    )
    parser.add_argument("--batch", type=int, default=8, help="windows in a batch (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="which tokens are masked (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON instead of a table")


def comparison_config(options: argparse.Namespace) -> CompareConfig:
    """The settings from the options of ``comparison_arguments``."""
    from attnlab.evaluation.compare import DEFAULT_MECHANISMS, CompareConfig

    specs = tuple(options.mechanism or DEFAULT_MECHANISMS)
    check_mechanisms(specs)
    return CompareConfig(
        mechanisms=specs,
        length=options.length,
        tokens=options.tokens,
        batch=options.batch,
        seed=options.seed,
        readings=tuple(options.reading),
    )


def show_comparison(result: dict[str, Any], options: argparse.Namespace, *, written: Sequence[Path]) -> None:
    """The tables of a comparison, or its JSON, and the files that were written."""
    from attnlab.evaluation.compare_lines import comparison_lines

    if options.json:
        print_json(result)
    else:
        print("\n".join(comparison_lines(result)), file=notices(options.out))
    for path in written:
        print(f"wrote {path.resolve()}", file=sys.stderr if options.json else notices(options.out))
