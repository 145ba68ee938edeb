"""The papers' models by name: each entry is a config, and ``dataclasses.replace`` changes a field of it."""

from __future__ import annotations

import difflib
from dataclasses import replace

from attnlab.models.config import TransformerConfig

__all__ = ["CONFIGS", "named_config"]

# The vocabulary of Liu et al. (2019), which AG keeps.
ROBERTA_VOCAB = 50_265
# WikiText-103 by words, with fairseq's special symbols: OVA's 156M and ABC's 268K.
WIKITEXT_103_VOCAB = 267_744


def _roberta(layers: int, heads: int) -> TransformerConfig:
    """AG, Table 10: width 768 and feed-forward 4 x 768; everything else as in Liu et al. (2019)."""
    return TransformerConfig(
        kind="encoder",
        vocab=ROBERTA_VOCAB,
        width=768,
        heads=heads,
        layers=layers,
        max_length=512,
        norm="post",
        embed_norm=True,
        head="mlm",
        dropout=0.1,
    )


def _value_aware_lm() -> TransformerConfig:
    """OVA, A.2: 6 layers, width 512, heads of 64, 156M parameters; the rest is fairseq's transformer_lm."""
    return TransformerConfig(
        kind="decoder",
        vocab=WIKITEXT_103_VOCAB,
        width=512,
        heads=8,
        layers=6,
        hidden=2048,
        positions="sinusoidal",
        embed_scale=True,
        activation="relu",
        dropout=0.1,
        init="xavier",
    )


def _abc_lm(layers: int, layer_dropout: float) -> TransformerConfig:
    """ABC, Table 9, on Baevski and Auli (2019): adaptive inputs tied to the adaptive softmax, no last normalisation."""
    return TransformerConfig(
        kind="decoder",
        vocab=WIKITEXT_103_VOCAB,
        width=1024,
        heads=8,
        layers=layers,
        hidden=4096,
        positions="sinusoidal",
        embed_scale=True,
        activation="relu",
        final_norm=False,
        cutoffs=(20_000, 60_000),
        dropout=0.3,
        activation_dropout=0.1,
        adaptive_dropout=0.2,
        layer_dropout=layer_dropout,
        init="xavier",
    )


def _translation(vocab: int, hidden: int, dropout: float) -> TransformerConfig:
    """ABC, Table 10, on the base transformer of Vaswani et al. (2017): post-norm, one embedding tied three ways."""
    return TransformerConfig(
        kind="encoder-decoder",
        vocab=vocab,
        width=512,
        heads=8,
        layers=6,
        hidden=hidden,
        norm="post",
        positions="sinusoidal",
        embed_scale=True,
        activation="relu",
        dropout=dropout,
        init="xavier",
    )


_small = TransformerConfig(kind="encoder", vocab=8_000, width=256, heads=8, layers=6, dropout=0.1)

CONFIGS: dict[str, TransformerConfig] = {
    "roberta-8": _roberta(8, 12),
    "roberta-12": _roberta(12, 12),
    "roberta-16": _roberta(16, 16),
    "roberta-base": _roberta(12, 12),
    "value-aware-lm": _value_aware_lm(),
    "abc-lm-16": _abc_lm(16, layer_dropout=0.0),
    "abc-lm-32": _abc_lm(32, layer_dropout=0.2),
    "translation-wmt14": _translation(32_000, hidden=2048, dropout=0.1),
    "translation-iwslt14": _translation(30_000, hidden=1024, dropout=0.3),
    "attnlab-mlm": replace(_small, head="mlm", norm="post", embed_norm=True),
    "attnlab-lm": replace(_small, kind="decoder"),
    "attnlab-translation": replace(
        _small, kind="encoder-decoder", layers=3, hidden=512, positions="sinusoidal", embed_scale=True, init="xavier"
    ),
}


def named_config(name: str) -> TransformerConfig:
    """The config of this name.

    >>> named_config("roberta-16").head_width
    48
    """
    if name not in CONFIGS:
        close = difflib.get_close_matches(name, CONFIGS, n=3)
        hint = f"did you mean {' or '.join(map(repr, close))}? " if close else ""
        raise ValueError(f"no model named {name!r}; {hint}the names are {', '.join(CONFIGS)}")
    return CONFIGS[name]
