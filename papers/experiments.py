"""``python -m papers NAME``: the papers' experiments by name, each with its own arguments."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from attnlab.provenance import check_writable
from papers.abc.commands import EXPERIMENTS as ABC
from papers.common.experiment import Experiment
from papers.guidance.commands import EXPERIMENTS as GUIDANCE
from papers.ktiw.commands import EXPERIMENTS as KTIW

__all__ = ["EXPERIMENTS", "Experiment"]


def _corpus_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--enwik8", type=Path, required=True, help="enwik8 as it is downloaded, also .xz or .zip")
    parser.add_argument("--wikitext", type=Path, required=True, help="the folder of WikiText-103's files")
    parser.add_argument("--out", type=Path, required=True, help="a new folder for the token stores")
    parser.add_argument("--vocab", type=int, default=8192, help="of the tokeniser (default: %(default)s)")


def _corpus(options: argparse.Namespace) -> None:
    from papers.common.wiki_corpus import prepare_wiki_corpus

    told = prepare_wiki_corpus(options.enwik8, options.wikitext, options.out, vocab=options.vocab)
    print(json.dumps(told, indent=1))


def _value_aware_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--corpus", type=Path, required=True, help="what reproduce wiki-corpus wrote")
    parser.add_argument("--model", type=Path, help="the masked LM to continue (default: the shipped one)")
    work = parser.add_mutually_exclusive_group(required=True)
    work.add_argument("--work", type=Path, help="an empty folder for the runs")
    work.add_argument("--resume", type=Path, metavar="DIR", help="go on with the runs in this folder")
    parser.add_argument(
        "--out", type=Path, default=Path("papers/results/value-aware.json"), help="(default: %(default)s)"
    )
    parser.add_argument(
        "--config", choices=("quick", "paper"), default="quick", help="paper: A.2 and Table 4, for days"
    )
    parser.add_argument("--only", choices=("lm", "mlm"), help="one half; the other's results are kept")
    parser.add_argument("--seconds", type=float, help="stop after this long; what is finished is kept")


def _value_aware(options: argparse.Namespace) -> None:
    from attnlab.adapters.load import SHIPPED
    from papers.value_aware.run import CONFIGS, reproduce

    check_writable(options.out)
    reproduce(
        CONFIGS[options.config],
        corpus=options.corpus,
        model=options.model or SHIPPED,
        out=options.out,
        work=options.resume or options.work,
        only=options.only,
        seconds=options.seconds,
        resume=options.resume is not None,
    )
    print(f"wrote {options.out.resolve()}")


def _effective_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", required=True, help="the folder of GLUE's tasks")
    parser.add_argument("--model", help="a pretrained encoder's folder (default: the shipped masked LM)")
    tags = parser.add_mutually_exclusive_group(required=True)
    tags.add_argument("--treebank", help="a CoNLL-U file to learn part-of-speech tags from")
    tags.add_argument("--tagger", help="a saved tagger")
    parser.add_argument(
        "--out", type=Path, default=Path("papers/results/effective.json"), help="(default: %(default)s)"
    )
    parser.add_argument("--page", type=Path, help="also draw the figures on this page")
    parser.add_argument("--only", help="parts, such as STS-B,timing; the others' results are kept")
    work = parser.add_mutually_exclusive_group()
    work.add_argument("--work", type=Path, help="an empty folder for the runs (default: a temporary one)")
    work.add_argument("--resume", type=Path, metavar="DIR", help="go on with the runs in this folder")
    parser.add_argument("--seconds", type=float, help="stop after this long; what is finished is kept")


def _effective(options: argparse.Namespace) -> None:
    from papers.effective.figures import write_figures
    from papers.effective.run import EffectiveConfig, run

    check_writable(options.out)
    if options.page is not None:
        check_writable(options.page)
    config = EffectiveConfig(data=options.data, model=options.model, treebank=options.treebank, tagger=options.tagger)
    only = options.only.split(",") if options.only else None
    run(
        config,
        only=only,
        out=options.out,
        work=options.resume or options.work,
        seconds=options.seconds,
        resume=options.resume is not None,
    )
    print(f"wrote {options.out.resolve()}")
    if options.page is not None:
        write_figures(json.loads(options.out.read_text(encoding="utf-8")), options.page)
        print(f"wrote {options.page.resolve()}")


def _patterns_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, help="an encoder's folder (default: the shipped masked LM)")
    parser.add_argument("--texts", type=Path, required=True, help="a text a line, or two with a tab between them")
    parser.add_argument("--limit", type=int, help="the first lines only")
    parser.add_argument("--out", type=Path, default=Path("patterns.json"), help="(default: %(default)s)")
    parser.add_argument("--page", type=Path, help="also draw the figure on this page")


def _patterns(options: argparse.Namespace) -> None:
    from attnlab.adapters import load_model
    from attnlab.adapters.load import SHIPPED
    from papers.effective.patterns import patterns_of_texts

    check_writable(options.out)
    if options.page is not None:
        check_writable(options.page)
    folder = options.model or SHIPPED
    lines = [line for line in options.texts.read_text(encoding="utf-8").splitlines() if line.strip()]
    found = patterns_of_texts(
        load_model(folder), lines[: options.limit], name=Path(folder).name, out=options.out, page=options.page
    )
    for row in found["tables"]["table_2"]:
        print(json.dumps(row))
    print(f"wrote {options.out.resolve()}")


def _classifier_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out", type=Path, default=Path("papers/results/pattern_classifier.json"), help="(default: %(default)s)"
    )
    parser.add_argument("--maps", type=Path, help="a folder of labelled maps (default: the shipped ones)")
    parser.add_argument("--seeds", type=int, default=3, help="trainings of each split (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=450, help="of each training (default: %(default)s)")


def _classifier(options: argparse.Namespace) -> None:
    from papers.effective.labelled_maps import load_labelled
    from papers.effective.pattern_training import our_maps
    from papers.effective.patterns import evaluate_classifier

    check_writable(options.out)
    maps = our_maps() if options.maps is None else load_labelled(options.maps)
    evaluate_classifier(maps, options.out, seeds=options.seeds, steps=options.steps)
    print(f"wrote {options.out.resolve()}")


def _maps_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, help="an encoder's folder (default: the shipped masked LM)")
    parser.add_argument("--text", required=True, help="a sentence")
    parser.add_argument("--pair", help="a second sentence")
    parser.add_argument("--layer", type=int, help="the layer drawn large (default: the last)")
    parser.add_argument("--head", type=int, default=0, help="the head drawn large (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("maps.html"), help="the page (default: %(default)s)")


def _maps(options: argparse.Namespace) -> None:
    from attnlab.adapters import load_model
    from attnlab.adapters.load import SHIPPED
    from papers.effective.maps import write_maps_page

    check_writable(options.out)
    loaded = load_model(options.model or SHIPPED)
    write_maps_page(loaded, options.text, options.out, pair=options.pair, layer=options.layer, head=options.head)
    print(f"wrote {options.out.resolve()}")


def _claims_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--results", type=Path, default=Path("papers/results"), help="where results lie (default: %(default)s)"
    )
    parser.add_argument("-o", "--out", type=Path, default=Path("claims.html"), help="the page (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print every verdict as JSON")


def _claims(options: argparse.Namespace) -> None:
    from papers.common.ledger_page import report_claims

    check_writable(options.out)
    report = report_claims(results=options.results, out=options.out)
    if options.json:
        print(json.dumps(report, indent=1, ensure_ascii=False))
    else:
        print(f"wrote {options.out.resolve()}")


def _docs_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--check", action="store_true", help="change nothing; fail if a page is stale")


def _docs(options: argparse.Namespace) -> None:
    from papers.common.docs_tables import fill_pages

    fill_pages(Path("."), check=options.check)


EXPERIMENTS: dict[str, Experiment] = {
    "claims": Experiment("The ledger: every claim of the papers beside our results.", _claims_arguments, _claims),
    "docs": Experiment("Fill the tables of README.md and docs/ from the results.", _docs_arguments, _docs),
    "wiki-corpus": Experiment(
        "Clean and tokenise enwik8 and WikiText-103 as the shipped model and the experiments read them.",
        _corpus_arguments,
        _corpus,
    ),
    "value-aware": Experiment(
        "Value-aware approximation: its Tables 1 and 2 and Figures 1 to 3.", _value_aware_arguments, _value_aware
    ),
    "effective": Experiment(
        "Effective attention: its tables and figures, standard beside effective, on fine-tuned encoders.",
        _effective_arguments,
        _effective,
    ),
    "effective-patterns": Experiment(
        "Effective attention: Table 2 and Figure 4 for any encoder and text file.", _patterns_arguments, _patterns
    ),
    "effective-classifier": Experiment(
        "Effective attention: the pattern classifier, held out from models and from maps.",
        _classifier_arguments,
        _classifier,
    ),
    "effective-maps": Experiment(
        "Effective attention: Figures 2 and 7, the maps of one sentence and head, standard and effective.",
        _maps_arguments,
        _maps,
    ),
    **ABC,
    **GUIDANCE,
    **KTIW,
}
