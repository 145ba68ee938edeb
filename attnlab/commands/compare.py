"""``attnlab compare``: mechanisms in place of a model's own attention, judged by quality, error and cost."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnlab.commands._output import Answer, StoppedEarly
from attnlab.commands._shared import (
    check_mechanisms,
    check_page,
    device_argument,
    loaded_with_text,
    mechanism_argument,
    model_argument,
    page_argument,
    text_argument,
    trust_argument,
)
from attnlab.progress import Progress

if TYPE_CHECKING:
    from attnlab.evaluation.compare import CompareConfig

__all__ = ["answer_as_it_comes", "arguments", "comparison_arguments", "comparison_config", "run"]


def arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    model_argument(parser)
    text_argument(parser)
    comparison_arguments(parser)
    page_argument(parser, "compare.html")
    trust_argument(parser)
    device_argument(parser)
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
    parser.add_argument("--plans", type=Path, metavar="FOLDER", help="write every plan that pays as a JSON file here")


def run(options: argparse.Namespace) -> Answer:
    """Compare, and write the page and the plans."""
    progress = Progress("comparing", plain=True)
    progress.stage("reading the model and the text")
    from attnlab.evaluation.compare import compare
    from attnlab.evaluation.compare_lines import comparison_lines
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

    return answer_as_it_comes(measure, write=write, lines=comparison_lines, progress=progress)


def answer_as_it_comes(
    measure: Callable[[Callable[[dict[str, Any]], None]], Any],
    *,
    write: Callable[[dict[str, Any]], list[Path]],
    lines: Callable[[dict[str, Any]], Sequence[str]],
    progress: Progress,
) -> Answer:
    """Write what there is each time that ``measure`` has more of it; the answer at the end, or where it is stopped."""
    last: list[tuple[dict[str, Any], list[Path]]] = []

    def keep(result: dict[str, Any]) -> None:
        last[:] = [(result, write(result))]

    def answer() -> Answer:
        result, written = last[0]
        return Answer(result, lines(result), written)

    try:
        measure(keep)
    except KeyboardInterrupt:
        progress.close()
        if not last:
            raise KeyboardInterrupt("stopped before anything was finished") from None
        raise StoppedEarly("stopped; what was finished is kept", answer()) from None
    finally:
        progress.close()
    return answer()


def comparison_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that demo and compare share: the mechanisms, and how much text is read."""
    mechanism_argument(parser)
    parser.add_argument(
        "--reading",
        metavar="READING",
        action="append",
        default=[],
        help="also each mechanism's error by this reading (attnlab explore --list-readings); repeat for more",
    )
    parser.add_argument(
        "--length", type=int, metavar="N", help="tokens in a window (default: 256, or what the model can take)"
    )
    parser.add_argument(
        "--tokens",
        type=int,
        metavar="N",
        help="tokens of the text to read (default: 8192, fewer for a model of over 24 million weights)",
    )
    parser.add_argument("--batch", type=int, metavar="N", default=8, help="windows in a batch (default: %(default)s)")
    parser.add_argument(
        "--seed", type=int, metavar="N", default=0, help="seed of which tokens are masked (default: %(default)s)"
    )


def comparison_config(options: argparse.Namespace, mechanisms: Sequence[str] = ()) -> CompareConfig:
    """The settings from the options of ``comparison_arguments``; ``mechanisms`` where they name none."""
    from attnlab.evaluation.compare import DEFAULT_MECHANISMS, CompareConfig

    specs = tuple(options.mechanism or mechanisms or DEFAULT_MECHANISMS)
    check_mechanisms(specs)
    return CompareConfig(
        mechanisms=specs,
        length=options.length,
        tokens=options.tokens,
        batch=options.batch,
        seed=options.seed,
        readings=tuple(options.reading),
    )
