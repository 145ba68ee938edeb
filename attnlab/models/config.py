"""A transformer's settings: one frozen dataclass that refuses unknown fields, and JSON in and out."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["FIELDS", "Kind", "TransformerConfig", "config_from_dict", "config_to_dict", "specs_per_layer"]

Kind = Literal["encoder", "decoder", "cross"]

Specs = str | tuple[str, ...]

# The config's field that names a kind's mechanisms.
FIELDS: dict[Kind, str] = {"encoder": "self_attention", "decoder": "causal_attention", "cross": "cross_attention"}

CHOICES = {
    "kind": ("encoder", "decoder", "encoder-decoder"),
    "norm": ("pre", "post"),
    "positions": ("learned", "sinusoidal", "rotary"),
    "activation": ("gelu", "gelu-tanh", "relu"),
    "head": ("linear", "mlm", "none"),
    "init": ("normal", "xavier"),
}


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """What a transformer is made of. An attention field is one spec string for every layer, or one per layer.

    >>> TransformerConfig(kind="decoder", vocab=100, width=64, heads=4, layers=2).head_width
    16
    """

    kind: str
    vocab: int
    width: int
    heads: int
    layers: int
    # Encoder-decoders only: the decoder's depth where it differs from ``layers``.
    decoder_layers: int | None = None
    # The feed-forward width; None means 4 * width.
    hidden: int | None = None
    # How many learned positions there are; sinusoidal and rotary positions have no such limit.
    max_length: int = 512

    self_attention: Specs = "softmax"
    causal_attention: Specs = "softmax"
    cross_attention: Specs = "softmax"

    norm: str = "pre"
    # A last normalisation after the stack; None means: with pre-norm.
    final_norm: bool | None = None
    norm_eps: float = 1e-5
    positions: str = "learned"
    # Multiply token embeddings by sqrt(width) (Vaswani et al., 2017, 3.4).
    embed_scale: bool = False
    # Normalise after adding the positions (BERT, RoBERTa).
    embed_norm: bool = False
    activation: str = "gelu"
    # Biases of the linear maps inside the layers.
    bias: bool = True

    # mlm: dense, GELU, norm, then the vocabulary with a bias (RoBERTa's). none: the hidden states are the output.
    head: str = "linear"
    # The output layer is the embedding matrix.
    tied: bool = True
    # Not empty: adaptive input embeddings and adaptive softmax, tied (Baevski and Auli, 2019).
    cutoffs: tuple[int, ...] = ()
    adaptive_factor: int = 4

    dropout: float = 0.0
    activation_dropout: float = 0.0
    # Before the adaptive softmax and inside its rare bands.
    adaptive_dropout: float = 0.0
    # Probability that a layer is skipped in training (LayerDrop; Fan et al., 2020).
    layer_dropout: float = 0.0
    # normal: N(0, 0.02) everywhere (BERT, RoBERTa, GPT-2). xavier: fairseq's.
    init: str = "normal"

    def __post_init__(self) -> None:
        _check_choices(self)
        _check_sizes(self)
        _check_adaptive(self)
        for name in ("dropout", "activation_dropout", "adaptive_dropout", "layer_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must lie in [0, 1), got {getattr(self, name)}")
        for kind in ("encoder", "decoder", "cross"):
            specs_per_layer(self, kind)

    @property
    def head_width(self) -> int:
        """The width of one attention head."""
        return self.width // self.heads

    @property
    def hidden_width(self) -> int:
        """The width inside the feed-forward layers."""
        return 4 * self.width if self.hidden is None else self.hidden

    @property
    def has_final_norm(self) -> bool:
        """Whether a stack ends in a normalisation."""
        return self.norm == "pre" if self.final_norm is None else self.final_norm

    def depth(self, kind: Kind) -> int:
        """How many attention layers of this kind there are."""
        if kind == "encoder":
            return 0 if self.kind == "decoder" else self.layers
        if self.kind == "encoder" or (kind == "cross" and self.kind == "decoder"):
            return 0
        return self.layers if self.decoder_layers is None else self.decoder_layers


def specs_per_layer(config: TransformerConfig, kind: Kind) -> tuple[str, ...]:
    """The mechanism of each layer of a kind, as spec strings."""
    name = FIELDS[kind]
    specs, depth = getattr(config, name), config.depth(kind)
    if isinstance(specs, str):
        return (specs,) * depth
    if not isinstance(specs, tuple) or not all(isinstance(spec, str) for spec in specs):
        raise ValueError(f"{name} must be a spec string or a tuple of them, got {specs!r}")
    if len(specs) != depth:
        raise ValueError(f"{name} names {len(specs)} mechanisms for {depth} layers; give one spec, or one per layer")
    return specs


def config_to_dict(config: TransformerConfig) -> dict[str, Any]:
    """The config as JSON-ready values; ``config_from_dict`` is the inverse."""
    return {name: list(v) if isinstance(v, tuple) else v for name, v in dataclasses.asdict(config).items()}


def config_from_dict(values: Mapping[str, Any]) -> TransformerConfig:
    """The config these values describe; an unknown field is an error that names it and its neighbours.

    >>> config_from_dict({"kind": "decoder", "vocabulary": 7})
    Traceback (most recent call last):
    ...
    ValueError: a transformer has no field 'vocabulary'; did you mean 'vocab'?
    """
    fields = {f.name: f for f in dataclasses.fields(TransformerConfig)}
    for name in values:
        if name not in fields:
            close = difflib.get_close_matches(name, fields, n=3, cutoff=0.5)
            hint = f"did you mean {' or '.join(map(repr, close))}?" if close else f"the fields are {', '.join(fields)}"
            raise ValueError(f"a transformer has no field {name!r}; {hint}")
    missing = [f.name for f in fields.values() if f.default is dataclasses.MISSING and f.name not in values]
    if missing:
        raise ValueError(f"a transformer needs {', '.join(missing)}, which this config does not give")
    frozen: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}
    return TransformerConfig(**frozen)


def _check_choices(config: TransformerConfig) -> None:
    for name, allowed in CHOICES.items():
        if getattr(config, name) not in allowed:
            raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {getattr(config, name)!r}")


def _check_sizes(config: TransformerConfig) -> None:
    for name in ("vocab", "width", "heads", "layers", "decoder_layers", "hidden", "max_length", "adaptive_factor"):
        value = getattr(config, name)
        if value is None and name in ("decoder_layers", "hidden"):
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be a positive int, got {value!r}")
    if config.width % config.heads:
        raise ValueError(f"width must be a multiple of heads, got {config.width} and {config.heads}")
    if config.positions == "rotary" and config.head_width % 2:
        raise ValueError(f"rotary positions turn pairs, so the head width must be even, got {config.head_width}")
    if config.positions == "sinusoidal" and config.width % 2:
        raise ValueError(f"sinusoidal positions come in pairs, so the width must be even, got {config.width}")
    if config.decoder_layers is not None and config.kind != "encoder-decoder":
        raise ValueError(f"decoder_layers belongs to an encoder-decoder; for kind {config.kind!r} use layers")


def _check_adaptive(config: TransformerConfig) -> None:
    cuts = config.cutoffs
    if not cuts:
        return
    if not isinstance(cuts, tuple) or list(cuts) != sorted(set(cuts)) or cuts[0] < 1 or cuts[-1] >= config.vocab:
        raise ValueError(f"cutoffs must rise strictly inside (0, {config.vocab}), got {cuts}")
    if config.head != "linear" or not config.tied:
        raise ValueError("adaptive embeddings (cutoffs) come with the tied adaptive softmax: head='linear', tied=True")
    if config.width // config.adaptive_factor ** len(cuts) < 1:
        raise ValueError(
            f"width {config.width} divided by adaptive_factor {config.adaptive_factor} once per cutoff leaves no width "
            f"for the last of {len(cuts) + 1} bands"
        )
