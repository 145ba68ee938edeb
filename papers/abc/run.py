"""``python -m papers abc-*``: ABC's experiments; each writes its rows into a folder while it runs.

A folder can be filled on one machine and collected on another: ``--collect`` trains nothing, reads the folders that
``--work`` names, scores translations where there are any, and writes the results file.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from papers.abc import PAPER
from papers.common.folders import Experiment, add_figures, add_out, with_changes

__all__ = ["EXPERIMENTS", "prepare_device"]

# The share of translators' time for training; the rest is for translating.
TRAINING = 0.9
Run = TypeVar("Run")


def _shared(parser: argparse.ArgumentParser, name: str, seconds: float) -> None:
    parser.add_argument(
        "--work", type=Path, nargs="+", required=True, help="the folder of the run, or those to collect"
    )
    add_out(parser, name)
    parser.add_argument("--collect", action="store_true", help="train nothing: write the results of the folders")
    parser.add_argument(
        "--seconds", type=float, default=seconds, help="for training, and for translating (default: %(default)s)"
    )
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=JSON", help="settings other than the defaults")


def prepare_device() -> None:
    """Switches of a GPU, the same for all models that are compared."""
    # Under NVIDIA's MPS a process has few queues by default, and the streams of its models would wait for each other.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    import torch

    # Products of float32 use the tensor cores.
    torch.backends.cuda.matmul.allow_tf32 = True


def _started(options: argparse.Namespace, module: Any, config: Any, label: str) -> Any:
    """The part that a run writes into; settings and versions are noted beside it."""
    from papers.common.row_store import Part, begin_work

    prepare_device()
    work = options.work[0]
    begin_work(work, dataclasses.asdict(config))
    return Part(work / f"part-{label}.json", keys=module.KEYS)


def _collected(
    options: argparse.Namespace,
    module: Any,
    score: Callable[[list[Path]], dict[str, list[dict[str, Any]]]] | None = None,
) -> Path:
    from papers.common.row_store import collect

    # Scores may compare models of several folders.
    made = {} if score is None else {options.work[-1]: score(options.work)}
    collect(
        module.NAME, PAPER, options.work, options.out, keys=module.KEYS, notes=module.NOTES, made=made,
        derived=getattr(module, "derived", None), curves=getattr(module, "CURVES", None),
    )  # fmt: skip
    return options.out


def _lm_arguments(parser: argparse.ArgumentParser) -> None:
    _shared(parser, "abc-lm", 900)
    parser.add_argument("--corpus", type=Path, help="the folder that wiki-corpus wrote")
    parser.add_argument("--tables", nargs="+", choices=("table_2a", "table_2b"), default=["table_2a", "table_2b"])
    parser.add_argument("--steps", type=int, help="at most so many updates (default: what the time allows)")


def _lm(options: argparse.Namespace) -> Path | None:
    from papers.abc import lm

    if not options.collect:
        config = with_changes(lm.CONFIGS[options.config], options.set)
        part = _started(options, lm, config, "-".join([*options.tables, *(config.models or ())]))
        share = options.seconds / len(options.tables)
        for table in options.tables:
            lm.run_table(
                table, config, corpus=_needed(options, "corpus"), part=part, seconds=share, steps=options.steps
            )
    return _collected(options, lm)


def _mt_arguments(parser: argparse.ArgumentParser) -> None:
    _shared(parser, "abc-mt", 600)
    parser.add_argument("--data", type=Path, required=True, help="the folder in which multi30k and the others lie")
    parser.add_argument("--task", nargs="+", default=["multi30k-en-de"], help="(default: %(default)s)")
    parser.add_argument(
        "--variants", nargs="+", default=["3a+quarter+5+7"],
        help="what is trained at once: sets (3a, 5, 7, quarter, few) and models (BASE, ABC_MLP-8-8, ...), joined by +",
    )  # fmt: skip
    alone = "one model, with all its planned updates; such trainings are compared though they were run apart"
    parser.add_argument("--alone", action="store_true", help=alone)
    _seeds(parser)


def _seeds(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", type=int, nargs="+", default=[0], help="those of a model are trained as one")


def _mt(options: argparse.Namespace) -> Path | None:
    from papers.abc import mt

    config = with_changes(mt.CONFIGS[options.config], options.set)
    if not options.collect:
        runs = [(t, v) for t in options.task for v in options.variants]
        part = _started(options, mt, config, "-".join([*options.task, *options.variants, *map(str, options.seed)]))
        for (task, variants), seconds in _in_time(runs, options.seconds):
            mt.run_task(
                task, config, root=options.data, part=part, out=options.work[0], seconds=seconds, wanted=variants,
                seeds=options.seed, alone=options.alone,
            )  # fmt: skip
    return _scored(options, mt, lambda works: mt.score(works, options.data))


def _doc_arguments(parser: argparse.ArgumentParser) -> None:
    _shared(parser, "abc-doc-mt", 300)
    parser.add_argument("--data", type=Path, required=True, help="the folder in which multi30k, or tagalog, lies")
    _seeds(parser)
    parser.add_argument("--variants", nargs="+", metavar="MODEL", help="BASE, ABC_MLP-128-64, ... (default: all)")


def _doc(options: argparse.Namespace) -> Path | None:
    from papers.abc import doc_mt

    config = with_changes(doc_mt.CONFIGS[options.config], options.set)
    if not options.collect:
        part = _started(options, doc_mt, config, "-".join(map(str, options.seed)))
        doc_mt.run_documents(
            config, root=options.data, part=part, out=options.work[0], seconds=TRAINING * options.seconds,
            seeds=options.seed, wanted=options.variants or list(doc_mt.BY_KEY),
        )  # fmt: skip
    return _scored(options, doc_mt, lambda works: doc_mt.score_documents(works, options.data, config))


def _in_time(runs: Sequence[Run], seconds: float) -> Iterator[tuple[Run, float]]:
    """The runs that fit into the time, each with the seconds that it may train; the rest of them is for translating.

    A run is not begun if one before it took longer than what is left.
    """
    began, longest = time.monotonic(), 0.0
    for run in runs:
        started = time.monotonic()
        left = seconds - (started - began)
        if left < longest:
            print(f"{run}: no time is left for it")
            return
        yield run, TRAINING * left
        longest = max(longest, time.monotonic() - started)


def _scored(
    options: argparse.Namespace, module: Any, score: Callable[[list[Path]], dict[str, list[dict[str, Any]]]]
) -> Path | None:
    import importlib.util

    if importlib.util.find_spec("sacrebleu") is None and not options.collect:
        print("translations are written; run this again with --collect where sacrebleu is installed")
        return None
    return _collected(options, module, score)


def _mlm_arguments(parser: argparse.ArgumentParser) -> None:
    _shared(parser, "abc-mlm", 300)
    parser.add_argument("--corpus", type=Path, help="the folder that wiki-corpus wrote")
    parser.add_argument("--glue", type=Path, help="the folder of GLUE's tasks")
    parser.add_argument("--model", type=Path, help="a BERT masked LM (default: the shipped one)")
    parser.add_argument("--speed", action="store_true", help="only measure speed and memory")
    parser.add_argument("--batch", type=int, default=16, help="rows, for --speed (default: %(default)s)")
    parser.add_argument("--length", type=int, default=512, help="tokens of a row, for --speed (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=10, help="for --speed (default: %(default)s)")


def _mlm(options: argparse.Namespace) -> Path | None:
    from attnlab.adapters.load import SHIPPED
    from papers.abc import mlm

    if options.config == "paper" and options.model is None and not (options.collect or options.speed):
        raise ValueError("--config paper converts a BERT masked LM of RoBERTa-base's size: name its folder by --model")
    if not options.collect:
        config = with_changes(mlm.CONFIGS[options.config], options.set)
        part = _started(options, mlm, config, f"speed-{options.length}" if options.speed else "mlm")
        if options.speed:
            mlm.measure_speed(part, batch=options.batch, length=options.length, repeats=options.repeats)
        else:
            mlm.run_mlm(
                config, corpus=_needed(options, "corpus"), glue=_needed(options, "glue"),
                model=options.model or SHIPPED, part=part, seconds=options.seconds,
            )  # fmt: skip
    return _collected(options, mlm)


def _decoding_arguments(parser: argparse.ArgumentParser) -> None:
    _shared(parser, "abc-decoding", 0)


def _decoding(options: argparse.Namespace) -> Path | None:
    from papers.abc import decoding

    if not options.collect:
        config = with_changes(decoding.CONFIGS[options.config], options.set)
        decoding.run_decoding(config, part=_started(options, decoding, config, "decoding"))
    return _collected(options, decoding)


def _distill_arguments(parser: argparse.ArgumentParser) -> None:
    _shared(parser, "abc-distill", 40)
    parser.add_argument("--corpus", type=Path, help="the folder that wiki-corpus wrote: for a masked LM")
    parser.add_argument("--model", type=Path, help="a BERT masked LM, or with --sampled a causal LM (default: shipped)")
    parser.add_argument("--sampled", action="store_true", help="learn from texts that the model writes itself")
    parser.add_argument("--spec", default="abc-mlp:slots=64", help="(default: %(default)s)")
    parser.add_argument("--batch", type=int, default=64, help="rows of a batch (default: %(default)s)")
    parser.add_argument("--length", type=int, default=256, help="tokens of a row (default: %(default)s)")
    parser.add_argument("--rows", type=int, default=12288, help="texts to write, with --sampled (default: %(default)s)")
    parser.add_argument("--rates", action="store_true", help="only measure the speed of each stage")


def _distill(options: argparse.Namespace) -> Path | None:
    from attnlab.adapters import load_model
    from attnlab.adapters.load import SHIPPED
    from attnlab.devices import best_device
    from papers.abc import distillation

    if not options.collect:
        config = with_changes(distillation.AbcDistillConfig(seconds=options.seconds), options.set)
        name = "sampled" if options.sampled else "masked"
        part = _started(options, distillation, config, f"{name}-{'rates' if options.rates else config.seed}")
        folder = options.model or SHIPPED
        sizes = {"batch": options.batch, "length": options.length, "seed": config.seed}
        model = load_model(folder).model.float().to(best_device())
        if options.sampled:
            subject = distillation.sampled_case(model, options.spec, name=Path(folder).name, rows=options.rows, **sizes)
        else:
            subject = distillation.masked_case(model, options.spec, _needed(options, "corpus"), **sizes)
        run = distillation.measure_rates if options.rates else distillation.run_case
        run(subject, config, part=part)
    return _collected(options, distillation)


def _family_arguments(parser: argparse.ArgumentParser) -> None:
    add_out(parser, "abc-family")


def _family(options: argparse.Namespace) -> Path:
    from attnlab.provenance import check_writable
    from papers.abc.family import write_family

    check_writable(options.out)
    write_family(options.out)
    return options.out


def _figures(options: argparse.Namespace) -> None:
    from papers.abc.figures import PICTURES
    from papers.common.pictures import draw_results

    for path in draw_results(PICTURES, options.results, options.out):
        print(f"wrote {path.resolve()}")


def _needed(options: argparse.Namespace, name: str) -> Path:
    path = getattr(options, name)
    if path is None:
        raise ValueError(f"--{name} is needed, unless results are only collected (--collect)")
    return path


def _settings(module: str, configs: str = "CONFIGS") -> Callable[[argparse.Namespace], dict[str, Any]]:
    """The settings that --config and --set ask for, of one of the paper's modules."""

    def settings(options: argparse.Namespace) -> dict[str, Any]:
        import importlib

        known = getattr(importlib.import_module(f"papers.abc.{module}"), configs)
        return dataclasses.asdict(with_changes(known[options.config], options.set))

    return settings


