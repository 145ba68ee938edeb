"""The attention function that a model calls inside a context, and the switch that makes it call it.

transformers looks the function up by a name in the model's config, for each call. Ours is named after the one it
stands in for, "attnlab|sdpa": a module that is neither in a context nor converted (of another model that shares the
config) attends as before.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from attnlab.attention import AttentionCall, Mechanism
from attnlab.hf.masks import Seen, carrying_mask, seen_by
from attnlab.hf.sites import Site, own_attention
from attnlab.mechanisms.softmax import Softmax
from attnlab.trace import Kind

__all__ = [
    "Frame",
    "Installed",
    "attached",
    "install",
    "installed_in",
    "stand_in",
    "switch_for_good",
    "uninstall",
]

PREFIX = "attnlab|"
# What attention functions of some models are given that changes W in a way that no AttentionCall can say.
UNSUPPORTED = {
    "softcap": "soft-capped scores",
    "s_aux": "attention sinks",
    "indices": "keys chosen by an indexer",
    "block_indices": "blocks of keys chosen by an indexer",
    "cache": "a paged cache",
}
KEY_SOURCES = ("key_value_states", "encoder_hidden_states")
CACHES = ("past_key_values", "past_key_value")
INSTALLED = "_attnlab"

Note = Callable[[Site, AttentionCall, Mechanism, Tensor], None]


@dataclass(frozen=True, eq=False)
class Frame:
    """What one context asks of a site: to attend by a mechanism, to note its calls, or both."""

    mechanism: Mechanism | None = None
    note: Note | None = None
    skip_dropout: bool = False


# By thread, what the module under way was given: its hidden states do not reach the attention function.
Given = dict[int, dict[str, Any]]


@dataclass(eq=False)
class _Live:
    """A site inside at least one context; the innermost mechanism counts, every note is called."""

    site: Site
    frames: list[Frame] = field(default_factory=list)
    given: Given = field(default_factory=dict)
    hook: Any = None


@dataclass(eq=False)
class Installed:
    """What a converted module carries, for good: it is copied with the module, and so is the mechanism in it."""

    mechanism: Mechanism
    kind: Kind
    layer: int
    name: str
    drop_bias: bool = False
    # By thread, what the layer before has handed on; the object is shared with it. None where nothing comes.
    handed: dict[int, Tensor] | None = None
    # The same towards the next layer.
    hands_on: dict[int, Tensor] | None = None
    given: Given = field(default_factory=dict)
    hook: Any = None


_lock = threading.RLock()
_live: dict[nn.Module, _Live] = {}
# By id: the config (kept alive), what it said before the first context, and how many contexts are open.
_switched: dict[int, tuple[Any, str | None, int]] = {}


@contextmanager
def attached(model: nn.Module, frames: Mapping[Site, Frame]) -> Iterator[None]:
    """Attend as ``frames`` say until the context ends; contexts may end in any order."""
    with ExitStack() as undo:
        for config in _configs(model):
            _switch_on(config)
            undo.callback(_switch_off, config)
        for site, frame in frames.items():
            _attach(site, frame)
            undo.callback(_detach, site, frame)
        yield


def install(module: nn.Module, installed: Installed) -> None:
    """Make a module attend by a mechanism outside of any context."""
    setattr(module, INSTALLED, installed)
    installed.hook = module.register_forward_pre_hook(_uncompiled(_note_given), with_kwargs=True)


def uninstall(module: nn.Module) -> None:
    """Undo ``install``."""
    installed = installed_in(module)
    assert installed is not None
    installed.hook.remove()
    delattr(module, INSTALLED)


def installed_in(module: nn.Module) -> Installed | None:
    """What ``install`` put into the module."""
    return getattr(module, INSTALLED, None)


def stand_in(module: nn.Module) -> Mechanism | None:
    """The mechanism by which a module attends now; None where that is its own attention."""
    live, installed = _live.get(module), installed_in(module)
    swapped = [frame.mechanism for frame in (live.frames if live is not None else []) if frame.mechanism is not None]
    return swapped[-1] if swapped else None if installed is None else installed.mechanism


def switch_for_good(model: nn.Module, *, on: bool) -> None:
    """Make every config of the model name our function, or again the one it stands in for."""
    with _lock:
        for config in _configs(model):
            own = (config._attn_implementation or "eager").removeprefix(PREFIX)
            name = _registered(own) if on else own
            if id(config) in _switched:
                # An open context will put this back when it ends.
                _switched[id(config)] = (config, name, _switched[id(config)][2])
            else:
                _set_implementation(config, name)


def _attach(site: Site, frame: Frame) -> None:
    with _lock:
        live = _live.get(site.module)
        if live is None:
            live = _live[site.module] = _Live(site)
            live.hook = site.module.register_forward_pre_hook(_uncompiled(_note_given), with_kwargs=True)
        live.frames.append(frame)


def _detach(site: Site, frame: Frame) -> None:
    with _lock:
        live = _live[site.module]
        live.frames.remove(frame)
        if not live.frames:
            live.hook.remove()
            del _live[site.module]


def _configs(model: nn.Module) -> list[Any]:
    """Every config object that a module of the model consults, their sub-configs included."""
    found: dict[int, Any] = {}

    def add(config: Any) -> None:
        if config is None or id(config) in found or not hasattr(config, "_attn_implementation"):
            return
        found[id(config)] = config
        for name in getattr(config, "sub_configs", {}):
            add(getattr(config, name, None))

    for module in model.modules():
        add(getattr(module, "config", None))
    return list(found.values())


def _switch_on(config: Any) -> None:
    with _lock:
        _, before, count = _switched.get(id(config), (None, config._attn_implementation, 0))
        if count == 0:
            _set_implementation(config, _registered((before or "eager").removeprefix(PREFIX)))
        _switched[id(config)] = (config, before, count + 1)


def _switch_off(config: Any) -> None:
    with _lock:
        _, before, count = _switched[id(config)]
        if count > 1:
            _switched[id(config)] = (config, before, count - 1)
        else:
            del _switched[id(config)]
            _set_implementation(config, before)


def _set_implementation(config: Any, name: str | None) -> None:
    # A dict says "this config only": a plain name would spread to its sub-configs, which have their own.
    config._attn_implementation = {"": name}


def _registered(own: str) -> str:
    """The name of our function in place of ``own``; a kernel that is neither SDPA nor eager gives way to SDPA."""
    from transformers import AttentionInterface, AttentionMaskInterface

    own = own if own in ("sdpa", "eager") else "sdpa"
    name = PREFIX + own
    if name not in AttentionInterface():
        AttentionMaskInterface.register(name, carrying_mask(AttentionMaskInterface()[own]))
        AttentionInterface.register(name, _uncompiled(_standing_in_for(own)))
    return name


@functools.cache
def _uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """torch.compile would take one layer's site for that of all layers; what lies between them it may compile.

    Made when needed: torch's compiler takes long to import.
    """
    return torch.compiler.disable(function)


def _note_given(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    live, installed = _live.get(module), installed_in(module)
    names = _argument_names(type(module).forward)
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    for holder in (live, installed):
        if holder is None:
            continue
        kind = holder.kind if isinstance(holder, Installed) else holder.site.kind
        own_states = None if kind == "cross" else given.get(names[0])
        x = next((given[name] for name in KEY_SOURCES if given.get(name) is not None), own_states)
        noted = {"x": x, "output_attentions": given.get("output_attentions")}
        if isinstance(holder, Installed) and not _swapped(live):
            noted["memory"] = _memory_of(module, holder, next((given[n] for n in CACHES if n in given), None))
        holder.given[threading.get_ident()] = noted


@functools.cache
def _argument_names(forward: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(forward).parameters)[1:]


def _memory_of(module: nn.Module, installed: Installed, cache: Any) -> Any:
    """The bounded memory that this module has in the model's cache; None if it has none."""
    if cache is None or not hasattr(installed.mechanism, "make_cache"):
        return None
    from attnlab.hf.memory_cache import memory_layer

    return memory_layer(cache, getattr(module, "layer_idx", None), installed)


