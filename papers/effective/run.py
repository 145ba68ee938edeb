"""``python -m papers effective``: the tables and figures of Sun and Marasović (Effective), standard beside effective.

A pretrained encoder is fine-tuned on RTE, MRPC, SST-2 and STS-B, each in a process of its own, and read before and
after: patterns (Table 2, Figure 4), token types (Figures 1, 5, 6), what fine-tuning changed (Figure 3), the time it
takes (Table 3), the authors' own computation with padding inside V, and which reading is faithful. Every table is on
disk as soon as it is made, so that finished tables are kept when time runs out.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

from attnlab.provenance import check_writable, write_atomic
from papers.common.folders import Experiment, add_figures, add_out
from papers.effective.config import CONFIGS, NAME, EffectiveConfig
from papers.effective.parts import public_settings, run_parts

__all__ = ["EXPERIMENTS"]


def _study_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", required=True, help="the folder of GLUE's tasks")
    parser.add_argument("--model", help="a pretrained encoder's folder (default: the shipped masked LM)")
    tags = parser.add_mutually_exclusive_group(required=True)
    tags.add_argument("--treebank", help="a CoNLL-U file to learn part-of-speech tags from")
    tags.add_argument("--tagger", help="a saved tagger")
    parser.add_argument(
        "--classifier-maps",
        choices=("own", "all"),
        default="own",
        help="whose labelled maps the pattern classifier learns from: the encoder's own, where there are any, or those "
        "of four models, as the shipped one (default: %(default)s)",
    )
    parser.add_argument("--pretrained", action="store_true", help="read the encoder as it is, without fine-tuning")
    parser.add_argument("--dev-limit", type=int, help="dev examples of a task whose maps are read")
    parser.add_argument("--jobs", type=int, help="tasks at once (default: all on a GPU, one elsewhere)")
    parser.add_argument("--sentences", type=int, help="only the treebank's first so many (default: all)")
    add_out(parser, NAME)
    parser.add_argument("--page", type=Path, help="also draw the figures on this page")
    parser.add_argument("--only", help="parts, such as STS-B,timing; the others' results are kept")
    work = parser.add_mutually_exclusive_group()
    work.add_argument("--work", type=Path, help="an empty folder for the runs (default: a temporary one)")
    work.add_argument("--resume", type=Path, metavar="DIR", help="go on with the runs in this folder")
    parser.add_argument("--seconds", type=float, help="stop after this long; what is finished is kept")


def _config(options: argparse.Namespace) -> EffectiveConfig:
    config = CONFIGS[options.config]
    return replace(
        config,
        finetune=not options.pretrained,
        dev_limit=config.dev_limit if options.dev_limit is None else options.dev_limit,
        jobs=options.jobs,
        data=options.data,
        model=options.model,
        treebank=options.treebank,
        tagger=options.tagger,
        sentences=options.sentences,
        classifier_maps=options.classifier_maps,
    )


def _study(options: argparse.Namespace) -> Path:
    from papers.effective.figures import figures_page

    check_writable(options.out)
    if options.page is not None:
        check_writable(options.page)
    if options.config == "paper" and options.model is None:
        raise ValueError("--config paper fine-tunes BERT-base: name its folder by --model")
    config = _config(options)
    only = options.only.split(",") if options.only else None
    run_parts(
        config,
        only=only,
        out=options.out,
        work=options.resume or options.work,
        seconds=options.seconds,
        resume=options.resume is not None,
    )
    if options.page is not None:
        write_atomic(options.page, figures_page(json.loads(options.out.read_text(encoding="utf-8"))))
        print(f"wrote {options.page.resolve()}")
    return options.out


def _patterns_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, help="an encoder's folder (default: the shipped masked LM)")
    parser.add_argument("--texts", type=Path, required=True, help="a text a line, or two with a tab between them")
    parser.add_argument("--limit", type=int, help="the first lines only")
    parser.add_argument("--out", type=Path, default=Path("patterns.json"), help="(default: %(default)s)")
    parser.add_argument("--page", type=Path, help="also draw the figure on this page")


def _patterns(options: argparse.Namespace) -> Path:
    from attnlab.adapters import load_model
    from attnlab.adapters.load import SHIPPED
    from papers.effective.patterns import patterns_of_texts

    check_writable(options.out)
    if options.page is not None:
        check_writable(options.page)
    folder = options.model or SHIPPED
    lines = [line for line in options.texts.read_text(encoding="utf-8").splitlines() if line.strip()]
    result = patterns_of_texts(
        load_model(folder), lines[: options.limit], name=Path(folder).name, out=options.out, page=options.page
    )
    for row in result["tables"]["table_2"]:
        print(json.dumps(row))
    return options.out


def _classifier_arguments(parser: argparse.ArgumentParser) -> None:
    add_out(parser, "pattern_classifier")
    parser.add_argument("--maps", type=Path, help="a folder of labelled maps (default: the shipped ones)")
    parser.add_argument("--seeds", type=int, default=3, help="trainings of each split (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=450, help="of each training (default: %(default)s)")
    parser.add_argument("--generated", type=int, default=4000, help="maps to learn from (default: %(default)s)")
    parser.add_argument("--members", type=int, default=5, help="networks that answer together (default: %(default)s)")


def _classifier(options: argparse.Namespace) -> Path:
    from papers.effective.labelled_maps import load_labelled
    from papers.effective.pattern_training import our_maps
    from papers.effective.patterns import evaluate_classifier

    check_writable(options.out)
    maps = our_maps() if options.maps is None else load_labelled(options.maps)
    evaluate_classifier(
        maps,
        options.out,
        seeds=options.seeds,
        steps=options.steps,
        generated=options.generated,
        members=options.members,
    )
    return options.out


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


def _figures(options: argparse.Namespace) -> None:
    from papers.common.pictures import draw_results
    from papers.effective.drawings import PICTURES

    for path in draw_results(PICTURES, options.results, options.out):
        print(f"wrote {path.resolve()}")


EXPERIMENTS: dict[str, Experiment] = {
    "effective": Experiment(
        "Effective attention: its tables and figures, standard beside effective, on fine-tuned encoders.",
        _study_arguments,
        _study,
        "--data data/glue --treebank data/ud-english-ewt/en_ewt-ud-train.conllu --work runs/effective",
        more={
            "the encoder of our results": "--model models/all-MiniLM-L6-v2 --data data/glue --treebank "
            "data/ud-english-ewt/en_ewt-ud-train.conllu --work runs/effective-minilm",
            "an encoder with heads of 64, as it was pretrained": "--pretrained --model models/all-mpnet-base-v2 "
            "--only RTE,MRPC,SST-2,STS-B,QNLI --data data/glue --treebank "
            "data/ud-english-ewt/en_ewt-ud-train.conllu --work runs/effective-mpnet "
            "--out papers/results/effective-pretrained.json",
        },
        paper="BERT-base, named by --model, on whole training and dev sets",
        settings=lambda options: public_settings(_config(options)),
        quick={"seconds": 40.0, "only": "RTE", "sentences": 200, "classifier_maps": "all"},
    ),
    "effective-patterns": Experiment(
        "Effective attention: Table 2 and Figure 4 for any encoder and text file.",
        _patterns_arguments,
        _patterns,
        "--texts texts.txt --out patterns.json",
        quick={"limit": 16},
    ),
    "effective-classifier": Experiment(
        "Effective attention: the pattern classifier, held out from models and from maps.",
        _classifier_arguments,
        _classifier,
        quick={"seeds": 1, "steps": 4, "generated": 200, "members": 1},
    ),
    "effective-maps": Experiment(
        "Effective attention: Figures 2 and 7, the maps of one sentence and head, standard and effective.",
        _maps_arguments,
        _maps,
        '--text "The cat sat on the mat." --out maps.html',
    ),
    "effective-figures": Experiment(
        "Effective attention: Figures 1 and 3 to 6 by head as pictures, from the results files.",
        add_figures,
        _figures,
        "--out figures",
    ),
}
