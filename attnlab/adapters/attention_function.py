"""The attention function that transformers calls in a swapped, recorded or converted model.

transformers looks the function up by a name in the model's config, for each call. Ours is named after the one whose
place it takes, "attnlab|sdpa": a module that is neither in a context nor converted (of another model that shares the
config) attends as before. A name that a user gives, "attnlab:top-r:r=64" (``adapters.implementation``), stands for the
mechanism after the colon, and may be the one whose place is taken.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from attnlab.adapters.adopted import PREFIX, adopted_by, adopted_mechanism, masks_of, place_of_adopted
from attnlab.adapters.calls import make_call
from attnlab.adapters.masks import carrying_mask
from attnlab.adapters.module_state import Installed, OpenSite, forward_of, installed_in, open_site, uncompiled
from attnlab.adapters.outside_interface import family_of, own_attention
from attnlab.adapters.protocol import Site
from attnlab.adapters.whole_layers import HANDED, traced_attention
from attnlab.attention import AttentionCall, Mechanism
from attnlab.errors import placed
from attnlab.hooks import ADOPTED
from attnlab.mechanisms.softmax import Softmax
from attnlab.models.open_contexts import refuse_replica

__all__ = ["INTERFACE", "function_in_place_of", "register_function", "registered_name"]

# The object of transformers through which a module finds its attention function.
INTERFACE = "ALL_ATTENTION_FUNCTIONS"


def registered_name(own: str) -> str:
    """The name of our function in place of ``own``; a kernel that is neither SDPA nor eager gives way to SDPA."""
    own = own if own in ("sdpa", "eager") or own.startswith(ADOPTED) else "sdpa"
    register_function(PREFIX + own, own)
    return PREFIX + own


def register_function(name: str, own: str) -> None:
    """Let transformers find our function in place of ``own`` under a name, with masks that carry their structure."""
    from transformers import AttentionInterface, AttentionMaskInterface

    if name not in AttentionInterface():
        AttentionMaskInterface.register(name, uncompiled(carrying_mask(AttentionMaskInterface()[masks_of(own)])))
        AttentionInterface.register(name, function_in_place_of(own))


@functools.cache
def function_in_place_of(own: str) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """Our attention function in place of ``own``: "sdpa", "eager" or an adopted mechanism's."""

    @uncompiled
    def untraced(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        opened = open_site(module)
        if opened is not None and opened.direct is not None and not getattr(module, "_is_replica", False):
            answer = opened.direct(module, query, key, value, attention_mask, kwargs)
            if answer is not None:
                return answer
        installed = installed_in(module)
        if opened is None and installed is None and adopted_mechanism(own) is None:
            return _own_attention(module, own)(module, query, key, value, attention_mask, **kwargs)
        with _errors_explained(_place(module, opened, installed).name, query):
            return _attend(opened, installed, own, module, query, key, value, attention_mask, kwargs)

    def attention_function(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        if HANDED in kwargs and torch.compiler.is_compiling():
            plain = attention_mask is None and kwargs.get("is_causal") is None and kwargs.get("position_bias") is None
            installed = installed_in(module)
            # No mask means causality to SDPA alone.
            if plain and installed is not None and masks_of(own) == "sdpa" and query.shape[2] == key.shape[2]:
                return traced_attention(installed, query, key, value, kwargs[HANDED], kwargs.get("scaling"))
        return untraced(module, query, key, value, attention_mask, **kwargs)

    return attention_function


def _attend(
    opened: OpenSite | None,
    installed: Installed | None,
    own: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    kwargs: dict[str, Any],
) -> tuple[Tensor, Tensor | None]:
    """Attend as the contexts around a module, or its conversion, say; (output, W where it was asked for)."""
    inputs = _inputs_of_call(opened, installed, kwargs)
    memory = inputs.get("memory")
    place = _place(module, opened, installed)
    call = make_call(
        module,
        place,
        query,
        key,
        value,
        attention_mask,
        x=inputs.get("x"),
        own=masks_of(own),
        memory=memory,
        cached_keys=None if opened is None else opened.cached_keys(),
        **kwargs,
    )
    mech, by_model = _mechanism_of_call(
        opened, installed, adopted_by(module, own), place.name, kwargs.get("dropout") or 0.0
    )
    notes = opened is not None and any(frame.note or frame.direct for frame in opened.frames)
    refuse_replica(module, place.name, notes=notes, mechanism=mech)
    output, weights = _attended(opened, inputs, call, mech, own if by_model else "", kwargs), None
    if output is not None:
        pass
    elif by_model:
        out, weights = _own_attention(module, masks_of(own))(module, query, key, value, attention_mask, **kwargs)
        output = out.transpose(1, 2)
    else:
        mech, call, output = _run_mechanism(mech, call, installed, memory)
        weights = mech.weights(call) if inputs.get("output_attentions") else None
    if opened is not None:
        _note(opened, call, mech, output)
    # The model continues from the noted tensor, so that its predictions have a gradient by a recorded output.
    return output.transpose(1, 2).contiguous(), weights


def _inputs_of_call(opened: OpenSite | None, installed: Installed | None, kwargs: dict[str, Any]) -> dict[str, Any]:
    """What the module was given in the forward pass under way; nothing where it has attended in that pass before."""
    thread = threading.get_ident()
    kept = [holder.inputs.pop(thread, None) for holder in (opened, installed) if holder is not None]
    if HANDED in kwargs and installed is not None:
        installed.handed_input = True
        return {"x": kwargs.pop(HANDED)}
    inputs = kept[-1] if kept else {}
    if inputs is None and installed is not None and installed.has_own_cache:
        from attnlab.adapters.memory_cache import refuse_second_call

        refuse_second_call(installed.mechanism)
    return inputs or {}


def _attended(
    opened: OpenSite | None,
    inputs: dict[str, Any],
    call: AttentionCall,
    mech: Mechanism,
    own: str,
    kwargs: dict[str, Any],
) -> Tensor | None:
    """The output by the innermost context that computes it in the mechanism's place; None where none does.

    ``own`` names the model's own attention where it is to attend: if that is eager, it also returns W.
    """
    asks_weights = inputs.get("output_attentions") or own == "eager"
    if opened is None or asks_weights or inputs.get("memory") is not None or kwargs.get("dropout"):
        return None
    for frame in reversed(list(opened.frames)):
        output = None if frame.attend is None else frame.attend(opened.site, call, mech)
        if output is not None:
            return output
    return None


def _note(opened: OpenSite, call: AttentionCall, mech: Mechanism, output: Tensor) -> None:
    """Show every context a call that was answered."""
    for frame in opened.frames:
        if frame.note is not None:
            frame.note(opened.site, call, mech, output)


def _own_attention(module: nn.Module, implementation: str) -> Callable[..., Any]:
    """The function this module would call under ``implementation``, looked up as its own forward does."""
    if family_of(module) is not None:
        return own_attention
    forward = forward_of(module)
    eager = [name for name in forward.__code__.co_names if "eager" in name]
    default = forward.__globals__[eager[0]] if eager else None
    function = forward.__globals__[INTERFACE].get_interface(implementation, default)
    if function is None:
        raise ValueError(f"{type(module).__name__} has no {implementation!r} attention of its own to fall back to")
    return function


def _place(module: nn.Module, opened: OpenSite | None, installed: Installed | None) -> Site | Installed:
    if installed is not None:
        return installed
    return place_of_adopted(module) if opened is None else opened.site


def _mechanism_of_call(
    opened: OpenSite | None, installed: Installed | None, adopted: Mechanism | None, place: str, dropped: float
) -> tuple[Mechanism, bool]:
    """The innermost mechanism, and whether the model's own attention computes it: always where none was put in."""
    frame = None if opened is None else opened.replacement()
    mech = adopted if frame is None else frame.mechanism
    if frame is None and installed is not None:
        return installed.mechanism, False
    if mech is None:
        return Softmax(), True
    if not dropped or (frame is not None and frame.skip_dropout) or (opened is not None and opened.evicts):
        return mech, False
    if isinstance(mech, Softmax):
        return mech, True
    raise ValueError(
        f"{place} drops attention weights with p={dropped} in training, which {mech!r} does not do; call model.eval(), "
        "set the model's attention dropout to 0, or swap with dropout='skip'"
    )


@contextmanager
def _errors_explained(place: str, query: Tensor) -> Iterator[None]:
    """Refusals with the name of the layer; on the meta device, what cannot be computed there is one too."""
    try:
        yield
    except ValueError as error:
        raise placed(place, error) from error
    except (NotImplementedError, RuntimeError) as error:
        if not query.is_meta:
            raise
        raise ValueError(
            f"{place}: this attention needs numbers, but the model is on the meta device and holds none ({error}); "
            "load its weights first"
        ) from error


def _run_mechanism(
    mech: Mechanism, call: AttentionCall, installed: Installed | None, memory: Any
) -> tuple[Mechanism, AttentionCall, Tensor]:
    """The mechanism that W can be asked of, the call that was answered, and the output."""
    if installed is not None and mech is installed.mechanism:
        call = _with_handed_memory(installed, call)
    return (mech, call, mech(call)) if memory is None else memory.answer(call)


def _with_handed_memory(installed: Installed, call: AttentionCall) -> AttentionCall:
    """The call with the previous layer's memory, if the mechanism reads it (LUNA), and this layer's handed on."""
    thread = threading.get_ident()
    if call.k.shape[2] == 0:
        return call
    if installed.handed is not None:
        if thread not in installed.handed:
            raise ValueError(
                f"{installed.mechanism!r} reads the previous layer's memory, but that layer has not just run; turn off "
                "gradient checkpointing, which runs layers alone"
            )
        call = replace(call, memory=installed.handed.pop(thread).to(call.q.dtype))
    if installed.hands_on is not None:
        memory = installed.mechanism.memory_after(call)
        assert memory is not None, "a mechanism that reads a memory makes one"
        installed.hands_on[thread] = memory
    return call
