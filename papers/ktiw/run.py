"""``python -m papers ktiw-*``: each table and figure of KTIW as a command.

The commands that compare trainings share them: ``--work`` holds a folder for each data set, what is finished there is
not trained again, and ``--tables-only`` trains nothing at all.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from papers.common.folders import Experiment, add_figures, add_out

__all__ = ["EXPERIMENTS"]


def _data_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", type=Path, help="a folder with a folder for each data set, as downloaded")
    parser.add_argument("--prepared", type=Path, help="the files that ktiw-data wrote; instead of --data")
    parser.add_argument("--only", help="data sets, such as imdb,multi30k (default: all in the folder)")


def _study_arguments(name: str) -> Callable[[argparse.ArgumentParser], None]:
    def arguments(parser: argparse.ArgumentParser) -> None:
        _data_arguments(parser)
        parser.add_argument("--work", type=Path, default=Path("runs/ktiw"), help="the runs (default: %(default)s)")
        add_out(parser, name)
        parser.add_argument("--tables-only", action="store_true", help="train nothing; tables of the finished runs")
        parser.add_argument("--steps", type=int, help="updates of each run, instead of the paper's")
        parser.add_argument("--batch", type=int, help="examples in a batch, instead of the paper's")
        parser.add_argument("--stacked", action="store_true", help="train a data set's runs at once, best on a GPU")
        parser.add_argument("--page", type=Path, help="also draw the figures on this page")

    return arguments


def _toy_arguments(name: str) -> Callable[[argparse.ArgumentParser], None]:
    def arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--seeds", type=int, help="models of each setting, instead of the paper's")
        parser.add_argument("--steps", type=int, help="updates, instead of the default")
        add_out(parser, name)
        parser.add_argument("--page", type=Path, help="also draw the figures on this page")

    return arguments


def _study(name: str, runs: Sequence[str]) -> Callable[[argparse.Namespace], Path]:
    def run(options: argparse.Namespace) -> Path:
        from papers.ktiw.assemble import write_study_result
        from papers.ktiw.comparison import run_chosen

        _check_out(options.out)
        if not options.tables_only:
            sizes = {"steps": options.steps, "batch": options.batch}
            run_chosen(_corpora(options), options.work, runs=tuple(runs), **sizes, stacked=options.stacked)
        return _written(
            write_study_result(name, options.work, options.out, prepared=options.prepared, data=options.data), options
        )

    return run


def _toy(name: str) -> Callable[[argparse.Namespace], Path]:
    def run(options: argparse.Namespace) -> Path:
        from papers.ktiw.assemble import run_toy

        _check_out(options.out)
        return _written(run_toy(name, options.out, seeds=options.seeds, steps=options.steps), options)

    return run


def _prepare_arguments(parser: argparse.ArgumentParser) -> None:
    _data_arguments(parser)
    parser.add_argument("--into", type=Path, required=True, help="a folder for the tokenised data sets")
    add_out(parser, "ktiw-data")


def _prepare(options: argparse.Namespace) -> Path:
    from papers.ktiw.assemble import write_statistics
    from papers.ktiw.corpora import save_corpus

    _check_out(options.out)
    options.into.mkdir(parents=True, exist_ok=True)
    corpora = _corpora(options)
    for corpus in corpora:
        save_corpus(corpus, options.into / f"{corpus.name}.npz.xz")
    return _written(write_statistics(corpora, options.out), options)


def _data_to(name: str) -> Callable[[argparse.ArgumentParser], None]:
    def arguments(parser: argparse.ArgumentParser) -> None:
        _data_arguments(parser)
        add_out(parser, name)

    return arguments


def _rates(options: argparse.Namespace) -> Path:
    from papers.ktiw.rates import write_proxy_rates

    _check_out(options.out)
    return _written(write_proxy_rates(_corpora(options), options.out), options)


def _diagnosis(options: argparse.Namespace) -> Path:
    from papers.ktiw.diagnosis import write_diagnosis

    _check_out(options.out)
    named = options.data is not None or options.prepared is not None
    return _written(write_diagnosis(_corpora(options) if named else [], options.out), options)


def _heads_arguments(parser: argparse.ArgumentParser) -> None:
    _data_arguments(parser)
    parser.add_argument("--family", choices=("attnlab", "bart"), default="attnlab", help="(default: %(default)s)")
    parser.add_argument("--work", type=Path, default=Path("runs/ktiw-transformers"), help="(default: %(default)s)")
    add_out(parser, "ktiw-transformers")
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--tables-only", action="store_true", help="train nothing; tables of the finished runs")
    parser.add_argument("--page", type=Path, help="also draw the figures on this page")


def _heads(options: argparse.Namespace) -> Path:
    from papers.ktiw.assemble import write_heads_result

    _check_out(options.out)
    if not options.tables_only:
        from papers.ktiw.transformers import HeadsConfig, run_heads

        [corpus] = [c for c in _corpora(options, ("multi30k",)) if c.kind == "translation"]
        run_heads(corpus, options.work, config=HeadsConfig(family=options.family, steps=options.steps))
    return _written(write_heads_result(options.work, options.out), options)


def _alignment_arguments(parser: argparse.ArgumentParser) -> None:
    _data_arguments(parser)
    parser.add_argument("--work", type=Path, default=Path("runs/ktiw"), help="the runs (default: %(default)s)")
    add_out(parser, "ktiw-alignment")
    parser.add_argument("--page", type=Path, help="also draw the figure on this page")


def _alignment(options: argparse.Namespace) -> Path:
    from papers.ktiw.alignment import write_alignment

    _check_out(options.out)
    [corpus] = [c for c in _corpora(options, ("multi30k",)) if c.kind == "translation"]
    return _written(write_alignment(corpus, options.work / corpus.name, options.out), options)


def _figures(options: argparse.Namespace) -> None:
    from papers.ktiw.figures import write_pictures

    options.out.mkdir(parents=True, exist_ok=True)
    for path in write_pictures(options.results, options.out):
        print(f"wrote {path.resolve()}")


def _corpora(options: argparse.Namespace, only: Sequence[str] | None = None) -> list[Any]:
    from papers.ktiw.corpora import READERS, load_corpus, prepare

    if (options.data is None) == (options.prepared is None):
        raise ValueError("name the data: --data FOLDER as downloaded, or --prepared FOLDER as ktiw-data wrote it")
    names = options.only.split(",") if options.only else list(only or READERS)
    unknown = [name for name in names if name not in READERS]
    if unknown:
        raise ValueError(f"no data set named {unknown[0]!r}; there are {', '.join(READERS)}")
    if options.prepared is not None:
        paths = {name: options.prepared / f"{name}.npz.xz" for name in names}
        chosen = {name: path for name, path in paths.items() if path.exists() or options.only}
    else:
        paths = {name: options.data / name for name in names}
        chosen = {name: path for name, path in paths.items() if path.is_dir() or options.only}
    if not chosen:
        raise ValueError(f"{options.prepared or options.data} holds none of {', '.join(names)}")
    return [load_corpus(path) if options.prepared else prepare(name, options.data) for name, path in chosen.items()]


def _check_out(out: Path) -> None:
    from attnlab.provenance import check_writable

    check_writable(out)


def _written(result: dict[str, Any], options: argparse.Namespace) -> Path:
    """The results file, after its figures are drawn where --page asks for them."""
    if getattr(options, "page", None) is not None:
        from papers.ktiw.figures import write_page

        write_page(json.loads(json.dumps(result)), options.page)
        print(f"wrote {options.page.resolve()}")
    return options.out


STANDARD = ("reference", "second", "uniform")
EXPERIMENTS: dict[str, Experiment] = {
    "ktiw-data": Experiment(
        "KTIW: tokenise its data sets, and Table 9's statistics beside ours.",
        _prepare_arguments,
        _prepare,
        "--data data --into runs/ktiw-data",
    ),
    "ktiw-table2": Experiment(
        "KTIW: Tables 2, 5 and 6, agreement of attention with lexical probes, and the curve of A.7.",
        _study_arguments("ktiw-table2"),
        _study("ktiw-table2", STANDARD),
        "--prepared runs/ktiw-data --work runs/ktiw",
    ),
    "ktiw-tau": Experiment(
        "KTIW: Tables 3 and 4, the same by Kendall's tau.",
        _study_arguments("ktiw-tau"),
        _study("ktiw-tau", STANDARD),
        "--prepared runs/ktiw-data --work runs/ktiw",
    ),
    "ktiw-train": Experiment(
        "KTIW: Tables 7 and 8, the same on the training set.",
        _study_arguments("ktiw-train"),
        _study("ktiw-train", STANDARD),
        "--prepared runs/ktiw-data --work runs/ktiw",
    ),
    "ktiw-frozen": Experiment(
        "KTIW: Table 10, attention trained while everything else is frozen.",
        _study_arguments("ktiw-frozen"),
        _study("ktiw-frozen", ("reference", "uniform", "frozen")),
        "--prepared runs/ktiw-data --work runs/ktiw",
    ),
    "ktiw-logreg": Experiment(
        "KTIW: Table 11, the proxy against logistic regression.",
        _study_arguments("ktiw-logreg"),
        _study("ktiw-logreg", ("reference", "uniform")),
        "--prepared runs/ktiw-data --work runs/ktiw",
    ),
    "ktiw-optimal": Experiment(
        "KTIW: appendix A.1, optimal attention of the model with a linear output layer.",
        _study_arguments("ktiw-optimal"),
        _study("ktiw-optimal", ("reference", "linear")),
        "--prepared runs/ktiw-data --only multi30k --work runs/ktiw",
    ),
    "ktiw-permutations": Experiment(
        "KTIW: Figure 3, copying permutations, where single words cannot be learned.",
        _toy_arguments("ktiw-permutations"),
        _toy("ktiw-permutations"),
    ),
    "ktiw-multihead": Experiment(
        "KTIW: Figure 6, good and bad initialisations of eight heads.",
        _toy_arguments("ktiw-multihead"),
        _toy("ktiw-multihead"),
    ),
    "ktiw-local": Experiment(
        "KTIW: Figure 7, where the knowledge of a keyword lies.", _toy_arguments("ktiw-local"), _toy("ktiw-local")
    ),
    "ktiw-permute-function": Experiment(
        "KTIW: section 6.2, copying against a fixed permutation of positions.",
        _toy_arguments("ktiw-permute-function"),
        _toy("ktiw-permute-function"),
    ),
    "ktiw-diagnosis": Experiment(
        "Ours: is word translation learnable from co-occurrence? The toy tasks' and the data sets' count tables.",
        _data_to("ktiw-diagnosis"),
        _diagnosis,
        "--prepared runs/ktiw-data",
    ),
    "ktiw-proxy-rates": Experiment(
        "Ours: the proxy against logistic regression, at the paper's rate and at a higher one.",
        _data_to("ktiw-proxy-rates"),
        _rates,
        "--prepared runs/ktiw-data",
    ),
    "ktiw-alignment": Experiment(
        "Ours: attention, lexical probe and IBM Model 1 side by side for a sentence.",
        _alignment_arguments,
        _alignment,
        "--prepared runs/ktiw-data --work runs/ktiw",
    ),
    "ktiw-figures": Experiment(
        "KTIW: Figures 1 and 3 to 8 as pictures, from the results that are there.",
        add_figures,
        _figures,
        "--out figures",
    ),
    "ktiw-transformers": Experiment(
        "Ours: KTIW's probes per head over the training of transformers.",
        _heads_arguments,
        _heads,
        "--prepared runs/ktiw-data --work runs/ktiw-transformers",
    ),
}