# Few updates, and few held-out sentences of few words.
QUICK_TRANSLATOR = ["steps=10", "held_out=16", "longest=24", "beams=2", "tokens_held_out=1024"]
EXPERIMENTS: dict[str, Experiment] = {
    "abc-lm": Experiment(
        "ABC's Table 2: language models that differ in their attention.",
        _lm_arguments,
        _lm,
        "--corpus runs/wiki --work runs/abc-lm --set 'seeds=[0, 1, 2]'",
        paper="Table 9 with Nesterov's momentum and a rate of 1, and a pretrained T2R, for days",
        settings=_settings("lm_config"),
        quick={
            "seconds": 20.0,
            "steps": 4,
            "tables": ["table_2a"],
            "set": ["batch=2", "layers=1", 'models=["BASE", "ABC_MLP-32"]'],
        },
    ),
    "abc-mt": Experiment(
        "ABC's Tables 3a, 5 and 7: translation with bounded memories.",
        _mt_arguments,
        _mt,
        "--data data --work runs/abc-mt --seed 0 1 2",
        more={
            "one model and one seed": "--data data --variants ABC_MLP-32-32 --seed 3 --alone --work runs/abc-mt-alone",
            "on other corpora": "--data data --task tatoeba-es-en wmt10k-en-de --variants few --work runs/abc-mt-few",
            "a shorter run with five seeds": "--data data --variants 3a+7+ABC_MLP-64-8+ABC_MLP-64-64+ABC_MLP-8-8 "
            "--seed 40 41 42 43 44 --seconds 800 --work runs/abc-mt-shorter --out papers/results/abc-mt-shorter.json",
            "the longer run": "--data data --variants 3a+quarter+ABC_MLP-16-8+ABC_MLP-16-16+ABC_MLP-64-8+ABC_MLP-64-64 "
            "--seed 20 --set tokens=4096 lr=0.003 'schedule=\"linear\"' half=false 'widths=[20, 28, 40, 60]' "
            "streams=19 --work runs/abc-mt-longer --out papers/results/abc-mt-longer.json",
        },
        paper="Table 10, post-norm with ReLU, for days",
        settings=_settings("translators"),
        claims="claims_translation",
        quick={"seconds": 20.0, "variants": ["BASE"], "set": QUICK_TRANSLATOR},
    ),
    "abc-doc-mt": Experiment(
        "ABC's Table 3b: translation of documents.",
        _doc_arguments,
        _doc,
        "--data data --work runs/abc-doc-mt --seed 20",
        paper="Table 10, post-norm with ReLU, for days",
        settings=_settings("doc_mt"),
        claims="claims_documents",
        quick={
            "seconds": 20.0,
            "variants": ["BASE"],
            "set": [f"translation.{setting}" for setting in QUICK_TRANSLATOR],
        },
    ),
    "abc-mlm": Experiment(
        "ABC's Table 4: a masked LM converted, continued, fine-tuned.",
        _mlm_arguments,
        _mlm,
        "--corpus runs/wiki --glue data/glue --work runs/abc-mlm",
        more={
            "its speed and memory": "--speed --work runs/abc-mlm-speed",
            "at 4,096 tokens": "--speed --length 4096 --work runs/abc-mlm-speed",
        },
        paper="Tables 11 and 12, with a model of RoBERTa-base's size named by --model, for days",
        settings=_settings("mlm"),
        claims="claims_use",
        quick={
            "seconds": 20.0,
            "set": ["batch=2", 'tasks=["RTE"]', "seeds=[0]", "tune_limit=64", "eval_batches=2"],
        },
    ),
    "abc-decoding": Experiment(
        "ABC's Figures 1 and 2 and Table 6: what decoding costs.",
        _decoding_arguments,
        _decoding,
        "--work runs/abc-decoding",
        claims="claims_use",
        paper="the same, since ours has the paper's sizes",
        settings=_settings("decoding"),
        quick={"set": ["lengths=[16, 32, 64, 128]", "layers=1", "batch=2", "repeats=2", "together=2"]},
    ),
    "abc-distill": Experiment(
        "Conversion made affordable: distillation against continued training.",
        _distill_arguments,
        _distill,
        "--corpus runs/wiki --work runs/abc-distill",
        more={"a causal LM": "--sampled --model models/stories15M --work runs/abc-distill-causal"},
        quick={
            "seconds": 2.0,
            "batch": 4,
            "length": 64,
            "rows": 32,
            "set": ["points=1", "probe=1", 'methods=["continued", "distilled"]'],
        },
    ),
    "abc-figures": Experiment(
        "ABC's Figures 1 and 2, and the curves of distillation and of translators, as pictures from results at hand.",
        add_figures,
        _figures,
        "--out figures",
    ),
    "abc-family": Experiment(
        "The table of ABC's control strategies, from the code itself.", _family_arguments, _family
    ),
}
