"""``attnlab train``: a masked or causal language model on the user's text."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from attnlab.commands._shared import check_mechanisms, print_json

if TYPE_CHECKING:
    from attnlab.guidance import Guidance

__all__ = ["MODEL_NAMES", "arguments", "run"]

# The tokens of a row for which the paper of guidance gives alpha0.
PAPER_LENGTH = 512

# The names in attnlab.models.CONFIGS, repeated so that --help need not import torch.
MODEL_NAMES = (
    "roberta-8",
    "roberta-12",
    "roberta-16",
    "roberta-base",
    "value-aware-lm",
    "abc-lm-16",
    "abc-lm-32",
    "translation-wmt14",
    "translation-iwslt14",
    "attnlab-mlm",
    "attnlab-lm",
    "attnlab-translation",
)


def arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("--text", help="the corpus: plain text, jsonl, csv or tsv, also .gz, .xz or .zip")
    parser.add_argument("--column", default="text", help="the column of a jsonl, csv or tsv (default: %(default)s)")
    parser.add_argument("--tokenizer", help="a folder with a tokeniser (default: one is trained on the text)")
    parser.add_argument("--vocab", type=int, default=8192, help="its size, if it is trained (default: %(default)s)")
    parser.add_argument(
        "--model",
        default="attnlab-mlm",
        help=f"bert-LAYERSxWIDTH, llama-LAYERSxWIDTH, or one of {', '.join(MODEL_NAMES)}",
    )
    parser.add_argument(
        "--task", choices=("mlm", "causal"), default="mlm", help="what it learns (default: %(default)s)"
    )
    parser.add_argument("--attention", default="softmax", help="a mechanism's spec (default: %(default)s)")
    parser.add_argument("--length", type=int, default=128, help="tokens in a row (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=16, help="rows in a batch (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=1000, help="updates (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=1e-3, help="the highest learning rate (default: %(default)s)")
    parser.add_argument("--warmup", type=int, default=100, help="steps until it is reached (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches (default: %(default)s)")
    _guidance_arguments(parser)
    parser.add_argument("--compile", action="store_true", help="use torch.compile")
    parser.add_argument("--track", help="an Accelerate tracker, such as tensorboard")
    parser.add_argument("--out", type=Path, default=Path("runs/train"), help="the run's folder (default: %(default)s)")
    parser.add_argument("--resume", type=Path, metavar="DIR", help="go on with this run; its own settings are used")
    parser.add_argument("--json", action="store_true", help="print the outcome as JSON")


def _guidance_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--guidance",
        type=float,
        nargs="?",
        const=0.5,
        metavar="FRACTION",
        help="pull this share of each layer's heads to patterns, most strongly at first (without a number: 0.5)",
    )
    parser.add_argument(
        "--guidance-patterns",
        metavar="NAMES",
        help="the patterns (default: next,prev,first,period,delim; for --task causal without next)",
    )
    parser.add_argument(
        "--guidance-alpha0",
        type=float,
        metavar="WEIGHT",
        help="the weight of its loss at first, as the paper counts it for rows of 512 tokens (default: 10)",
    )
    parser.add_argument(
        "--guidance-hold",
        type=float,
        metavar="SHARE",
        help="the share of the steps with that weight; then it falls to 0 at the last (default: 0.3)",
    )


def _guidance(options: argparse.Namespace) -> Guidance | None:
    """The guidance that the options ask for; an option of guidance without --guidance is refused."""
    details = {name: getattr(options, f"guidance_{name}") for name in ("patterns", "alpha0", "hold")}
    chosen = {name: value for name, value in details.items() if value is not None}
    if options.guidance is None:
        if chosen:
            raise ValueError(f"--guidance-{next(iter(chosen))} says how to guide: give --guidance too")
        return None
    from attnlab.guidance import Guidance

    patterns = Guidance.patterns if options.task == "mlm" else tuple(n for n in Guidance.patterns if n != "next")
    if "patterns" in chosen:
        patterns = tuple(name.strip() for name in chosen["patterns"].split(","))
    # A sum over keys and a mean over rows has the pull of the paper's mean over cells, at any length.
    alpha0 = chosen.get("alpha0", Guidance.alpha0) / PAPER_LENGTH
    hold = chosen.get("hold", Guidance.hold)
    return Guidance(fraction=options.guidance, patterns=patterns, alpha0=alpha0, hold=hold, reduction="row")


def run(options: argparse.Namespace) -> None:
    """Train, or go on with a run, and say where the model is."""
    from attnlab.pretraining import CorpusConfig, PretrainConfig, resume_language_model, train_language_model

    if options.resume is not None:
        outcome = resume_language_model(options.resume, track=options.track)
    else:
        if options.text is None:
            raise ValueError("name the text to train on (--text FILE), or a run to go on with (--resume DIR)")
        check_mechanisms([options.attention])
        corpus = CorpusConfig(
            text=options.text, tokenizer=options.tokenizer, vocab=options.vocab, column=options.column
        )
        config = PretrainConfig(
            model=options.model,
            task=options.task,
            attention=options.attention,
            lengths=(options.length,),
            tokens=options.length * options.batch,
            steps=options.steps,
            lr=options.lr,
            warmup=options.warmup,
            seed=options.seed,
            compile=options.compile,
            guidance=_guidance(options),
        )
        outcome = train_language_model(corpus, config, run_dir=options.out, track=options.track)
    if options.json:
        print_json(
            {"run": str(outcome.run_dir), "step": outcome.step, "metrics": outcome.metrics, "timing": outcome.timing}
        )
        return
    print("  ".join(f"{name} {value:.4g}" for name, value in outcome.metrics.items()))
    print(f"the model is in {(outcome.run_dir / 'model').resolve()}; see the run: attnlab report {outcome.run_dir}")
