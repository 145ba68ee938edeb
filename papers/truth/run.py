"""``python -m papers truth``: readings of attention against tasks whose truth is known."""

from __future__ import annotations

import argparse
from dataclasses import asdict, replace
from pathlib import Path

from attnlab.progress import note
from attnlab.provenance import check_writable
from papers.common.folders import Experiment, add_out
from papers.common.row_store import make_results, read_results, write_results
from papers.truth.config import CONFIGS, NAME, TASKS

__all__ = ["EXPERIMENTS"]

SUBJECTS = ("needle:smollm2", "copy:smollm2", "recall:0", "recall:1")


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--on", nargs="+", metavar="TASK:MODEL", default=list(SUBJECTS),
        help=f"tasks and their models: {'; '.join(f'{name}: {what}' for name, what in TASKS.items())} "
        "(default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--work", type=Path, required=True, help="a folder; a run that was ended goes on there")
    parser.add_argument("--text", type=Path, help="a text around the needles (default: the text that is shipped)")
    parser.add_argument("--config", choices=CONFIGS, default="full", help="smoke takes a minute")
    parser.add_argument("--cases", type=int, help="cases that the model answers right (default: 1000)")
    parser.add_argument(
        "--minutes", type=float, default=float("inf"),
        help="begin no chunk of cases after so many minutes for each model; the results say how many cases count",
    )  # fmt: skip
    parser.add_argument(
        "--as-trained", action="store_true",
        help="take a translator whose training was ended as it is; the results say after how many updates",
    )  # fmt: skip
    parser.add_argument("--batch", type=int, help="predictions read at once (default: 32 on a GPU, 4 elsewhere)")
    parser.add_argument("--device", help="(default: a GPU, if there is one)")
    add_out(parser, NAME)


def _run(options: argparse.Namespace) -> Path:
    from attnlab.devices import best_device
    from papers.truth.measure import Subject, measure
    from papers.truth.tables import KEYS, NOTES, derived, devices, tables_of

    check_writable(options.out)
    config = CONFIGS[options.config]
    if options.cases is not None:
        if options.cases < 4:
            raise ValueError(f"--cases must be at least 4, since half of them choose a head, got {options.cases}")
        config = replace(config, cases=options.cases)
    device = options.device or str(best_device())
    batch = options.batch or (4 if device == "cpu" else 32)
    text = None if options.text is None else options.text.read_text(encoding="utf-8")
    for words in options.on:
        note(words)
        subject = Subject.of(
            words, config, work=options.work, text=text, device=device, as_trained=options.as_trained
        )  # fmt: skip
        folder = options.work / f"{subject.task}-{subject.name}"
        measured = measure(subject, config, folder, batch=batch, minutes=options.minutes)
        tables = tables_of(subject, measured, config)
        before = read_results(options.out)
        settings = asdict(config) | {"text": "shipped" if options.text is None else options.text.name}
        result = make_results(NAME, None, tables, config=settings, seed=config.seed, keys=KEYS, notes=NOTES)
        merged = write_results(options.out, result, before=before)
        merged["device"] = devices(merged["tables"]["subjects"])
        write_results(options.out, {**merged, "tables": merged["tables"] | derived(merged["tables"])})
    return options.out


def _model_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--wheel", type=Path, required=True, help="from: pip download --no-deps rxnmapper==0.4.3")
    parser.add_argument("--out", type=Path, required=True, help="a folder for the model")


def _model(options: argparse.Namespace) -> None:
    from papers.truth.chemistry import write_model

    write_model(options.wheel, options.out)
    print(f"wrote {options.out}")


EXPERIMENTS: dict[str, Experiment] = {
    "truth-rxnmapper": Experiment(
        "Readings and truth: the model of rxnmapper out of its wheel, as safetensors.",
        _model_arguments,
        _model,
        "--wheel rxnmapper-0.4.3-py3-none-any.whl --out models/rxnmapper",
    ),
    "truth": Experiment(
        "Readings and truth: which reading of attention finds the tokens that a prediction came from?",
        _arguments,
        _run,
        "--on needle:smollm2 copy:smollm2 facts:models/stories15M chemistry:models/rxnmapper recall:0 recall:1 "
        "--work runs/truth",
        quick={"config": "smoke", "on": ["recall:0", "recall:1"]},
    ),
}
