"""``attnlab demo``: three short acts on one page, about the models that come with attnlab, or about yours."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnlab.commands._output import Answer
from attnlab.commands._shared import trust_argument
from attnlab.commands.compare import answer_as_it_comes, comparison_arguments, comparison_config
from attnlab.progress import Progress

if TYPE_CHECKING:
    from attnlab.adapters import LoadedModel
    from attnlab.evaluation.bounded_memory import MemoryConfig
    from attnlab.evaluation.compare import CompareConfig
    from attnlab.pages.explorer import Exploration

__all__ = ["Cast", "arguments", "demo", "demo_exploration", "passage_for", "run"]

# Longer than a head of the shipped model is wide: a shorter text has no effective attention of its own.
PASSAGE = (
    "The river was frozen, so the old ferry stayed in the harbour until the ice broke in spring. Then the captain "
    "counted his passengers, raised the flag, and sailed slowly past the lighthouse to his brother's town."
)
MECHANISMS = (
    "softmax",
    "top-r:r=128",
    "top-r:r=32",
    "top-r:r=8",
    "window:r=128,sinks=1",
    "window:r=32,sinks=1",
    "kernel:elu",
)
TEXT, TEXT_NAME = "moby-dick", "Moby-Dick"
# The most bytes of maps in the explorer's page; beyond them it has two readings instead of all.
MOST_MAPS = 20_000_000
# Seconds from which the demo says beforehand how long it will take.
LONG = 150.0


@dataclass(frozen=True)
class Cast:
    """The models: that of acts one and two, and that of act three with its twin, which is loaded or made when asked."""

    loaded: LoadedModel
    name: str
    memory_name: str
    twins: Callable[[str, MemoryConfig], tuple[LoadedModel, LoadedModel]]
    # "trained" or "started": how the numbers came about that choose the twin's keys.
    learned: str


def arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument(
        "--model", metavar="MODEL", help="a language model of yours (default: those that come with attnlab)"
    )
    comparison_arguments(parser)
    parser.add_argument(
        "--lengths", type=int, nargs="+", metavar="N", help="the lengths of act three (default: 512 to 8192, doubling)"
    )
    trust_argument(parser)
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", default=Path("demo"), help="the folder to write (default: %(default)s)"
    )


def run(options: argparse.Namespace) -> Answer:
    """Write the demo's pages and its numbers."""
    from attnlab.pages import demo_page
    from attnlab.pages.demo import demo_sentences
    from attnlab.provenance import check_writable, write_atomic, write_json

    progress = Progress("demo", plain=True)
    progress.stage("reading the model")
    options.out.mkdir(parents=True, exist_ok=True)
    page, numbers, explorer = (options.out / name for name in ("index.html", "results.json", "explorer.html"))
    check_writable(page)
    config, memory = comparison_config(options, MECHANISMS), memory_config(options)
    cast = shipped_cast() if options.model is None else cast_of(options.model, trust=options.trust_remote_code)
    progress.close()

    def write(result: dict[str, Any]) -> list[Path]:
        """The numbers and the page so far."""
        write_json(numbers, result)
        write_atomic(page, demo_page(result))
        return [page, explorer, numbers]

    def measure(keep: Callable[[dict[str, Any]], None]) -> None:
        _say_how_long(cast, config, memory)
        demo(cast, config, memory, explorer=explorer, on_result=keep)

    def lines(result: dict[str, Any]) -> list[str]:
        return [f"{act}. {sentence}" for act, sentence in enumerate(demo_sentences(result), 1)]

    return answer_as_it_comes(measure, write=write, lines=lines, progress=progress)


def memory_config(options: argparse.Namespace) -> MemoryConfig:
    """The settings of act three."""
    from attnlab.evaluation.bounded_memory import LENGTHS, MemoryConfig

    return MemoryConfig(lengths=tuple(options.lengths or LENGTHS), seed=options.seed)


def shipped_cast() -> Cast:
    """The models that come with attnlab."""
    from attnlab.adapters import shipped_model

    return Cast(
        shipped_model(),
        "attnlab's masked LM",
        "attnlab's causal LM",
        lambda text, config: (shipped_model("lm"), shipped_model("lm-bounded")),
        "trained",
    )


def cast_of(name: str, *, trust: bool = False) -> Cast:
    """A language model of the user's, whose twin is made on the spot."""
    from attnlab.adapters import is_converted, load_model
    from attnlab.evaluation.bounded_memory import make_twin, refuse_without_cache

    loaded = load_model(name, trust_remote_code=trust)
    if loaded.task not in ("mlm", "causal"):
        raise ValueError(
            f"{name} is no masked or causal language model ({type(loaded.model).__name__}), and the demo measures how "
            "well text is predicted; attnlab explore and attnlab compare take it"
        )
    if is_converted(loaded.model):
        raise ValueError(f"{name} is converted already; give the demo the model that it was made from")

    def twins(text: str, config: MemoryConfig) -> tuple[LoadedModel, LoadedModel]:
        refuse_without_cache(loaded)
        return loaded, make_twin(loaded, text, config)

    shown = Path(name).name
    return Cast(loaded, shown, shown, twins, "started")


