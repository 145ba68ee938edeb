"""What a reader must know before believing a comparison: untrained mechanisms, a model that was not made of softmax."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from attnlab.adapters import LoadedModel, adapter_of
from attnlab.attention import Mechanism
from attnlab.evaluation.quality import Windows, quality, quality_label, quality_text
from attnlab.registry import spec_of

__all__ = ["own_attention_warnings", "untrained_warnings"]


def untrained_warnings(mechanisms: Mapping[str, Mechanism]) -> list[str]:
    """A sentence, without its full stop, for each mechanism that learns and has not learned here.

    The mechanisms have answered a call, so that they have made their parameters.
    """
    return [
        f"{spec} has parameters of its own, which no training has touched here: it shows how it starts"
        for spec, mech in mechanisms.items()
        if isinstance(mech, nn.Module) and next(mech.parameters(), None) is not None
    ]


def own_attention_warnings(loaded: LoadedModel, windows: Windows, *, batch: int) -> list[str]:
    """A sentence for a model that attends by other mechanisms than softmax, with its own quality on the text."""
    adapter = adapter_of(loaded.model)
    specs = sorted({spec_of(conversion.mechanism) for conversion in adapter.conversions()})
    if not specs:
        return []
    measured: dict[str, Any] | None = quality(loaded, windows, batch=batch)
    shown = ""
    if measured is not None:
        value = quality_text(measured)
        shown = f", with which its {quality_label(measured['name'])} on this text is {value}"
    return [
        f"this model's own attention is {', '.join(specs)} in {len(adapter.conversions())} of {len(adapter.sites())} "
        f"layers{shown}; every row replaces it, that of softmax too, which the model was not made for"
    ]
