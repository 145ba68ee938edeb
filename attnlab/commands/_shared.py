"""Shared by several commands: options, and what is checked before a model is loaded."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnlab.commands._output import is_standard_output

if TYPE_CHECKING:
    from attnlab.adapters import LoadedModel
    from attnlab.data import TextFile

__all__ = [
    "answers_argument",
    "answers_file",
    "check_mechanisms",
    "check_page",
    "device_argument",
    "dtype_argument",
    "loaded_with_text",
    "mechanism_argument",
    "model_argument",
    "on_gpu",
    "own_folder",
    "page_argument",
    "text_argument",
    "token_count",
    "trust_argument",
]

COUNT = re.compile(r"(\d+(?:\.\d+)?(?:e\d{1,2})?)\s*([kMG]?)")
SIZES = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9}


def model_argument(parser: argparse.ArgumentParser, **settings: Any) -> None:
    """The model that a command is about."""
    default = {"metavar": "MODEL", "help": "a model folder, a GGUF file, a hub name, smollm2, or shipped-lm"}
    parser.add_argument("model", **{**default, **settings})


def text_argument(parser: argparse.ArgumentParser) -> None:
    """The text that the model reads."""
    parser.add_argument(
        "--text", type=Path, metavar="FILE", help="a UTF-8 text file (default: the text shipped with attnlab)"
    )


def mechanism_argument(parser: Any, explanation: str = "a mechanism; repeat for more", **settings: Any) -> None:
    """Mechanisms by their specs."""
    settings = {"action": "append", **settings}
    parser.add_argument("-m", "--mechanism", metavar="MECHANISM", help=explanation, **settings)


def page_argument(parser: argparse.ArgumentParser, name: str, explanation: str = "the page") -> None:
    """The page that a command writes."""
    parser.add_argument(
        "-o", "--out", type=Path, metavar="FILE", default=Path(name), help=f"{explanation} (default: %(default)s)"
    )


def device_argument(parser: argparse.ArgumentParser) -> None:
    """Where a model runs."""
    parser.add_argument(
        "--device", metavar="DEVICE", default="cpu", help="where it runs, such as cuda (default: %(default)s)"
    )


def dtype_argument(parser: argparse.ArgumentParser) -> None:
    """The precision of a model."""
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        default="float32",
        help="precision of the model's weights (default: %(default)s)",
    )


def trust_argument(parser: argparse.ArgumentParser) -> None:
    """Whether code of a model's folder may run."""
    parser.add_argument("--trust-remote-code", action="store_true", help="let the model's own code run")


def answers_argument(parser: argparse.ArgumentParser) -> None:
    """The file in which a command keeps every answer."""
    parser.add_argument(
        "--answers",
        type=Path,
        metavar="FILE",
        help="the file that keeps every answer, so that the same command goes on where it was stopped (default: the "
        "name of --out with .answers.jsonl)",
    )


def answers_file(options: argparse.Namespace) -> Path:
    """The file of ``answers_argument``, which can be written."""
    from attnlab.provenance import check_writable

    if options.answers is None and is_standard_output(options.out):
        raise ValueError(f"with --out {options.out} name a file for the answers too: --answers FILE")
    answers: Path = options.answers or options.out.with_suffix(".answers.jsonl")
    check_writable(answers)
    return answers


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
    if json and is_standard_output(out):
        raise ValueError(f"{out} and --json would both be standard output; write the page to a file")


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


def on_gpu(device: str) -> bool:
    """Whether the model will run on a GPU."""
    from attnlab.devices import best_device

    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"--device must be auto, cpu or cuda, got {device!r}")
    found = best_device().type == "cuda"
    if device == "cuda" and not found:
        raise ValueError("--device cuda: this machine has no GPU that torch can use")
    return found and device != "cpu"


def token_count(option: str, text: str) -> int:
    """The number that 500k, 10M or 1e7 means."""
    match = COUNT.fullmatch(text.strip()) if len(text) < 20 else None
    if match is None:
        raise ValueError(f"{option} must be a number such as 500k or 10M, got {text[:30]!r}")
    return int(float(match[1]) * SIZES[match[2]])


def own_folder(path: Path) -> Path:
    """The folder; an empty name, such as of a variable that is not set, would be the current folder."""
    from attnlab.data.readers import check_unicode

    if str(path) in ("", "."):
        raise ValueError("--out names no folder of its own; name a new one")
    check_unicode(str(path), what="--out")
    return path
