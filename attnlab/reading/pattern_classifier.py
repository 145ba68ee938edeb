"""Which of five patterns a head shows (section 3.1 of Effective; Kovaleva et al., 2019), by small ConvNets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from attnlab.adapters import record
from attnlab.reading.effective import effective_attention
from attnlab.reading.pattern_data import CLASSES, picture
from attnlab.reading.pattern_net import PatternNet
from attnlab.shapes import Bool, Float, Int

__all__ = [
    "PatternNet",
    "classify",
    "load_classifier",
    "pattern_shares",
    "pattern_table",
]

SHIPPED = Path(__file__).resolve().parent.parent / "shipped" / "patterns"


@torch.no_grad()
def classify(
    maps: Float[Tensor, "b h n n"], *, key_visible: Bool[Tensor, "b n"] | None = None, net: PatternNet | None = None
) -> Int[Tensor, "b h"]:
    """The index in ``CLASSES`` of every head's map; padding is cut away first. By the shipped network by default."""
    net = net or load_classifier()
    rows = []
    for i, item in enumerate(maps):
        if key_visible is not None:
            item = item[:, key_visible[i]][:, :, key_visible[i]]
        rows.append(net(picture(item.cpu()).to(device_of(net))).argmax(-1).to(maps.device))
    return torch.stack(rows)


def pattern_shares(classes: Int[Tensor, "*n"]) -> dict[str, float]:
    """The percentage of maps in each class, as in Table 2.

    >>> pattern_shares(torch.tensor([0, 0, 1, 4]))["vertical"]
    50.0
    """
    counts = torch.bincount(classes.flatten(), minlength=len(CLASSES))
    return {name: 100 * int(n) / max(1, int(counts.sum())) for name, n in zip(CLASSES, counts, strict=True)}


@torch.no_grad()
def pattern_table(
    model: nn.Module, batches: Iterable[Mapping[str, Tensor]], *, net: PatternNet | None = None
) -> list[dict[str, Any]]:
    """Table 2 for any encoder and data: the shares of the classes among all heads' maps, standard beside effective.

    ``batches`` hold input_ids and attention_mask; ``maps`` is how many were classified.
    """
    net = net or load_classifier()
    answers: dict[str, list[Tensor]] = {"standard": [], "effective": []}
    for batch in batches:
        with record(model) as trace:
            model(**batch)
        for layer in trace:
            flags = layer.call.key_visible
            by_reading = {"standard": layer.weights(), "effective": effective_attention(layer).weights}
            for name, maps in by_reading.items():
                answers[name].append(classify(maps, key_visible=flags, net=net).flatten())
    if not answers["standard"]:
        raise ValueError("pattern_table was given no batch")
    joined = {name: torch.cat(parts) for name, parts in answers.items()}
    return [{"attention": name, **pattern_shares(classes), "maps": len(classes)} for name, classes in joined.items()]


def device_of(net: PatternNet) -> torch.device:
    return net.out.weight.device


def load_classifier(path: Path | str | None = None) -> PatternNet:
    """The shipped network, or one saved with ``safetensors``."""
    from safetensors.torch import load_file

    path = Path(path) if path else SHIPPED / "classifier.safetensors"
    if not path.is_file():
        raise ValueError(f"no pattern classifier at {path}")
    stored = load_file(path)
    net = PatternNet(len(stored["out.weight"]) // len(CLASSES))
    net.load_state_dict({name: t.float() for name, t in stored.items()})
    return net.eval()
