"""``attnlab sample``: texts that a language model writes itself, for its conversion to learn from."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

from attnlab.commands._output import Answer
from attnlab.commands._shared import dtype_argument, model_argument, on_gpu, own_folder, token_count

__all__ = ["arguments", "run"]

TEMPERATURES = (0.7, 1.0)
# Why texts are left out.
REASONS = {"loops": "that repeat themselves", "short": "that end at once"}


def arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    model_argument(parser)
    parser.add_argument(
        "--begin",
        action="append",
        default=[],
        metavar="PATH",
        help="continue the beginnings of this text's paragraphs, a file or a folder of them; repeat for more (default: "
        "every text begins with the model's own first token)",
    )
    parser.add_argument(
        "--temperatures",
        type=float,
        nargs="+",
        default=list(TEMPERATURES),
        metavar="NUMBER",
        help=f"temperatures to sample at, in turn (default: {' '.join(map(str, TEMPERATURES))})",
    )
    for name, kind, metavar, default, explanation in (
        ("tokens", str, "N", "1M", "tokens to write, such as 500k or 10M (default: %(default)s)"),
        ("length", int, "N", None, "tokens of a text at most (default: 512, or what the model can take)"),
        ("begin-tokens", int, "N", 8, "tokens of a paragraph that a text begins with (default: %(default)s)"),
        ("batch", int, "N", None, "tokens of the texts written at a time (default: what suits the device)"),
        ("seed", int, "N", 0, "seed of the sampling (default: %(default)s)"),
        ("device", str, "DEVICE", "auto", "auto (a GPU if there is one), cpu or cuda (default: %(default)s)"),
    ):
        parser.add_argument(f"--{name}", type=kind, metavar=metavar, default=default, help=explanation)
    dtype_argument(parser)
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FOLDER",
        required=True,
        help="the folder to write texts.jsonl into; the same command goes on with what is there",
    )


def run(options: argparse.Namespace) -> Answer:
    """Write texts, or go on with what is there."""
    import torch

    from attnlab.adapters import load_model
    from attnlab.devices import best_device
    from attnlab.pretraining.own_text import OwnText, write_own_text
    from attnlab.progress import showing

    if not all(math.isfinite(one) for one in options.temperatures):
        raise ValueError(f"--temperatures must be numbers above 0, got {options.temperatures}")
    settings = OwnText(
        tokens=token_count("--tokens", options.tokens),
        temperatures=tuple(options.temperatures),
        length=options.length,
        begin=tuple(options.begin),
        begin_tokens=options.begin_tokens,
        batch=options.batch,
        seed=options.seed,
    )
    out, gpu = own_folder(options.out), on_gpu(options.device)
    loaded = load_model(options.model, dtype=getattr(torch, options.dtype))
    loaded.model.to(best_device() if gpu else "cpu")
    with showing("sampling"):
        state = write_own_text(loaded, out, settings, model=options.model)
    return Answer(state, _lines(state, options.model, out), [out])


def _lines(state: dict[str, Any], model: str, out: Path) -> list[str]:
    dropped = ", ".join(f"{count:,} {REASONS[reason]}" for reason, count in state["dropped"].items()) or "none"
    return [
        f"{state['texts']:,} texts of {state['tokens']:,} tokens; left out: {dropped}",
        f"to learn from them: attnlab convert {model} --budget 0.25 --text {out} --out FOLDER",
    ]
