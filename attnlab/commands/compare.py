"""``attnlab compare``: mechanisms in place of a model's own attention, judged by quality, error and cost."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from attnlab.commands._shared import comparison_arguments, comparison_config, show_comparison

__all__ = ["arguments", "run"]


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
    from attnlab.provenance import check_writable, write_atomic

    check_writable(options.out)
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
