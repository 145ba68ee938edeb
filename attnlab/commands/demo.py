"""``attnlab demo``: the comparison on the model and the text that are shipped, and the attention over one passage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import attnlab
from attnlab.data import bundled_text
from attnlab.experiments.compare import CompareConfig, compare
from attnlab.experiments.explore import READINGS, ExploreConfig, explore_models
from attnlab.explorer import Exploration
from attnlab.hf import LoadedModel, load_model, record
from attnlab.reading.effective import effective_attention

__all__ = ["SHIPPED", "demo", "demo_exploration", "shipped_model"]

SHIPPED = Path(attnlab.__file__).parent / "shipped" / "mlm"

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


def shipped_model() -> LoadedModel:
    """The small masked language model that comes with the package."""
    return load_model(SHIPPED)


def demo(config: CompareConfig) -> tuple[dict[str, Any], dict[str, Any]]:
    """(the comparison, the tokens and attention maps of ``PASSAGE``)."""
    loaded = shipped_model()
    result = compare(loaded, bundled_text(), config=config, model_name="attnlab's shipped MLM", text_name="Shakespeare")
    return result | {"name": "demo", "introduction": INTRODUCTION}, _maps(loaded)


def demo_exploration() -> Exploration:
    """Every reading of the shipped model's attention over ``PASSAGE``."""
    config = ExploreConfig(readings=READINGS)
    return explore_models({"attnlab's shipped MLM": shipped_model()}, [PASSAGE], config=config)


@torch.no_grad()
def _maps(loaded: LoadedModel) -> dict[str, Any]:
    inputs = loaded.tokenizer(PASSAGE, return_tensors="pt")
    with record(loaded.model) as trace:
        loaded.model(**inputs)
    tokens = loaded.tokenizer.convert_ids_to_tokens(inputs["input_ids"][0].tolist())
    maps = {
        "standard": [layer.weights()[0].tolist() for layer in trace],
        "effective": [effective_attention(layer).weights[0].tolist() for layer in trace],
    }
    return {"tokens": tokens, "maps": maps}