def _swapped(live: _Live | None) -> bool:
    return live is not None and any(frame.mechanism is not None for frame in live.frames)


def _standing_in_for(own: str) -> Callable[..., tuple[Tensor, Tensor | None]]:
    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        live, installed = _live.get(module), installed_in(module)
        if live is None and installed is None:
            return own_attention(module, own)(module, query, key, value, attention_mask, **kwargs)
        noted = [holder.given.pop(threading.get_ident(), {}) for holder in (live, installed) if holder is not None]
        given = noted[-1]
        memory = given.get("memory")
        place = live.site if installed is None and live is not None else installed
        assert place is not None
        call = _call(
            module, place, query, key, value, attention_mask, x=given.get("x"), own=own, memory=memory, **kwargs
        )
        mech, by_own = _chosen(live, installed, kwargs.get("dropout") or 0.0)
        weights = None
        if by_own:
            out, weights = own_attention(module, own)(module, query, key, value, attention_mask, **kwargs)
            attended = out.transpose(1, 2)
        else:
            try:
                if installed is not None and mech is installed.mechanism:
                    call = _with_memory(installed, call)
                if memory is None:
                    attended = mech(call)
                else:
                    mech, call, attended = memory.attend(call)
                if given.get("output_attentions"):
                    weights = mech.weights(call)
            except ValueError as error:
                raise ValueError(f"{place.name}: {error}") from error
        for frame in () if live is None else list(live.frames):
            if frame.note is not None and live is not None:
                frame.note(live.site, call, mech, attended)
        # The model goes on from what was noted, so that its predictions have a gradient by a recorded output.
        return attended.transpose(1, 2).contiguous(), weights

    return attend


