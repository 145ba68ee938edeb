"""``python -m papers ktiw-*``: each table and figure of KTIW as a command.

The commands that compare trainings share them: ``--work`` holds a folder for each data set, finished runs are not
trained again, and ``--tables-only`` trains nothing at all.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from papers.common.folders import Experiment, add_figures, add_out

__all__ = ["EXPERIMENTS", "SAME", "Arguments", "WriteResults", "add_page", "results_of"]

Arguments = Callable[[argparse.ArgumentParser], None]
# Trains or reads, writes the results file that --out names, and returns its content.
WriteResults = Callable[[argparse.Namespace], dict[str, Any]]


def results_of(write: WriteResults) -> Callable[[argparse.Namespace], Path]:
    """``write`` as an experiment's run: --out is checked before the work, and --page drawn after it."""

    def run(options: argparse.Namespace) -> Path:
        from attnlab.provenance import check_writable

        check_writable(options.out)
        result = write(options)
        if getattr(options, "page", None) is not None:
            from papers.ktiw.figures import write_page

            write_page(json.loads(json.dumps(result)), options.page)
            print(f"wrote {options.page.resolve()}")
        return options.out

    return run


def add_page(parser: argparse.ArgumentParser) -> None:
    """The option that names a page for the figures."""
    parser.add_argument("--page", type=Path, help="also draw the figures on this page")


