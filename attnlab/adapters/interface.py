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
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from attnlab.adapters.calls import make_call
from attnlab.adapters.installed import INSTALLED, Given, Installed, installed_in, with_memory
from attnlab.adapters.masks import carrying_mask
from attnlab.adapters.sites import Site, own_attention
from attnlab.attention import AttentionCall, Mechanism
from attnlab.mechanisms.softmax import Softmax

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
KEY_SOURCES = ("key_value_states", "encoder_hidden_states")
CACHES = ("past_key_values", "past_key_value")

Note = Callable[[Site, AttentionCall, Mechanism, Tensor], None]
# (module, query, key, value, mask, what else transformers gives) -> (output, weights), or None to be given a call.
Direct = Callable[[nn.Module, Tensor, Tensor, Tensor, Any, Mapping[str, Any]], tuple[Tensor, Tensor] | None]


@dataclass(frozen=True, eq=False)
class Frame:
    """What one context asks of a site: to attend by a mechanism, to note its calls, or both.

    ``direct`` attends in the mechanism's place, before any call is made, where no other context asks for anything.
    """

    mechanism: Mechanism | None = None
    note: Note | None = None
    skip_dropout: bool = False
    direct: Direct | None = None


@dataclass(eq=False)
class _Live:
    """A site inside at least one context; the innermost mechanism counts, every note is called."""

    site: Site
    frames: list[Frame] = field(default_factory=list)
    given: Given = field(default_factory=dict)
    hook: Any = None
    direct: Direct | None = None

    def settle(self) -> None:
        """Look again at the frames: one that attends directly needs no hook while it is alone."""
        alone = len(self.frames) == 1 and installed_in(self.site.module) is None
        self.direct = self.frames[0].direct if alone else None
        if self.direct is None and self.hook is None and self.frames:
            self.hook = self.site.module.register_forward_pre_hook(_uncompiled(_note_given), with_kwargs=True)


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
    live = _live.get(module)
    if live is not None:
        live.settle()
    installed.hook = module.register_forward_pre_hook(_uncompiled(_note_given), with_kwargs=True)


def uninstall(module: nn.Module) -> None:
    """Undo ``install``."""
    installed = installed_in(module)
    assert installed is not None
    installed.hook.remove()
    delattr(module, INSTALLED)


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
        live.frames.append(frame)
        live.settle()


def _detach(site: Site, frame: Frame) -> None:
    with _lock:
        live = _live[site.module]
        live.frames.remove(frame)
        live.settle()
        if not live.frames:
            if live.hook is not None:
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
        if isinstance(holder, Installed):
            cache = next((given[n] for n in CACHES if n in given), None)
            noted["memory"] = _memory_of(module, holder, cache, swapped=_swapped(live))
        holder.given[threading.get_ident()] = noted


@functools.cache
def _argument_names(forward: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(forward).parameters)[1:]


def _memory_of(module: nn.Module, installed: Installed, cache: Any, *, swapped: bool) -> Any:
    """The bounded memory that this module has in the model's cache; None if it has none."""
    if cache is None or not installed.has_own_cache:
        return None
    from attnlab.adapters.memory_cache import memory_layer

    return memory_layer(cache, getattr(module, "layer_idx", None), installed, swapped=swapped)


def _swapped(live: _Live | None) -> bool:
    return live is not None and any(frame.mechanism is not None for frame in live.frames)


def _standing_in_for(own: str) -> Callable[..., tuple[Tensor, Tensor | None]]:
    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        live = _live.get(module)
        if live is not None and live.direct is not None:
            done = live.direct(module, query, key, value, attention_mask, kwargs)
            if done is not None:
                return done
        installed = installed_in(module)
        if live is None and installed is None:
            return own_attention(module, own)(module, query, key, value, attention_mask, **kwargs)
        noted = [holder.given.pop(threading.get_ident(), {}) for holder in (live, installed) if holder is not None]
        given = noted[-1]
        memory = given.get("memory")
        place = live.site if installed is None and live is not None else installed
        assert place is not None
        call = make_call(
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
                    call = with_memory(installed, call)
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
