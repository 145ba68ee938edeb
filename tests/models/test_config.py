from __future__ import annotations

import json
from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest
import torch

from attnlab.models import CONFIGS, Transformer, config_from_dict, config_to_dict, count_parameters, named_config
from tests.models.small import BASE


def layer(width: int, hidden: int, *, cross: bool = False) -> int:
    """q, k, v and out with biases, two matrices with biases, and one norm for each sublayer."""
    attention = 4 * width * width + 4 * width
    feed = 2 * width * hidden + hidden + width
    return attention * (2 if cross else 1) + feed + 2 * width * (3 if cross else 2)


ROBERTA_LAYER = 7_087_872
# Word vectors, 512 positions and their norm; dense, norm and the bias of the output.
ROBERTA_REST = 50_265 * 768 + 512 * 768 + 2 * 768 + (768 * 768 + 768 + 2 * 768 + 50_265)
ADAPTIVE = 20_000 * 1024 + 40_000 * 256 + 207_744 * 64 + (1024 + 256 + 64) * 1024 + 2 * 1024

BY_HAND = {
    "roberta-8": ROBERTA_REST + 8 * ROBERTA_LAYER,
    "roberta-12": ROBERTA_REST + 12 * ROBERTA_LAYER,
    "roberta-16": ROBERTA_REST + 16 * ROBERTA_LAYER,
    # Hugging Face counts 124,697,433: two positions for padding and one token type more, 3 * 768.
    "roberta-base": 124_697_433 - 3 * 768,
    "value-aware-lm": 267_744 * 512 + 6 * layer(512, 2048) + 2 * 512,
    "abc-lm-16": ADAPTIVE + 16 * layer(1024, 4096),
    "abc-lm-32": ADAPTIVE + 32 * layer(1024, 4096),
    "translation-wmt14": 32_000 * 512 + 6 * layer(512, 2048) + 6 * layer(512, 2048, cross=True),
    "translation-iwslt14": 30_000 * 512 + 6 * layer(512, 1024) + 6 * layer(512, 1024, cross=True),
    "attnlab-mlm": 8_000 * 256 + 512 * 256 + 512 + 6 * layer(256, 1024) + (256 * 256 + 256 + 512 + 8_000),
    "attnlab-lm": 8_000 * 256 + 512 * 256 + 6 * layer(256, 1024) + 512,
    "attnlab-translation": 8_000 * 256 + 3 * layer(256, 512) + 3 * layer(256, 512, cross=True) + 2 * 512,
}


@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_counted_by_hand(name: str) -> None:
    assert count_parameters(named_config(name)) == BY_HAND[name]


def test_the_papers_sizes() -> None:
    assert layer(768, 3072) == ROBERTA_LAYER
    # OVA, A.2: "number of model parameters: 156M".
    assert round(BY_HAND["value-aware-lm"] / 1e6) == 156
    # Baevski and Auli (2019): 247M.
    assert round(BY_HAND["abc-lm-16"] / 1e6) == 247
    # AG, Table 10: 16 heads on a width of 768.
    assert named_config("roberta-16").head_width == 48
    assert {named_config(f"roberta-{n}").head_width for n in (8, 12)} == {64}
    # ABC, Table 9.
    lm = named_config("abc-lm-32")
    assert (lm.heads, lm.head_width, lm.hidden_width, lm.layer_dropout) == (8, 128, 4096, 0.2)
    small = named_config("attnlab-mlm")
    assert (small.layers, small.heads, small.head_width, small.width) == (6, 8, 32, 256)


def test_roberta_base_is_counted_as_hugging_face_counts() -> None:
    from transformers import RobertaConfig, RobertaForMaskedLM

    with torch.device("meta"):
        theirs = RobertaForMaskedLM(RobertaConfig(vocab_size=50_265, max_position_embeddings=514, type_vocab_size=1))
    assert sum(p.numel() for p in theirs.parameters()) - count_parameters(named_config("roberta-base")) == 3 * 768


@pytest.mark.parametrize("name", CONFIGS)
def test_json_round_trip(name: str) -> None:
    config = replace(named_config(name), self_attention=("softmax",) * named_config(name).depth("encoder"))
    assert config_from_dict(json.loads(json.dumps(config_to_dict(config)))) == config


def test_a_config_is_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        BASE.width = 24  # type: ignore[misc]


@pytest.mark.parametrize(
    ("field", "close"),
    [("head", None), ("layer", "layers"), ("layer_drop", "layer_dropout"), ("zzz", "the fields are")],
)
def test_unknown_fields_are_refused(field: str, close: str | None) -> None:
    values = {**config_to_dict(BASE), field: "linear"}
    if close is None:
        assert config_from_dict(values) == BASE
        return
    with pytest.raises(ValueError, match=f"no field '{field}'.*{close}"):
        config_from_dict(values)


def test_missing_fields_are_named() -> None:
    with pytest.raises(ValueError, match="needs width, heads"):
        config_from_dict({"kind": "decoder", "vocab": 7, "layers": 1})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "both"}, "kind must be one of encoder, decoder, encoder-decoder, got 'both'"),
        ({"norm": "sandwich"}, "norm must be one of pre, post"),
        ({"width": 13}, "multiple of heads, got 13 and 3"),
        ({"layers": 0}, "layers must be a positive int, got 0"),
        ({"vocab": True}, "vocab must be a positive int, got True"),
        ({"positions": "rotary", "width": 9}, "head width must be even, got 3"),
        ({"positions": "sinusoidal", "width": 9}, "width must be even, got 9"),
        ({"dropout": 1.0}, r"dropout must lie in \[0, 1\), got 1.0"),
        ({"self_attention": ("softmax",)}, "names 1 mechanisms for 2 layers"),
        ({"decoder_layers": 3}, "belongs to an encoder-decoder; for kind 'encoder' use layers"),
        ({"cutoffs": (5, 5)}, "must rise strictly inside"),
        ({"cutoffs": (5, 13)}, "must rise strictly inside"),
        ({"cutoffs": (5,), "tied": False}, "tied adaptive softmax"),
        ({"cutoffs": (5, 7), "adaptive_factor": 5}, "leaves no width"),
    ],
)
def test_impossible_settings_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(BASE, **change)


def test_an_unknown_name_lists_its_neighbours() -> None:
    with pytest.raises(ValueError, match=r"did you mean .*'roberta-12'"):
        named_config("roberta-13")


def test_an_unknown_mechanism_is_refused_when_the_model_is_made() -> None:
    with pytest.raises(ValueError, match="no mechanism named 'softmaks'"):
        Transformer(replace(BASE, self_attention="softmaks"))