def _with_memory(installed: Installed, call: AttentionCall) -> AttentionCall:
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
        installed.hands_on[thread] = installed.mechanism.memory_after(call)  # type: ignore[attr-defined]
    return call


def _chosen(live: _Live | None, installed: Installed | None, dropped: float) -> tuple[Mechanism, bool]:
    """The innermost mechanism, and whether the model's own attention computes it: always where none was swapped in."""
    for frame in reversed(live.frames if live is not None else []):
        if frame.mechanism is None:
            continue
        if not dropped or frame.skip_dropout:
            return frame.mechanism, False
        if isinstance(frame.mechanism, Softmax):
            return frame.mechanism, True
        assert live is not None
        raise ValueError(
            f"{live.site.name} drops attention weights with p={dropped} in training, which {frame.mechanism!r} does "
            "not do; call model.eval(), set the model's attention dropout to 0, or swap with dropout='skip'"
        )
    return (Softmax(), True) if installed is None else (installed.mechanism, False)


def _call(
    module: nn.Module,
    place: Site | Installed,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
    *,
    x: Any,
    own: str,
    memory: Any = None,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> AttentionCall:
    for name, what in UNSUPPORTED.items():
        if kwargs.get(name) is not None:
            raise ValueError(
                f"{type(module).__name__} ({place.name}) uses {what} ({name}), which no attnlab mechanism can honour; "
                "swap or record other layers, or another model"
            )
    if torch.is_autocast_enabled(query.device.type):
        # Rotary positions come out wider than the rest; SDPA would cast here too.
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if isinstance(place, Installed):
        _refuse_window(place, kwargs.get("sliding_window"))
    n_k = key.shape[2]
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    past = 0 if memory is None else memory.length - n_k
    seen = seen_by(
        mask, shape=(query.shape[0], query.shape[2], past + n_k), causal_module=causal, none_is_causal=own == "sdpa"
    )
    if memory is not None:
        seen = _of_new_keys(seen, past)
    if isinstance(place, Installed) and place.drop_bias:
        position_bias = None
    return AttentionCall(
        query,
        key,
        value,
        x=_x(x, query, n_k),
        key_visible=seen.key_visible,
        causal=seen.causal,
        offset=seen.offset,
        mask=seen.mask,
        bias=_bias(place, query, position_bias, seen.bias),
        scale=scaling,
    )


def _refuse_window(installed: Installed, window: Any) -> None:
    if window is not None and "mask" in installed.mechanism.cannot():
        raise ValueError(
            f"{installed.name} sees only the last {window} tokens (sliding_window), which {installed.mechanism!r} "
            "cannot honour; make the model from a config with sliding_window=None, or convert other layers"
        )


def _of_new_keys(seen: Seen, past: int) -> Seen:
    """The call of a bounded memory holds only the keys that are new; ``past`` others were folded in before."""
    key_visible, mask, bias = (None if t is None else t[..., past:] for t in (seen.key_visible, seen.mask, seen.bias))
    return Seen(key_visible, seen.causal, 0, mask, bias)


def _x(x: Any, query: Tensor, n_k: int) -> Tensor | None:
    if not isinstance(x, Tensor) or x.dim() != 3 or x.shape[0] != query.shape[0]:
        return None
    # A model spread over devices moves its inputs after the hook has seen them.
    return (x if x.shape[1] <= n_k else x[:, x.shape[1] - n_k :]).to(query)


def _bias(
    place: Site | Installed, query: Tensor, position_bias: Tensor | None, additive: Tensor | None
) -> Tensor | None:
    # T5 gives its cross-attention a bias of zeros, which would only make mechanisms that take no bias refuse.
    if position_bias is not None and place.kind == "cross" and not position_bias.any():
        position_bias = None
    parts = [t.to(query) for t in (position_bias, additive) if t is not None]
    return sum(parts[1:], parts[0]) if parts else None
