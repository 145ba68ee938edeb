"""``attnlab explore``: a model's attention over a text, or a run's over training, as one offline page."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnlab.commands._output import Answer
from attnlab.commands._shared import (
    check_mechanisms,
    check_page,
    device_argument,
    model_argument,
    page_argument,
    trust_argument,
)
from attnlab.progress import note, showing

if TYPE_CHECKING:
    from attnlab.pages.explorer import Exploration

__all__ = ["arguments", "run"]

# Readings with an option of their own.
SHORT = ("effective", "norm", "rollout")
# {option: its name in the options}, with --long only and never with it.
LONG_ONLY = {"--text": "long_file", "--tokens": "tokens", "--heads": "heads", "--zoom": "zoom"}
NOT_LONG = {
    "TEXT": "text",
    "--file": "file",
    "--target": "target",
    "--compare": "compare",
    "--compare-mechanism": "compare_mechanism",
    "--reading": "reading",
    "--all": "all",
    "--layers": "layers",
    "--precise": "precise",
}


def arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    model_argument(
        parser,
        nargs="?",
        help="a model folder, a GGUF file, a hub name, smollm2, shipped-lm, or a run folder with recorded steps",
    )
    parser.add_argument("text", metavar="TEXT", nargs="*", help="what it reads; two texts are shown side by side")
    parser.add_argument(
        "--file", type=Path, metavar="FILE", action="append", default=[], help="a UTF-8 text file; repeat for more"
    )
    parser.add_argument(
        "--target", metavar="TEXT", help="what a sequence-to-sequence model is to write (default: what it writes)"
    )
    parser.add_argument("--compare", metavar="MODEL", help="a second model that reads the same")
    parser.add_argument(
        "-m",
        "--compare-mechanism",
        metavar="MECHANISM",
        action="append",
        default=[],
        help="a mechanism whose W^ and (W - W^) v are shown beside W; repeat for more",
    )
    parser.add_argument(
        "--reading",
        metavar="READING",
        action="append",
        default=[],
        help="a reading beside W, by name or as ./file.py:function; repeat for more",
    )
    parser.add_argument("--list-readings", action="store_true", help="list the readings, and do nothing else")
    for name in SHORT:
        parser.add_argument(
            f"--{name}", dest="reading", action="append_const", const=name, help=f"the same as --reading {name}"
        )
    parser.add_argument("--all", action="store_true", help="every reading that is not a control")
    parser.add_argument("--layers", metavar="LIST", help="layers whose maps are kept whole, such as 0,3,5-7")
    parser.add_argument("--precise", action="store_true", help="half precision instead of 8 bits a weight")
    long_text = parser.add_argument_group("a long text", "statistics of all heads instead of maps (docs/watch.md)")
    long_text.add_argument("--long", action="store_true", help="show a text too long for maps of all its tokens")
    long_text.add_argument("--text", dest="long_file", metavar="FILE", type=Path, help="the UTF-8 text file to read")
    long_text.add_argument("--tokens", type=int, metavar="N", help="how many tokens (default: 32768, or all there are)")
    long_text.add_argument(
        "--heads", metavar="LIST", help="heads with lanes, such as 3.2,7.1 (default: 16 that differ)"
    )
    long_text.add_argument(
        "--zoom",
        metavar="LAYER.HEAD:FROM-TO",
        action="append",
        default=[],
        help="tokens whose exact weights are shown; @FROM-TO after it names other tokens looked at; repeat for more",
    )
    page_argument(parser, "explore.html")
    device_argument(parser)
    trust_argument(parser)


def _list_readings() -> Answer:
    """Every registered reading with its summary."""
    from attnlab.reading import named_reading, reading_names

    summaries = {name: named_reading(name).summary for name in reading_names()}
    return Answer({"readings": summaries}, [f"{name:<16} {summary}" for name, summary in summaries.items()])


def run(options: argparse.Namespace) -> Answer:
    """Write the page."""
    if options.list_readings:
        return _list_readings()
    if options.model is None:
        raise ValueError("name a model to look at, and a text: attnlab explore MODEL TEXT")
    check_page(options.out, json=options.json)
    _check_long(options)
    with showing("exploring", at_once=False):
        note("reading the model")
        return _explore_long(options) if options.long else _explore(options)


def _explore(options: argparse.Namespace) -> Answer:
    from attnlab.pages.explorer import explore_run
    from attnlab.pages.explorer.timeline import FOLDER, INDEX

    if (Path(options.model) / FOLDER / INDEX).is_file():
        refused = [name for name in ("text", "file", "compare", "compare_mechanism") if getattr(options, name)]
        if refused:
            raise ValueError(
                f"{options.model} is a run with recorded steps, which shows them alone; leave out {refused[0]}"
            )
        exploration = explore_run(options.model, precise=options.precise)
    else:
        exploration = _explore_models(options)
    page = exploration.html()
    meta = exploration.packed.meta
    return _write(options, page, _summary(meta, options.out, len(page)))


def _write(options: argparse.Namespace, page: bytes, summary: dict[str, Any]) -> Answer:
    from attnlab.provenance import write_atomic

    write_atomic(options.out, page)
    if not options.json:
        for note in summary["notes"]:
            print(f"attnlab: {note}", file=sys.stderr)
    return Answer(summary, [f"a page of {len(page) / 1e6:.1f} MB; open it in a browser"], [options.out])


def _check_long(options: argparse.Namespace) -> None:
    """Raise where options of a long text and of a short one are mixed."""
    names = NOT_LONG if options.long else LONG_ONLY
    values = {option: getattr(options, name) for option, name in names.items()}
    used = [option for option, value in values.items() if value is not None and value is not False and value != []]
    if used and options.long:
        raise ValueError(f"--long shows statistics of one text alone; leave out {used[0]}")
    if used:
        raise ValueError(f"{used[0]} belongs to --long; add --long, or leave it out")
    if options.long and options.long_file is None:
        raise ValueError("--long reads a file: name it with --text FILE")


def _explore_long(options: argparse.Namespace) -> Answer:
    from attnlab.adapters import load_model
    from attnlab.devices import to_device
    from attnlab.evaluation.explore_long import LongConfig, explore_long, parse_heads, parse_zoom
    from attnlab.pages.long import long_page

    config = LongConfig(
        tokens=options.tokens,
        heads=None if options.heads is None else parse_heads(options.heads),
        zooms=tuple(map(parse_zoom, options.zoom)),
    )
    loaded = load_model(options.model, trust_remote_code=options.trust_remote_code)
    to_device(options.device, loaded.model)
    packed = explore_long(loaded, options.long_file, name=Path(options.model).name, config=config)
    page, meta = long_page(packed), packed.meta
    summary = {
        "page": str(options.out.resolve()),
        "bytes": len(page),
        "notes": meta["notes"],
        "tokens": len(meta["tokens"]),
        "heads": sum(len(layer["scales"]) for layer in meta["layers"]),
        "chosen": [f"{head['layer']}.{head['head']}" for head in meta["chosen"]],
        "regions": options.zoom,
    }
    return _write(options, page, summary)


def _explore_models(options: argparse.Namespace) -> Exploration:
    from attnlab.adapters import load_model
    from attnlab.devices import to_device
    from attnlab.evaluation.explore_models import ExploreConfig, explore_models, parse_layers, texts_of
    from attnlab.reading import reading_names

    check_mechanisms(options.compare_mechanism)
    every = reading_names(maps=True, controls=False) if options.all else []
    config = ExploreConfig(
        readings=tuple(dict.fromkeys(["standard", *every, *options.reading])),
        mechanisms=tuple(options.compare_mechanism),
        layers=None if options.layers is None else parse_layers(options.layers),
        precise=options.precise,
        target=options.target,
    )
    texts = texts_of(options.text, options.file)
    if not texts and (Path(options.model) / "run.json").is_file():
        raise ValueError(f"{options.model} is a run without recorded steps; to look at its model give a text after it")
    if not texts or not all(text.strip() for text in texts):
        raise ValueError("there is no text to read: give one after the model, or a file with --file")
    models = {}
    for name in (options.model, options.compare):
        if name is not None:
            loaded = load_model(name, trust_remote_code=options.trust_remote_code)
            shown = Path(name).name
            to_device(options.device, loaded.model)
            models[shown if shown not in models else f"{shown} (2)"] = loaded
    return explore_models(models, texts, config=config)


def _summary(meta: dict[str, Any], out: Path, size: int) -> dict[str, Any]:
    shown = [
        {
            "name": item["name"],
            "kinds": {
                stack["kind"]: {
                    "layers": len(stack["layers"]),
                    "heads": max(len(entry["small"]["scales"]) for entry in stack["readings"][0]["layers"]),
                    "readings": [reading["name"] for reading in stack["readings"]],
                }
                for stack in item["stacks"]
            },
        }
        for item in meta["items"]
    ]
    return {"page": str(out.resolve()), "bytes": size, "error": meta["error"], "notes": meta["notes"], "shown": shown}
