"""``attnlab compare``: mechanisms in place of a model's own attention, judged by quality, error and cost."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnlab.commands._shared import check_mechanisms, check_page, notices, print_json

if TYPE_CHECKING:
    from attnlab.evaluation.compare import CompareConfig

__all__ = ["arguments", "comparison_arguments", "comparison_config", "run", "show_comparison"]


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
        help="also find which layers (or heads) can take which mechanism, per loss of quality",
    )
    parser.add_argument("--plans", type=Path, metavar="DIR", help="write the recommended plans as JSON files here")


def run(options: argparse.Namespace) -> None:
    """Compare, and write the page and the plans."""
    from attnlab.adapters import load_model
    from attnlab.data import bundled_text, read_text
    from attnlab.devices import to_device
    from attnlab.evaluation.compare import compare
    from attnlab.evaluation.recommend import write_plans
    from attnlab.pages import compare_page
    from attnlab.provenance import write_atomic

    check_page(options.out, json=options.json)
    if options.plans is not None and options.recommend is None:
        raise ValueError("--plans writes what --recommend finds; give both")
    if options.plans is not None:
        options.plans.mkdir(parents=True, exist_ok=True)
    config = replace(comparison_config(options), sweep=options.sweep == "r", recommend=options.recommend)
    text = bundled_text() if options.text is None else read_text(options.text)
    loaded = load_model(options.model, trust_remote_code=options.trust_remote_code)
    to_device(options.device, loaded.model)
    text_name = "shipped" if options.text is None else options.text.name
    result = compare(loaded, text, config=config, model_name=Path(options.model).name, text_name=text_name)
    write_atomic(options.out, compare_page(result))
    written = [options.out]
    if options.plans is not None:
        write_plans(options.plans, result["recommendation"])
        written.append(options.plans)
    show_comparison(result, options, written=written)


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
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of the text to read (default: %(default)s)")
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
