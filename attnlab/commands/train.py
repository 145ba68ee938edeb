"""``attnlab train``: a masked or causal language model on the user's text."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnlab.commands._output import Answer
from attnlab.commands._shared import check_mechanisms

if TYPE_CHECKING:
    from attnlab.guidance import Guidance
    from attnlab.training import Outcome

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


# The model of each task, where none is named.
MODEL_OF_TASK = {"mlm": "attnlab-mlm", "causal": "attnlab-lm"}
# What the settings of a new run are where no option says otherwise. A parser's default could not be told from an option
# that was given, and --resume refuses those.
DEFAULTS: dict[str, Any] = {
    "column": "text",
    "vocab": 8192,
    "attention": "softmax",
    "length": 128,
    "batch": 16,
    "steps": 1000,
    "lr": 1e-3,
    "warmup": 100,
    "seed": 0,
    "out": "runs/train",
}


def arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    new = parser.add_argument_group("a new run")
    for name, kind, metavar, explanation in (
        ("text", str, "FILE", "the corpus: plain text, jsonl, csv or tsv, also .gz, .xz or .zip"),
        ("column", str, "NAME", "the column of a jsonl, csv or tsv"),
        ("tokenizer", str, "FOLDER", "a folder with a tokeniser (default: one is trained on the text)"),
        ("vocab", int, "N", "size of the tokeniser's vocabulary, if it is trained"),
        ("model", str, "ARCHITECTURE", f"bert-LAYERSxWIDTH, llama-LAYERSxWIDTH, or one of {', '.join(MODEL_NAMES)}"),
        ("attention", str, "MECHANISM", "the mechanism that it attends by"),
        ("length", int, "N", "tokens in a row"),
        ("batch", int, "N", "rows in a batch"),
        ("steps", int, "N", "how many updates"),
        ("lr", float, "NUMBER", "the highest learning rate"),
        ("warmup", int, "N", "steps until the highest learning rate"),
        ("seed", int, "N", "seed of weights and batches"),
        ("out", str, "FOLDER", "the run's folder"),
    ):
        default = f" (default: {DEFAULTS[name]})" if name in DEFAULTS else ""
        new.add_argument(f"--{name}", type=kind, metavar=metavar, help=explanation + default)
    new.add_argument("--task", choices=("mlm", "causal"), help="what it learns (default: what the model is made for)")
    new.add_argument("--skip-malformed", action="store_true", default=None, help="leave out lines that cannot be read")
    new.add_argument(
        "--record",
        nargs="?",
        const="",
        metavar="TEXT",
        help="record a text's attention at every evaluation, for attnlab explore RUN (without TEXT: the first "
        "tokens of the held-out text)",
    )
    _guidance_arguments(new)
    new.add_argument("--compile", action="store_true", default=None, help="use torch.compile")
    parser.add_argument("--resume", metavar="RUN", help="go on with this run; its own settings are used")
    parser.add_argument(
        "--checkpoint-every",
        type=int,
        metavar="N",
        help="save every so many steps too: every 3 minutes, at every improvement and at the end a run is saved anyway",
    )
    parser.add_argument("--track", metavar="NAME", help="an Accelerate tracker, such as tensorboard")


def _guidance_arguments(parser: argparse._ArgumentGroup) -> None:
    parser.add_argument(
        "--guidance",
        type=float,
        nargs="?",
        const=0.5,
        metavar="SHARE",
        help="pull this share of each layer's heads to patterns, most strongly at first (without a number: 0.5)",
    )
    parser.add_argument(
        "--guidance-patterns",
        metavar="LIST",
        help="the patterns (default: next,prev,first,period,delim; for a causal model without next)",
    )
    parser.add_argument(
        "--guidance-alpha0",
        type=float,
        metavar="NUMBER",
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


def run(options: argparse.Namespace) -> Answer:
    """Train, or go on with a run."""
    from attnlab.training import Interrupted

    try:
        outcome = _start(options) if options.resume is None else _go_on(options)
    except Interrupted as stopped:
        # The words of the command line, in the one line that it prints.
        stopped.args = (
            f"interrupted at step {stopped.step}; a checkpoint is saved; go on with: "
            f"attnlab train --resume {shlex.quote(str(stopped.run_dir))}",
        )
        raise
    run_dir = outcome.run_dir
    lines = [
        "  ".join(f"{name} {value:.4g}" for name, value in outcome.metrics.items()),
        f"the model is in {(run_dir / 'model').resolve()}; see the run: attnlab report {shlex.quote(str(run_dir))}",
    ]
    result = {"run": str(run_dir), "step": outcome.step, "metrics": outcome.metrics, "timing": outcome.timing}
    return Answer(result, lines, [run_dir])


def _go_on(options: argparse.Namespace) -> Outcome:
    """Resume; an option of a new run would be ignored, so that it is refused."""
    from attnlab.pretraining import resume_language_model

    kept = ("command", "resume", "checkpoint_every", "track", "json", "debug")
    refused = [name for name, value in vars(options).items() if name not in kept and value is not None]
    if refused:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in refused)
        raise ValueError(
            f"--resume goes on with the settings of {options.resume}: leave out {names}, or start a new run"
        )
    return resume_language_model(
        _folder("--resume", options.resume), track=options.track, checkpoint_every=options.checkpoint_every
    )


def _start(options: argparse.Namespace) -> Outcome:
    """Train from the beginning."""
    from attnlab.pretraining import CorpusConfig, PretrainConfig, task_of, train_language_model

    for name, value in DEFAULTS.items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    if not options.text:
        raise ValueError("name the text to train on (--text FILE), or a run to go on with (--resume DIR)")
    if options.model is None:
        options.model = MODEL_OF_TASK[options.task or "mlm"]
    if options.task is None:
        options.task = task_of(options.model)
    corpus = CorpusConfig(
        text=options.text,
        tokenizer=options.tokenizer,
        vocab=options.vocab,
        column=options.column,
        skip_malformed=bool(options.skip_malformed),
    )
    check_mechanisms([options.attention])
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
        compile=bool(options.compile),
        guidance=_guidance(options),
        checkpoint_every=options.checkpoint_every,
        record=options.record,
    )
    return train_language_model(corpus, config, run_dir=_folder("--out", options.out), track=options.track)


def _folder(option: str, name: str) -> Path:
    """The folder of that name; an empty name, such as of a variable that is not set, would be the current folder."""
    if not name.strip():
        raise ValueError(f"{option} names no folder: it is empty")
    return Path(name)