def demo(
    cast: Cast,
    config: CompareConfig,
    memory: MemoryConfig,
    *,
    explorer: Path,
    on_result: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """The three acts one after another; ``on_result`` gets all there is after each, and along acts two and three."""
    from attnlab.data import bundled_text
    from attnlab.evaluation.compare import compare
    from attnlab.evaluation.telling_head import telling_head
    from attnlab.provenance import provenance

    began, text = time.monotonic(), bundled_text(TEXT)
    models = {"1 and 2": cast.name, "3": cast.memory_name}
    result: dict[str, Any] = {"name": "demo", "complete": False, "models": models, "text": TEXT_NAME}
    result |= {"seed": config.seed, **provenance()}

    def keep(**acts: Any) -> None:
        result.update(acts, seconds=time.monotonic() - began)
        on_result(result)

    with _act(1) as progress:
        progress.stage("what the heads use")
        passage = passage_for(cast.loaded, text)
        head = telling_head(cast.loaded, passage)
        demo_exploration(cast.loaded, cast.name, passage).save(explorer)
        progress.finished("what the heads use")
        keep(head=head, explorer=explorer.name)
    with _act(2) as progress:
        names = {"model_name": cast.name, "text_name": TEXT_NAME}
        compared = compare(
            cast.loaded, text, config=config, progress=progress, on_result=lambda part: keep(comparison=part), **names
        )
        keep(comparison=dict(compared))
    with _act(3) as progress:
        progress.stage("a memory that does not grow")
        keep(memory=_memory_act(cast, text, memory, progress, keep), complete=True)
    return result


def _memory_act(
    cast: Cast, text: str, config: MemoryConfig, progress: Progress, keep: Callable[..., None]
) -> dict[str, Any]:
    """What act three measured, or why there is none for this model."""
    from attnlab.errors import problem_of
    from attnlab.evaluation.bounded_memory import compare_memories

    about = {"model": cast.memory_name, "text": TEXT_NAME, "learned": cast.learned}
    try:
        full, bounded = cast.twins(text, config)
    except ValueError as refusal:
        return about | {"why_not": problem_of(refusal).rstrip(".")}
    measured = compare_memories(
        full, bounded, text, config=config, progress=progress, on_result=lambda part: keep(memory=about | part)
    )
    return about | measured


def passage_for(loaded: LoadedModel, text: str) -> str:
    """A passage that is longer than the model's heads are wide, as effective attention needs it."""
    from attnlab.adapters.cache_bytes import layer_shapes
    from attnlab.data.beginnings import first_tokens

    width = max(shape.e for shape in layer_shapes(loaded.model))
    tokenizer = loaded.tokenizer
    if len(tokenizer(PASSAGE)["input_ids"]) > width:
        return PASSAGE
    ids = first_tokens(text, 2 * width, lambda part: tokenizer(part, add_special_tokens=False)["input_ids"])
    return str(tokenizer.decode(ids))


def demo_exploration(loaded: LoadedModel, name: str, passage: str) -> Exploration:
    """Every reading of the model's attention over a passage; two of them where the maps would be very large."""
    from attnlab.adapters.cache_bytes import layer_shapes
    from attnlab.evaluation.explore_models import ExploreConfig, explore_models
    from attnlab.reading import reading_names

    readings = tuple(reading_names(maps=True, controls=False))
    cells = sum(shape.heads for shape in layer_shapes(loaded.model)) * len(loaded.tokenizer(passage)["input_ids"]) ** 2
    if cells * len(readings) > MOST_MAPS:
        readings = ("standard", "effective")
    return explore_models({name: loaded}, [passage], config=ExploreConfig(readings=readings))


@contextmanager
def _act(number: int) -> Iterator[Progress]:
    """The progress of one act."""
    progress = Progress(f"act {number} of 3", plain=True)
    try:
        yield progress
    finally:
        progress.close()


def _say_how_long(cast: Cast, config: CompareConfig, memory: MemoryConfig) -> None:
    """One line if the demo takes minutes, from the time of a short forward pass."""
    import torch

    from attnlab.adapters.protocol import adapter_of
    from attnlab.evaluation.bounded_memory import memory_work
    from attnlab.evaluation.quality import default_tokens
    from attnlab.measure import median_seconds, parameter_count

    if cast.learned == "trained":
        return
    tokens, model = 128, cast.loaded.model
    ids = torch.ones(1, tokens, dtype=torch.long, device=next(model.parameters()).device)
    with torch.no_grad():
        (seconds,) = median_seconds({"forward": lambda: adapter_of(model).logits(ids)}, repeats=2).values()
    # A mechanism reads the text once, and some of it again for its errors and its costs.
    work = (config.tokens or default_tokens(cast.loaded)) * 2 * (1 + len(config.mechanisms))
    if cast.loaded.task == "causal":
        work += memory_work(cast.loaded, memory)
    expected = work * seconds / tokens
    if expected >= LONG:
        weights = f"{parameter_count(model) / 1e6:,.0f} million weights"
        words = f"about {expected / 60:.0f} minutes for a model of {weights}; the page is there after the first act"
        less = ", and --lengths 512 2048 takes less" if max(memory.lengths) > 2048 else ""
        print(f"demo: {words}{less}", file=sys.stderr, flush=True)
