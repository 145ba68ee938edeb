"""``attnlab demo``: the comparison on the model and the text that are shipped, and the attention over one passage."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnlab.commands._output import Answer
from attnlab.commands.compare import answer_as_it_comes, comparison_arguments, comparison_config
from attnlab.progress import Progress

if TYPE_CHECKING:
    from attnlab.evaluation.compare import CompareConfig
    from attnlab.pages.explorer import Exploration

__all__ = ["arguments", "demo", "demo_exploration", "demo_maps", "run"]

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
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", default=Path("demo"), help="the folder to write (default: %(default)s)"
    )


def run(options: argparse.Namespace) -> Answer:
    """Write the demo's pages and its numbers."""
    from attnlab.pages import compare_page
    from attnlab.provenance import check_writable, write_atomic, write_json

    progress = Progress("demo", plain=True)
    progress.stage("reading the model and the text")
    options.out.mkdir(parents=True, exist_ok=True)
    page, numbers, explorer = (options.out / name for name in ("index.html", "results.json", "explorer.html"))
    check_writable(page)
    config = comparison_config(options)
    maps = demo_maps()

    def write(result: dict[str, Any]) -> list[Path]:
        """The numbers and the page so far; the explorer with the last of them."""
        if result["complete"]:
            progress.stage("the explorer")
            demo_exploration().save(explorer)
        linked = [explorer] if result["complete"] else []
        write_json(numbers, result)
        write_atomic(page, compare_page(result | maps | ({"explorer": explorer.name} if linked else {})))
        return [page, *linked, numbers]

    def measure(keep: Callable[[dict[str, Any]], None]) -> None:
        demo(config, progress=progress, on_result=keep)

    return answer_as_it_comes(measure, write=write, progress=progress)


def demo(
    config: CompareConfig,
    *,
    progress: Progress | None = None,
    on_result: Callable[[dict[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """The comparison on the shipped model and text; ``on_result`` as for ``compare``."""
    from attnlab.adapters import shipped_model
    from attnlab.data import bundled_text
    from attnlab.evaluation.compare import compare

    about = {"name": "demo", "introduction": INTRODUCTION}

    def keep(result: dict[str, Any]) -> None:
        if on_result is not None:
            on_result(result | about)

    names = {"model_name": "attnlab's shipped MLM", "text_name": "Shakespeare"}
    result = compare(shipped_model(), bundled_text(), config=config, progress=progress, on_result=keep, **names)
    return result | about


def demo_exploration() -> Exploration:
    """Every reading of the shipped model's attention over ``PASSAGE``."""
    from attnlab.adapters import shipped_model
    from attnlab.evaluation.explore_models import ExploreConfig, explore_models
    from attnlab.reading import reading_names

    config = ExploreConfig(readings=tuple(reading_names(maps=True, controls=False)))
    return explore_models({"attnlab's shipped MLM": shipped_model()}, [PASSAGE], config=config)


def demo_maps() -> dict[str, Any]:
    """The tokens and attention maps of ``PASSAGE``."""
    import torch

    from attnlab.adapters import record, shipped_model
    from attnlab.reading import read

    loaded = shipped_model()
    inputs = loaded.tokenizer(PASSAGE, return_tensors="pt")
    with torch.no_grad(), record(loaded.model) as trace:
        loaded.model(**inputs)
    tokens = loaded.tokenizer.convert_ids_to_tokens(inputs["input_ids"][0].tolist())
    maps = {name: [t[0].tolist() for t in read(trace, name).maps.values()] for name in ("standard", "effective")}
    return {"tokens": tokens, "maps": maps}
