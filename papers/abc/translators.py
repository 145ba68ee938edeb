"""The translators of Tables 3, 5 and 7: what they are made of, and how they are trained."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn

from attnlab.models import Transformer, named_config

__all__ = ["LONGEST", "AbcMtConfig", "Variant", "build"]

# N of Linformer: the longest sequence in training and in decoding.
LONGEST = 128


@dataclass(frozen=True)
class Variant:
    """A row: its name, the slots of cross and causal attention, and the specs that make them."""

    model: str
    cross: int | None = None
    causal: int | None = None
    cross_spec: str = "softmax"
    causal_spec: str = "softmax"
    self_spec: str = "softmax"

    @property
    def key(self) -> str:
        """The row in one word, which is also the name of its file."""
        sizes = (self.cross, self.causal) if self.cross is not None else ()
        return "-".join(str(part) for part in (self.model, *sizes))


@dataclass(frozen=True)
class AbcMtConfig:
    """Table 10's settings, scaled down; the paper's are 6 layers of width 512 and 32k pieces on 4.5 M pairs.

    The vocabulary is small on purpose: it makes captions about as long as the paper's sentences, in tokens. Products
    have no biases and norms no gains: of updates as small as these they are a quarter.
    """

    vocab: int = 1000
    width: int = 128
    heads: int = 4
    layers: int = 2
    hidden: int = 512
    dropout: float = 0.1
    tokens: int = 2048
    # At most; the schedule ends where the time does. Models that are compared learn side by side, equally long.
    steps: int = 6000
    widths: tuple[int, ...] = (24, 32, 48)
    lr: float = 2.5e-3
    warmup: int = 400
    # The paper's is "inverse_sqrt"; this one ends at zero, which suits a short training.
    schedule: str = "cosine"
    label_smoothing: float = 0.1
    weight_decay: float = 0.01
    clip: float = 1.0
    # On a GPU updates are computed in bfloat16, from weights of float32.
    half: bool = True
    beams: int = 5
    penalty: float = 0.6
    # The last so many snapshots are averaged.
    averaged: int = 5
    snapshots_per_epoch: int = 2
    # Snapshots from one look at the validation set to the next.
    look: int = 3
    # Tokens of the validation set that a look takes in, at most.
    tokens_held_out: int = 65536
    # Outputs are cut there.
    longest: int = LONGEST
    streams: int = 12
    decode_batch: int = 3100
    # Sentences of the held-out sets; None: all.
    held_out: int | None = None


def build(config: AbcMtConfig, variant: Variant, *, vocab: int, seed: int) -> Transformer:
    """The untrained model of a row; all rows of a seed start from the same weights, but for those of their control."""
    torch.manual_seed(seed)
    model = Transformer(
        replace(
            named_config("attnlab-translation"),
            vocab=-(-vocab // 8) * 8,
            width=config.width,
            heads=config.heads,
            layers=config.layers,
            hidden=config.hidden,
            dropout=config.dropout,
            self_attention=_seeded(variant.self_spec, seed),
            causal_attention=_seeded(variant.causal_spec, seed),
            cross_attention=_seeded(variant.cross_spec, seed),
            bias=False,
        )
    )
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            for name in ("weight", "bias"):
                module.register_parameter(name, None)
    return model


def _seeded(spec: str, seed: int) -> str:
    """The spec with a seed for what is learned; that of random control stays, so that seeds can be stacked."""
    return f"{spec},seed={seed}" if spec.startswith(("abc-mlp", "abc-linformer")) else spec
