"""A mechanism by transformers' own option: ``attn_implementation="attnlab:top-r:r=64"``.

``import attnlab`` makes transformers ask ``adopt`` about such a name (``attnlab.hooks``). ``from_pretrained``,
``pipeline``, ``Trainer`` and ``generate`` then attend as inside ``al.swap``; ``model.set_attn_implementation("sdpa")``
undoes it. What the option cannot do is refused: a mechanism that learns parameters (``al.convert`` gives it some), and
a model with attention that does not go through transformers' AttentionInterface.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from attnlab.adapters.adopted import adopted_mechanism
from attnlab.adapters.attention_function import register_function
from attnlab.adapters.protocol import adapter_of, refuse_partial
from attnlab.hooks import ADOPTED

__all__ = ["adopt"]


def adopt(model: Any, name: str) -> None:
    """Register the attention function that ``name`` asks for, or say why ``model`` cannot have it.

    transformers calls this while it makes a model, too. What can only be seen of a whole model, whether all of its
    attention is reached, is looked at before the first forward pass.
    """
    mech = adopted_mechanism(name)
    if isinstance(mech, nn.Module) or "no-x" in (mech.cannot() if mech is not None else {}):
        raise ValueError(
            f"attn_implementation={name!r}: {mech!r} learns parameters or reads hidden states, which this option "
            f"cannot give it; load the model as it is, then al.convert(model, {name.removeprefix(ADOPTED)!r})"
        )
    if not model._can_set_attn_implementation():
        raise ValueError(
            f"attn_implementation={name!r}: {type(model).__name__} does not attend through transformers' "
            "AttentionInterface; load it as it is, then use al.swap(model, ...) if that takes it"
        )
    register_function(name, name)
    _check_before_first_pass(model)


def _check_before_first_pass(model: nn.Module) -> None:
    """Refuse at its first forward pass a model that also attends outside of the interface."""

    def check(module: nn.Module, _inputs: Any) -> None:
        hook.remove()
        refuse_partial(module, adapter_of(module).sites())

    hook = model.register_forward_pre_hook(check)
