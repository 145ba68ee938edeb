"""Converted models of every family, for the tests of conversion and of what is done with them."""

from __future__ import annotations

from typing import Any

import torch
import transformers as tf

import attnlab as al
from tests.adapters.zoo import build

# (heads of keys and values, slots, width) of what each family gains.
GAINED = {
    "bert": {"encoder.weight": (4, 5, 24)},
    "roberta": {"encoder.weight": (4, 5, 24)},
    "gpt2": {"decoder.weight": (4, 5, 24)},
    "llama": {"decoder.weight": (2, 5, 24)},
    "bart": {"encoder.weight": (3, 5, 24), "decoder.weight": (4, 5, 24), "cross.weight": (4, 5, 24)},
    "marian": {"encoder.weight": (3, 5, 24), "decoder.weight": (4, 5, 24), "cross.weight": (4, 5, 24)},
    "t5": {"encoder.weight": (3, 5, 24), "decoder.weight": (3, 5, 24), "cross.weight": (3, 5, 24)},
}


def converted(name: str, mech: Any = "abc-mlp:slots=5", **settings: Any) -> tf.PreTrainedModel:
    """A converted model of the family whose new parameters are not as they started."""
    model = al.convert(build(name), mech, **{"bias": "drop" if name == "t5" else "refuse", **settings})
    with torch.no_grad():
        for parameter in model.attnlab.parameters():
            parameter.normal_(std=0.3)
    return model
