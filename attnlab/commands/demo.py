"""``attnlab demo``: the comparison on the model and the text that are shipped, and the attention over one passage."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnlab.commands.compare import comparison_arguments, comparison_config, show_comparison

if TYPE_CHECKING:
    from attnlab.adapters import LoadedModel
    from attnlab.evaluation.compare import CompareConfig
    from attnlab.pages.explorer import Exploration

__all__ = ["arguments", "demo", "demo_exploration", "run"]

# Longer than a head is wide: a shorter text has no effective attention of its own (every weight reaches the output).
PASSAGE = (
    "The river was frozen, so the old ferry stayed in the harbour until the ice broke in spring. Then the captain "
    "counted his passengers, raised the flag, and sailed slowly past the lighthouse to his brother's town."
)
INTRODUCTION = (
    "The model is a small masked language model, trained by attnlab on Wikipedia's text and shipped with it. It reads "
    "scenes of Shakespeare's with some words masked, and guesses them; in each row its attention is replaced by "
    "another mechanism, and nothing else is changed."
)


def arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    comparison_arguments(parser)
    parser.add_argument("--out", type=Path, default=Path("demo"), help="the folder to write (default: %(default)s)")


def run(options: argparse.Namespace) -> None:
    """Write the demo's pages and its numbers."""
    from attnlab.pages import compare_page
    from attnlab.provenance import check_writable, write_atomic, write_json

    options.out.mkdir(parents=True, exist_ok=True)
    page, numbers, explorer = (options.out / name for name in ("index.html", "results.json", "explorer.html"))
    check_writable(page)
    result, maps = demo(comparison_config(options))
    write_json(numbers, result)
    demo_exploration().save(explorer)
    write_atomic(page, compare_page(result | maps | {"explorer": explorer.name}))
    show_comparison(result, options, written=[page, explorer, numbers])


def demo(config: CompareConfig) -> tuple[dict[str, Any], dict[str, Any]]:
    """(the comparison, the tokens and attention maps of ``PASSAGE``)."""
    from attnlab.adapters import shipped_model
    from attnlab.data import bundled_text
    from attnlab.evaluation.compare import compare

    loaded = shipped_model()
    result = compare(loaded, bundled_text(), config=config, model_name="attnlab's shipped MLM", text_name="Shakespeare")
    return result | {"name": "demo", "introduction": INTRODUCTION}, _maps(loaded)


def demo_exploration() -> Exploration:
    """Every reading of the shipped model's attention over ``PASSAGE``."""
    from attnlab.adapters import shipped_model
    from attnlab.evaluation.explore_models import ExploreConfig, explore_models
    from attnlab.reading import reading_names

    config = ExploreConfig(readings=tuple(reading_names(maps=True, controls=False)))
    return explore_models({"attnlab's shipped MLM": shipped_model()}, [PASSAGE], config=config)


def _maps(loaded: LoadedModel) -> dict[str, Any]:
    import torch

    from attnlab.adapters import record
    from attnlab.reading import read

    inputs = loaded.tokenizer(PASSAGE, return_tensors="pt")
    with torch.no_grad(), record(loaded.model) as trace:
        loaded.model(**inputs)
    tokens = loaded.tokenizer.convert_ids_to_tokens(inputs["input_ids"][0].tolist())
    maps = {name: [t[0].tolist() for t in read(trace, name).maps.values()] for name in ("standard", "effective")}
    return {"tokens": tokens, "maps": maps}
