"""What serves all papers: the ledger of claims, the tables in documents, and the corpus of Wikipedia's text."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from papers.common.folders import Experiment, add_out
from papers.common.quick import FOLDER

__all__ = ["EXPERIMENTS"]


def _claims_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--results",
        type=Path,
        default=Path("papers/results"),
        help="the results files (default: %(default)s)",
    )
    parser.add_argument("-o", "--out", type=Path, default=Path("claims.html"), help="the page (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print every verdict as JSON")


def _claims(options: argparse.Namespace) -> None:
    from attnlab.provenance import check_writable
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


def _data_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--check", type=Path, metavar="FOLDER", help="say what of the data sets this folder holds")
    parser.add_argument("--json", action="store_true", help="print it as JSON")


def _data(options: argparse.Namespace) -> None:
    from papers.common.data_sets import check_folder, data_sets, reports_in_words

    if options.check is not None:
        reports = check_folder(options.check)
        print(json.dumps(reports, indent=1) if options.json else reports_in_words(reports))
        return
    rows = [{"folder": one.folder, "title": one.title, "address": one.address[0]} for one in data_sets()]
    lines = [f"{row['folder']}: {row['title']} ({row['address']})" for row in rows]
    print(json.dumps(rows, indent=1, ensure_ascii=False) if options.json else "\n".join(lines))


def _corpus_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--enwik8", type=Path, required=True, help="enwik8 as it is downloaded, also .xz or .zip")
    parser.add_argument("--wikitext", type=Path, required=True, help="the folder of WikiText-103's files")
    parser.add_argument("--out", type=Path, required=True, help="a new folder for the token stores")
    parser.add_argument("--vocab", type=int, default=8192, help="of the tokeniser (default: %(default)s)")
    parser.add_argument(
        "--byte-level", action="store_true", help="a byte-level BPE in place of a lower-cased WordPiece"
    )
    parser.add_argument("--articles", type=int, help="only so many articles of each source (default: all)")


def _corpus(options: argparse.Namespace) -> None:
    from papers.common.wiki_corpus import prepare_wiki_corpus

    counts = prepare_wiki_corpus(
        options.enwik8, options.wikitext, options.out, vocab=options.vocab, byte_level=options.byte_level,
        limit=options.articles,
    )  # fmt: skip
    print(json.dumps(counts, indent=1))


# The options of shipped-lm that are settings of papers.common.shipped_lm.ShippedLM.
LM_SETTINGS = {
    "model": str, "mechanism": str, "length": int, "longest": int, "steps": int, "tokens": int, "lr": float,
    "long_steps": int, "long_lr": float, "twin_tokens": int, "evaluated": int, "seed": int,
}  # fmt: skip


def _lm_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--corpus", type=Path, required=True, help="what wiki-corpus wrote with --byte-level")
    parser.add_argument("--work", type=Path, default=Path("runs/shipped-lm"), help="the trainings' folder")
    parser.add_argument("--folder", type=Path, default=Path("attnlab/shipped"), help="where both models are written")
    for name, kind in LM_SETTINGS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, help="instead of that of the shipped model")
    add_out(parser, "shipped_lm")


def _lm(options: argparse.Namespace) -> Path:
    from papers.common.shipped_lm import ShippedLM, make_shipped_lm

    given = {name: getattr(options, name) for name in LM_SETTINGS if getattr(options, name) is not None}
    make_shipped_lm(
        ShippedLM(**given), corpus=options.corpus, work=options.work, folder=options.folder, out=options.out
    )
    return Path(options.out)


EXPERIMENTS: dict[str, Experiment] = {
    "claims": Experiment(
        "The ledger: every claim of the papers beside our results.", _claims_arguments, _claims, "--out claims.html"
    ),
    "docs": Experiment("Fill the tables of README.md and docs/ from the results.", _docs_arguments, _docs),
    "data": Experiment(
        "The data sets: where each is published, and what of them a folder holds.",
        _data_arguments,
        _data,
        "--check data",
    ),
    "wiki-corpus": Experiment(
        "Clean and tokenise enwik8 and WikiText-103 as the shipped model and the experiments read them.",
        _corpus_arguments,
        _corpus,
        "--enwik8 data/enwik8/enwik8.xz --wikitext data/wikitext-103 --out runs/wiki",
        quick={"articles": 60},
    ),
    "shipped-lm": Experiment(
        "The small language model that is shipped, and its twin with a bounded memory.",
        _lm_arguments,
        _lm,
        "--corpus runs/wiki-bytes",
        quick={
            "model": "llama-1x32",
            "mechanism": "abc-select:slots=12,window=16,sinks=4",
            "length": 64,
            "longest": 128,
            "steps": 4,
            "tokens": 512,
            "long_steps": 2,
            "twin_tokens": 32_768,
            "evaluated": 512,
            "folder": FOLDER / "shipped",
        },
    ),
}
