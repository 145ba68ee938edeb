"""What a conversion learns from: the same student from several texts, and how near it comes to its teacher on others.

    attnlab sample smollm2 --begin books/ --tokens 300k --out own
    python benchmarks/conversion_texts.py runs/texts --model smollm2 --text encyclopedia=wiki.txt --text own=own \\
        --measure encyclopedia=wikitext.txt --measure book=moby-dick.txt

Every arm is the command's own conversion: the same mechanism, tokens, rate and seed, another text. A row of ``texts``
is an arm on a text to measure: KL from the teacher's predictions and loss above the teacher's, in nats a token, over
windows that no arm has read; ``means`` are over seeds, with 95 % intervals. The arm ``none`` has not learned: its
scores begin from the first text, as all begin from theirs. An arm may name several texts, joined by "+". The same
command goes on where it was interrupted. ``--tiny`` is a dry run on a small random model and a text of the package's.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from storing import make_results, read_results, write_results
from tiny_models import tiny_language_model, tiny_text

from attnlab.adapters import LoadedModel, convert, load_model
from attnlab.adapters.distillation import Distillation, HeldOut, Predictions
from attnlab.adapters.initialise import initialise_control
from attnlab.data.beginnings import TextFile, first_tokens, tokens_around
from attnlab.data.text_folders import text_files
from attnlab.devices import best_device
from attnlab.evaluation.intervals import mean_interval
from attnlab.pretraining.conversion import ConversionConfig, convert_model
from attnlab.provenance import write_json

TABLE, MEANS, LEFT, NONE = "texts", "means", "left", "none"
KEYS = ("model", "text", "measured", "seed")
# Characters that the scores of the arm without training begin from.
SAMPLE = 400_000


def settings_of(args: argparse.Namespace, seed: int = 0) -> Distillation:
    return Distillation(
        logits_lr=args.lr, batch=args.batch // args.length, length=args.length, repeats=0.1, seed=seed,
        evaluations=4, precision=args.precision, compile=best_device().type == "cuda",
    )  # fmt: skip


def learned(args: argparse.Namespace, texts: tuple[str, ...], folder: Path, seed: int) -> dict[str, Any]:
    """One student; what its folder says."""
    config = ConversionConfig(
        model=args.model, text=texts, mechanism=args.mechanism, tokens=args.tokens, settings=settings_of(args, seed)
    )
    return convert_model(config, run_dir=folder, tokens=args.work / "tokens")


def not_learned(args: argparse.Namespace, teacher: LoadedModel, text: str, seed: int) -> torch.nn.Module:
    """The student before its first step."""
    student = convert(teacher.model, args.mechanism, copy=True)
    text = TextFile(text_files([text])[0]).beginning(SAMPLE)[0][:SAMPLE]
    initialise_control(student, [text], tokenizer=teacher.tokenizer, length=args.length, seed=seed)
    return student


def windows_of(teacher: LoadedModel, file: str, args: argparse.Namespace) -> list[dict[str, torch.Tensor]]:
    """Windows from the file's start on, each with the tokens that begin a text."""
    before = tokens_around(teacher.tokenizer)[0]
    width, encode = args.length - len(before), partial(teacher.tokenizer, add_special_tokens=False)
    tokens = np.array(first_tokens(TextFile(file), args.windows * width, lambda text: encode(text)["input_ids"]))
    rows = tokens[: len(tokens) // width * width].reshape(-1, width)
    if not len(rows):
        raise SystemExit(f"{file} has no window of {width} tokens")
    return [{"input_ids": torch.tensor([[*before, *row]])} for row in rows.tolist()]


def rows(args: argparse.Namespace, texts: dict[str, str], measured: dict[str, str]) -> Iterator[dict[str, Any]]:
    teacher = load_model(args.model)
    teacher.model.to(best_device())
    windows = {name: windows_of(teacher, file, args) for name, file in measured.items()}
    for seed in args.seeds:
        for arm in (NONE, *args.arms):
            result: dict[str, Any] = {}
            if arm == NONE:
                student = not_learned(args, teacher, next(iter(texts.values())), seed)
            else:
                folder = args.work / f"{arm.replace('+', '-and-')}-{seed}"
                result = learned(args, tuple(texts[name] for name in arm.split("+")), folder, seed)
                student = load_model(folder / "model").model
            student.to(best_device()).eval()
            for name, batches in windows.items():
                losses = HeldOut(Predictions(teacher.model, student), batches, settings_of(args)).losses()
                yield {
                    "model": Path(args.model).name, "text": arm, "measured": name, "seed": seed,
                    "kl": losses["held-out/kl"], "loss_above": losses["held-out/above teacher"],
                    "loss": losses["held-out/loss"], "windows": len(batches), "tokens": result.get("tokens", 0),
                    "saved_step": result.get("saved", {}).get("step", 0),
                }  # fmt: skip


def means(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of several seeds as one, and how much of the distance before the first step is left."""
    places = dict.fromkeys(tuple(row[key] for key in KEYS[:-1]) for row in rows)
    made = []
    for model, text, measured in places:
        own = [r for r in rows if (r["model"], r["text"], r["measured"]) == (model, text, measured)]
        start = {r["seed"]: r["kl"] for r in rows if (r["model"], r["text"], r["measured"]) == (model, NONE, measured)}
        left = mean_interval([r["kl"] / start[r["seed"]] for r in own if r["seed"] in start])
        made.append(
            {
                "model": model, "text": text, "measured": measured, "seeds": len(own),
                "kl": fmean(r["kl"] for r in own), "loss_above": fmean(r["loss_above"] for r in own),
                "kl_left": left.value, "kl_left_low": left.low, "kl_left_high": left.high,
            }
        )  # fmt: skip
    return made


def left(means: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each arm: what is left of the distance on each text, with its interval."""
    arms: dict[tuple[str, str], dict[str, Any]] = {}
    for row in means:
        low, high = row["kl_left_low"], row["kl_left_high"]
        interval = "" if low is None else f" [{low:.2f}, {high:.2f}]"
        arm = arms.setdefault((row["model"], row["text"]), {"learned_from": row["text"], "seeds": row["seeds"]})
        arm[row["measured"]] = f"{row['kl_left']:.2f}{interval}"
    return list(arms.values())


def named(pair: str) -> tuple[str, str]:
    name, given, path = pair.partition("=")
    if not (name and given and path) or "+" in name:
        raise argparse.ArgumentTypeError(f"{pair!r} is not NAME=PATH")
    return name, path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path, help="the folder of the runs")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--text", type=named, action="append", default=[], metavar="NAME=PATH")
    parser.add_argument("--measure", type=named, action="append", default=[], metavar="NAME=FILE")
    parser.add_argument("--arms", nargs="+", help="texts, or several joined by '+' (default: each text)")
    parser.add_argument("--mechanism", default="abc-select:slots=56,window=64,sinks=4")
    parser.add_argument("--lr", type=float, default=3e-5)
    parser.add_argument("--precision", choices=("auto", "bf16", "no"), default="auto")
    for name, default in (("tokens", 200_000), ("batch", 4096), ("length", 1024), ("windows", 16)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--tiny", action="store_true", help="a dry run")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "conversion_texts.json")
    args = parser.parse_args()
    if args.tiny:
        args.model = str(tiny_language_model(args.work / "tiny-model"))
        text = str(tiny_text(args.work / "text.txt"))
        args.text = args.text or [("one", text), ("two", text)]
        args.measure, args.mechanism = [("book", text)], "abc-select:slots=4,window=4,sinks=1,block=1"
        args.tokens, args.batch, args.length, args.windows = 512, 64, 64, 2
    texts, measured = dict(args.text), dict(args.measure)
    args.arms = args.arms or list(texts)
    kept = ("mechanism", "lr", "precision", "tokens", "batch", "length", "seeds")
    for row in rows(args, texts, measured):
        print(row, flush=True)
        result = make_results(
            "conversion_texts", "ABC", {TABLE: [row]}, config={name: getattr(args, name) for name in kept},
            keys={TABLE: list(KEYS)},
        )  # fmt: skip
        merged = write_results(args.out, result, before=read_results(args.out))
        summed = means(merged["tables"][TABLE])
        write_json(args.out, {**merged, "tables": {**merged["tables"], MEANS: summed, LEFT: left(summed)}})


if __name__ == "__main__":
    main()
