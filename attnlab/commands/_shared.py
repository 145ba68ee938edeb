"""Shared by several commands: options, JSON on the terminal, and what is checked before a model is loaded."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from attnlab.adapters import LoadedModel
    from attnlab.data import TextFile

__all__ = [
    "answer_arguments",
    "check_mechanisms",
    "check_page",
    "device_arguments",
    "loaded_with_text",
    "notices",
    "print_json",
]


def answer_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of commands that keep every answer in a file."""
    parser.add_argument(
        "--answers",
        type=Path,
        help="the file that keeps every answer, so that the same command goes on where it was stopped (default: the "
        "name of --out with .answers.jsonl)",
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON instead of a table")


def device_arguments(parser: argparse.ArgumentParser) -> None:
    """--device and --dtype: where the model runs, and in which precision."""
    parser.add_argument("--device", default="cpu", help="where the model runs, such as cuda (default: %(default)s)")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), default="float32", help="of the model's weights"
    )


def loaded_with_text(options: argparse.Namespace) -> tuple[LoadedModel, str | TextFile, dict[str, str]]:
    """The model and the text that the options name, the shipped one by default, and how a result calls them."""
    from attnlab.adapters import load_model
    from attnlab.data import TextFile, bundled_text
    from attnlab.devices import to_device

    text = bundled_text() if options.text is None else TextFile(options.text)
    if isinstance(text, TextFile):
        # What is wrong with the file is said before a large model is loaded.
        text.beginning(1)
    loaded = load_model(options.model, trust_remote_code=options.trust_remote_code)
    to_device(options.device, loaded.model)
    text_name = "shipped" if options.text is None else options.text.name
    return loaded, text, {"model_name": Path(options.model).name, "text_name": text_name}


def check_page(out: Path, *, json: bool) -> None:
    """Raise now if the page cannot be written, or would be mixed with the JSON on standard output."""
    from attnlab.provenance import check_writable

    check_writable(out)
    if json and notices(out) is sys.stderr:
        raise ValueError(f"{out} and --json would both be standard output; write the page to a file")


def notices(out: Path) -> TextIO:
    """Where a command says what it did: standard output, unless the page itself goes there."""
    return sys.stderr if str(out) in ("/dev/stdout", "/dev/fd/1", "/proc/self/fd/1") else sys.stdout


# The laws that take well under a second, and without which no number of a mechanism means much.
QUICK_LAWS = ("output_is_weights_times_values", "hidden_keys_get_no_weight")


def check_mechanisms(specs: Sequence[str]) -> None:
    """Raise the error of a misspelt mechanism now, before a large model is loaded.

    One from a user's own file is tried on small calls, and a warning says if it looks at keys that a query may not see.
    """
    from attnlab.registry import FILE_SPEC, mechanism

    for spec in specs:
        mech = mechanism(spec)
        if FILE_SPEC.fullmatch(spec):
            from attnlab.conformance.check import check

            for broken in check(mech, laws=QUICK_LAWS).failed:
                print(f"attnlab: warning: {spec} breaks the law {broken.law}: {broken.reason}", file=sys.stderr)


def print_json(result: Any) -> None:
    """A result as ``--json`` prints it."""
    print(json.dumps(result, indent=1, ensure_ascii=False))
