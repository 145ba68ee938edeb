"""``attnlab train``: a masked or causal language model on the user's text."""

from __future__ import annotations

import argparse
from pathlib import Path

from attnlab.commands._shared import print_json

__all__ = ["MODEL_NAMES", "arguments", "run"]

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
    parser.add_argument("--compile", action="store_true", help="use torch.compile")
    parser.add_argument("--track", help="an Accelerate tracker, such as tensorboard")
    parser.add_argument("--out", type=Path, default=Path("runs/train"), help="the run's folder (default: %(default)s)")
    parser.add_argument("--resume", type=Path, metavar="DIR", help="go on with this run; its own settings are used")
    parser.add_argument("--json", action="store_true", help="print the outcome as JSON")


def run(options: argparse.Namespace) -> None:
    """Train, or go on with a run, and say where the model is."""
    from attnlab.pretraining import CorpusConfig, PretrainConfig, resume_language_model, train_language_model

    if options.resume is not None:
        outcome = resume_language_model(options.resume, track=options.track)
    else:
        if options.text is None:
            raise ValueError("name the text to train on (--text FILE), or a run to go on with (--resume DIR)")
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
        )
        outcome = train_language_model(corpus, config, run_dir=options.out, track=options.track)
    if options.json:
        print_json(
            {"run": str(outcome.run_dir), "step": outcome.step, "metrics": outcome.metrics, "timing": outcome.timing}
        )
        return
    print("  ".join(f"{name} {value:.4g}" for name, value in outcome.metrics.items()))
    print(f"the model is in {(outcome.run_dir / 'model').resolve()}; see the run: attnlab report {outcome.run_dir}")
