"""Names of attention functions in a model's config, and the mechanism that a user's name stands for.

"attnlab|sdpa" is our function in place of SDPA (``attention_function``); "attnlab:top-r:r=64" is a name that a user
gives as ``attn_implementation`` (``implementation``).
"""

from __future__ import annotations

import functools

from torch import nn

from attnlab.adapters.protocol import Site
from attnlab.attention import Mechanism
from attnlab.hooks import ADOPTED
from attnlab.registry import mechanism
from attnlab.trace import Kind

__all__ = ["PREFIX", "adopted_by", "adopted_mechanism", "masks_of", "place_of_adopted"]

PREFIX = "attnlab|"


def masks_of(own: str) -> str:
    """The attention of transformers that ``own`` is, or by whose masks an adopted mechanism attends."""
    return "sdpa" if own.startswith(ADOPTED) else own


@functools.cache
def adopted_mechanism(own: str) -> Mechanism | None:
    """The mechanism that an attn_implementation names; None for "sdpa" and "eager"."""
    return mechanism(own.removeprefix(ADOPTED)) if own.startswith(ADOPTED) else None


def adopted_by(module: nn.Module, own: str) -> Mechanism | None:
    """The mechanism that ``own`` names, as this module's layer uses it."""
    mech = adopted_mechanism(own)
    if mech is None:
        return None
    place = place_of_adopted(module)
    if place.layer < 0 and mech.in_layer(place.kind, 0) is not mech:
        raise ValueError(
            f"{mech!r} differs from layer to layer, and {type(module).__name__} does not know the number of its layer; "
            "use al.swap"
        )
    return mech.in_layer(place.kind, place.layer)


def place_of_adopted(module: nn.Module) -> Site:
    """The site of a module outside of contexts; its layer is -1 where the module does not know it."""
    kind: Kind = "decoder" if getattr(module, "is_causal", False) else "encoder"
    layer = getattr(module, "layer_idx", None)
    return Site(module, kind, -1 if layer is None else layer, type(module).__name__, None)