def _add_data(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", type=Path, help="a folder with a folder for each data set, as downloaded")
    parser.add_argument("--prepared", type=Path, help="the files that ktiw-data wrote; instead of --data")
    parser.add_argument("--only", help="data sets, such as imdb,multi30k (default: all in the folder)")
    parser.add_argument("--examples", type=int, help="at most so many of either split (default: all)")


def _data_arguments(name: str) -> Arguments:
    def arguments(parser: argparse.ArgumentParser) -> None:
        _add_data(parser)
        add_out(parser, name)

    return arguments


def _read_corpora(options: argparse.Namespace, names: Sequence[str] | None = None) -> list[Any]:
    """The data sets that --only names, or ``names``, or all; without --only those that the folder holds."""
    from attnlab.progress import each
    from papers.ktiw.corpora import READERS, load_corpus, prepare, some_examples

    if (options.data is None) == (options.prepared is None):
        raise ValueError("name the data: --data FOLDER as downloaded, or --prepared FOLDER as ktiw-data wrote it")
    wanted = options.only.split(",") if options.only else list(names or READERS)
    unknown = [name for name in wanted if name not in READERS]
    if unknown:
        raise ValueError(f"no data set named {unknown[0]!r}; there are {', '.join(READERS)}")
    if options.prepared is not None:
        files = {name: options.prepared / f"{name}.npz.xz" for name in wanted}
        present = _present(files, options)
        return [some_examples(load_corpus(files[name]), options.examples) for name in each(present)]
    folders = {name: options.data / name for name in wanted}
    present = _present(folders, options)
    return [some_examples(prepare(name, options.data), options.examples) for name in each(present)]


def _present(paths: Mapping[str, Path], options: argparse.Namespace) -> list[str]:
    """The data sets that exist; with --only all of them, so that reading one that does not exist is an error."""
    present = [name for name, path in paths.items() if options.only or path.exists()]
    if not present:
        raise ValueError(f"{options.prepared or options.data} holds none of {', '.join(paths)}")
    return present


def _read_translation(options: argparse.Namespace) -> Any:
    """The one translation that --only names; Multi30k by default."""
    [corpus] = [corpus for corpus in _read_corpora(options, ("multi30k",)) if corpus.kind == "translation"]
    return corpus


def _prepare_arguments(parser: argparse.ArgumentParser) -> None:
    _add_data(parser)
    parser.add_argument("--into", type=Path, required=True, help="a folder for the tokenised data sets")
    add_out(parser, "ktiw-data")


def _prepare(options: argparse.Namespace) -> dict[str, Any]:
    from papers.ktiw.assemble import write_statistics
    from papers.ktiw.corpora import save_corpus

    options.into.mkdir(parents=True, exist_ok=True)
    corpora = _read_corpora(options)
    for corpus in corpora:
        save_corpus(corpus, options.into / f"{corpus.name}.npz.xz")
    return write_statistics(corpora, options.out)


def _study_arguments(name: str) -> Arguments:
    def arguments(parser: argparse.ArgumentParser) -> None:
        _add_data(parser)
        parser.add_argument("--work", type=Path, default=Path("runs/ktiw"), help="the runs (default: %(default)s)")
        add_out(parser, name)
        parser.add_argument("--tables-only", action="store_true", help="train nothing; tables of the finished runs")
        parser.add_argument("--seed", type=int, default=0, help="of all runs of a data set (default: %(default)s)")
        parser.add_argument("--steps", type=int, help="updates of each run, instead of the paper's")
        parser.add_argument("--batch", type=int, help="examples in a batch, instead of the paper's")
        parser.add_argument("--stacked", action="store_true", help="train a data set's runs at once, best on a GPU")
        parser.add_argument("--glove", type=Path, help="word vectors that classifiers start from: glove.6B.300d.txt")
        add_page(parser)

    return arguments


def _study(name: str, runs: Sequence[str]) -> WriteResults:
    def write(options: argparse.Namespace) -> dict[str, Any]:
        from papers.ktiw.assemble import write_study_result
        from papers.ktiw.comparison import run_chosen
        from papers.ktiw.tables import seed_folder

        if not options.tables_only:
            run_chosen(
                _read_corpora(options),
                seed_folder(options.work, options.seed),
                seed=options.seed,
                runs=tuple(runs),
                steps=options.steps,
                batch=options.batch,
                stacked=options.stacked,
                glove=options.glove,
            )
        return write_study_result(name, options.work, options.out, prepared=options.prepared, data=options.data)

    return write


def _study_settings(options: argparse.Namespace) -> dict[str, Any]:
    """The settings of classifications and translations; the updates of a translation come with its text."""
    from papers.ktiw.config import CLASSIFICATION, EPOCHS, TRANSLATION

    changes = {name: value for name in ("steps", "batch") if (value := getattr(options, name)) is not None}
    translation = asdict(replace(TRANSLATION, **changes))
    if options.steps is None:
        translation |= {"steps": None, "epochs": EPOCHS}
    return {"classification": asdict(replace(CLASSIFICATION, **changes)), "translation": translation}


def _diagnosis(options: argparse.Namespace) -> dict[str, Any]:
    from papers.ktiw.diagnosis import write_diagnosis

    named = options.data is not None or options.prepared is not None
    pairs = {} if options.examples is None else {"pairs": options.examples}
    return write_diagnosis(_read_corpora(options) if named else [], options.out, **pairs)


def _rates(options: argparse.Namespace) -> dict[str, Any]:
    from papers.ktiw.rates import write_proxy_rates

    return write_proxy_rates(_read_corpora(options), options.out)


def _alignment_arguments(parser: argparse.ArgumentParser) -> None:
    _add_data(parser)
    parser.add_argument("--work", type=Path, default=Path("runs/ktiw"), help="the runs (default: %(default)s)")
    add_out(parser, "ktiw-alignment")
    add_page(parser)


def _alignment(options: argparse.Namespace) -> dict[str, Any]:
    from papers.ktiw.alignment import write_alignment

    corpus = _read_translation(options)
    return write_alignment(corpus, options.work / corpus.name, options.out)


def _figures(options: argparse.Namespace) -> None:
    from papers.ktiw.figures import write_pictures

    options.out.mkdir(parents=True, exist_ok=True)
    for path in write_pictures(options.results, options.out):
        print(f"wrote {path.resolve()}")


def _heads_arguments(parser: argparse.ArgumentParser) -> None:
    _add_data(parser)
    parser.add_argument("--family", choices=("attnlab", "bart"), default="attnlab", help="(default: %(default)s)")
    parser.add_argument("--work", type=Path, default=Path("runs/ktiw-transformers"), help="(default: %(default)s)")
    add_out(parser, "ktiw-transformers")
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--tables-only", action="store_true", help="train nothing; tables of the finished runs")
    add_page(parser)


def _heads(options: argparse.Namespace) -> dict[str, Any]:
    from papers.ktiw.assemble import write_heads_result

    if not options.tables_only:
        from papers.ktiw.config import HeadsConfig
        from papers.ktiw.transformers import run_heads

        config = HeadsConfig(family=options.family, steps=options.steps)
        config = replace(config, sentences=min(config.sentences, options.examples or config.sentences))
        run_heads(_read_translation(options), options.work, config=config)
    return write_heads_result(options.work, options.out)


STANDARD = ("reference", "second", "uniform")
# KTIW's models are small: its sizes, optimiser and updates are ours, too.
SAME: dict[str, Any] = {"paper": "the same, since ours has the paper's sizes and updates"}
STUDY: dict[str, Any] = {**SAME, "settings": _study_settings}
# The smallest translation and the smallest classification that are downloaded whole.
QUICK_TRANSLATION = {"only": "multi30k", "examples": 32}
QUICK_CLASSIFICATION = {"only": "20newsgroups", "examples": 32}
QUICK_STUDY = {**QUICK_TRANSLATION, "steps": 5}
QUICK_CLASSIFIERS = {**QUICK_CLASSIFICATION, "steps": 5}
EXPERIMENTS: dict[str, Experiment] = {
    "ktiw-data": Experiment(
        "KTIW: tokenise its data sets, and Table 9's statistics beside ours.",
        _prepare_arguments,
        results_of(_prepare),
        "--data data --into runs/ktiw-data",
        quick={"only": "20newsgroups,multi30k"},
    ),
    "ktiw-table2": Experiment(
        "KTIW: Tables 2, 5 and 6, agreement of attention with lexical probes, and the curve of A.7.",
        _study_arguments("ktiw-table2"),
        results_of(_study("ktiw-table2", STANDARD)),
        "--prepared runs/ktiw-data --work runs/ktiw",
        **STUDY,
        quick=QUICK_STUDY,
    ),
    "ktiw-tau": Experiment(
        "KTIW: Tables 3 and 4, the same by Kendall's tau.",
        _study_arguments("ktiw-tau"),
        results_of(_study("ktiw-tau", STANDARD)),
        "--prepared runs/ktiw-data --work runs/ktiw",
        **STUDY,
        quick=QUICK_STUDY,
    ),
    "ktiw-train": Experiment(
        "KTIW: Tables 7 and 8, the same on the training set.",
        _study_arguments("ktiw-train"),
        results_of(_study("ktiw-train", STANDARD)),
        "--prepared runs/ktiw-data --work runs/ktiw",
        **STUDY,
        quick=QUICK_STUDY,
    ),
    "ktiw-frozen": Experiment(
        "KTIW: Table 10, attention trained while everything else is frozen.",
        _study_arguments("ktiw-frozen"),
        results_of(_study("ktiw-frozen", ("reference", "uniform", "frozen"))),
        "--prepared runs/ktiw-data --work runs/ktiw",
        **STUDY,
        quick=QUICK_CLASSIFIERS,
    ),
    "ktiw-logreg": Experiment(
        "KTIW: Table 11, the proxy against logistic regression.",
        _study_arguments("ktiw-logreg"),
        results_of(_study("ktiw-logreg", ("reference", "uniform"))),
        "--prepared runs/ktiw-data --work runs/ktiw",
        **STUDY,
        quick=QUICK_CLASSIFIERS,
    ),
    "ktiw-optimal": Experiment(
        "KTIW: appendix A.1, optimal attention of the model with a linear output layer.",
        _study_arguments("ktiw-optimal"),
        results_of(_study("ktiw-optimal", ("reference", "linear"))),
        "--prepared runs/ktiw-data --only multi30k --work runs/ktiw",
        **STUDY,
        quick={**QUICK_STUDY, "examples": 4},
    ),
    "ktiw-diagnosis": Experiment(
        "Ours: is word translation learnable from co-occurrence? The toy tasks' and the data sets' count tables.",
        _data_arguments("ktiw-diagnosis"),
        results_of(_diagnosis),
        "--prepared runs/ktiw-data",
        quick={**QUICK_TRANSLATION, "examples": 1000},
    ),
    "ktiw-proxy-rates": Experiment(
        "Ours: the proxy against logistic regression, at the paper's rate and at a higher one.",
        _data_arguments("ktiw-proxy-rates"),
        results_of(_rates),
        "--prepared runs/ktiw-data",
        quick=QUICK_CLASSIFICATION,
    ),
    "ktiw-alignment": Experiment(
        "Ours: attention, lexical probe and IBM Model 1 side by side for a sentence.",
        _alignment_arguments,
        results_of(_alignment),
        "--prepared runs/ktiw-data --work runs/ktiw",
    ),
    "ktiw-figures": Experiment(
        "KTIW: Figures 1 and 3 to 8 as pictures, from the results files.", add_figures, _figures, "--out figures"
    ),
    "ktiw-transformers": Experiment(
        "Ours: KTIW's probes per head over the training of transformers.",
        _heads_arguments,
        results_of(_heads),
        "--prepared runs/ktiw-data --work runs/ktiw-transformers",
        more={"a BART": "--family bart --prepared runs/ktiw-data --work runs/ktiw-bart"},
        quick=QUICK_STUDY,
    ),
}
