"""The attention function that transformers calls in a swapped, recorded or converted model.

transformers looks the function up by a name in the model's config, for each call. Ours is named after the one whose
place it takes, "attnlab|sdpa": a module that is neither in a context nor converted (of another model that shares the
config) attends as before. A name that a user gives, "attnlab:top-r:r=64" (``adapters.implementation``), stands for the
mechanism after the colon, and may be the one whose place is taken.
"""

from __future__ import annotations

import copy
import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from attnlab.adapters.adopted import PREFIX, adopted_by, adopted_mechanism, masks_of, place_of_adopted
from attnlab.adapters.calls import make_call
from attnlab.adapters.masks import carrying_mask
from attnlab.adapters.outside_interface import family_of, lead_through_interface, own_attention, restore_class
from attnlab.adapters.protocol import CachedKeys, Conversion, Direct, Frame, Site
from attnlab.attention import AttentionCall, Mechanism
from attnlab.errors import placed
from attnlab.hooks import ADOPTED
from attnlab.mechanisms.softmax import Softmax
from attnlab.models.open_contexts import OpenContexts, refuse_replica
from attnlab.summaries import short_repr

__all__ = [
    "INTERFACE",
    "Installed",
    "add_frame",
    "argument_names",
    "current_mechanism",
    "evicts",
    "forward_of",
    "function_in_place_of",
    "install",
    "installed_in",
    "register_function",
    "registered_name",
    "remove_frame",
    "uninstall",
]

# The object of transformers through which a module finds its attention function.
INTERFACE = "ALL_ATTENTION_FUNCTIONS"
# The attribute of a converted module.
INSTALLED = "_attnlab"
# The attribute of a module inside contexts.
OPEN = "_attnlab_open"
KEY_SOURCES = ("key_value_states", "encoder_hidden_states")
CACHES = ("past_key_values", "past_key_value", "layer_past")

# By thread, arguments of the module that is running: its hidden states do not reach the attention function.
ModuleInputs = dict[int, dict[str, Any]]


@dataclass(eq=False)
class Installed(Conversion):
    """What a converted module carries, for good: it is copied with the module, and so is the mechanism in it."""

    # By thread, the memory that the layer before handed on (LUNA); the object is shared with that layer. None where
    # nothing comes.
    handed: dict[int, Tensor] | None = None
    # The same towards the next layer.
    hands_on: dict[int, Tensor] | None = None
    inputs: ModuleInputs = field(default_factory=dict)
    hook: Any = None

    __repr__ = short_repr

    @property
    def has_own_cache(self) -> bool:
        """Whether the mechanism keeps a memory of its own in place of every key."""
        return self.mechanism.make_cache(1, 0) is not None


@dataclass(eq=False)
class _OpenSite:
    """A site inside contexts; the innermost mechanism counts, every note is called.

    It is an attribute of the module, so that replicas and copies made inside a context have it too.
    """

    site: Site
    frames: OpenContexts[Frame] = field(default_factory=OpenContexts)
    inputs: ModuleInputs = field(default_factory=dict)
    hook: Any = None
    direct: Direct | None = None

    @property
    def kind(self) -> str:
        return self.site.kind

    def __deepcopy__(self, memo: dict[int, Any]) -> _OpenSite:
        return _OpenSite(self.site, copy.deepcopy(self.frames, memo))

    def __reduce__(self) -> tuple[type, tuple[()]]:
        # A model that is saved as a pickle has no open contexts.
        return type(None), ()

    def settle(self) -> None:
        """Look again at the frames: one that attends directly needs no hook while it is alone."""
        alone = len(self.frames) == 1 and installed_in(self.site.module) is None
        self.direct = next(iter(self.frames)).direct if alone else None
        if self.direct is None and self.hook is None and self.frames:
            self.hook = self.site.module.register_forward_pre_hook(_uncompiled(_keep_inputs), with_kwargs=True)

    def replacement(self) -> Frame | None:
        """The innermost frame with a mechanism."""
        return next((frame for frame in reversed(list(self.frames)) if frame.mechanism is not None), None)

    @property
    def evicts(self) -> bool:
        """Whether the site's cache evicts keys."""
        return any(frame.cached_keys is not None for frame in self.frames)

    def cached_keys(self) -> CachedKeys | None:
        """The keys that the site's cache holds where it evicts some; None where it keeps them all."""
        caches = [frame.cached_keys for frame in self.frames if frame.cached_keys is not None]
        return caches[0](self.site) if caches else None


_lock = threading.RLock()


def _open_site(module: nn.Module) -> _OpenSite | None:
    """What the contexts around a module ask of it; None outside of all."""
    opened = module.__dict__.get(OPEN)
    return opened if opened is not None and opened.frames else None


def add_frame(site: Site, frame: Frame) -> None:
    """Let a site attend as the frame says."""
    with _lock:
        opened = site.module.__dict__.get(OPEN)
        if opened is None:
            opened = site.module.__dict__[OPEN] = _OpenSite(site)
        # A copy's was made with the original's site.
        opened.site = site
        opened.frames.add(frame)
        opened.settle()
        lead_through_interface(site.module)


def remove_frame(site: Site, frame: Frame) -> None:
    """Undo ``add_frame``."""
    with _lock:
        opened = site.module.__dict__[OPEN]
        opened.frames.remove(frame)
        opened.settle()
        if not opened.frames:
            if opened.hook is not None:
                opened.hook.remove()
            del site.module.__dict__[OPEN]
            if installed_in(site.module) is None:
                restore_class(site.module)


def evicts(module: nn.Module) -> bool:
    """Whether a context gives the module a cache that evicts keys."""
    opened = _open_site(module)
    return opened is not None and opened.evicts


def installed_in(module: nn.Module) -> Installed | None:
    """What ``install`` put into the module."""
    return getattr(module, INSTALLED, None)


def install(module: nn.Module, installed: Installed) -> None:
    """Make a module attend by a mechanism outside of any context."""
    setattr(module, INSTALLED, installed)
    opened = _open_site(module)
    if opened is not None:
        opened.settle()
    lead_through_interface(module)
    installed.hook = module.register_forward_pre_hook(_uncompiled(_keep_inputs), with_kwargs=True)


def uninstall(module: nn.Module) -> None:
    """Undo ``install``."""
    installed = installed_in(module)
    assert installed is not None
    installed.hook.remove()
    delattr(module, INSTALLED)
    if _open_site(module) is None:
        restore_class(module)


def current_mechanism(module: nn.Module) -> Mechanism:
    """The mechanism by which a module attends now; softmax where that is its own attention."""
    opened, installed = _open_site(module), installed_in(module)
    frame = None if opened is None else opened.replacement()
    if frame is not None and frame.mechanism is not None:
        return frame.mechanism
    if installed is not None:
        return installed.mechanism
    own = getattr(getattr(module, "config", None), "_attn_implementation", None) or ""
    return adopted_by(module, own.removeprefix(PREFIX)) or Softmax()


def registered_name(own: str) -> str:
    """The name of our function in place of ``own``; a kernel that is neither SDPA nor eager gives way to SDPA."""
    own = own if own in ("sdpa", "eager") or own.startswith(ADOPTED) else "sdpa"
    register_function(PREFIX + own, own)
    return PREFIX + own


def register_function(name: str, own: str) -> None:
    """Let transformers find our function in place of ``own`` under a name, with masks that carry their structure."""
    from transformers import AttentionInterface, AttentionMaskInterface

    if name not in AttentionInterface():
        AttentionMaskInterface.register(name, carrying_mask(AttentionMaskInterface()[masks_of(own)]))
        AttentionInterface.register(name, function_in_place_of(own))


def forward_of(module: nn.Module) -> Any:
    """The function that a module's class defines as its forward pass."""
    return inspect.unwrap(type(module).forward)


@functools.cache
def _uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """torch.compile would take one layer's site for that of all layers; it may compile the code between layers.

    Made when needed: torch's compiler takes long to import.
    """
    return torch.compiler.disable(function)


def _keep_inputs(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Before a module runs: keep the inputs that its attention function will need."""
    opened, installed = _open_site(module), installed_in(module)
    names = argument_names(type(module).forward)
    arguments = {**dict(zip(names, args, strict=False)), **kwargs}
    holders = [holder for holder in (opened, installed) if holder is not None]
    if not holders:
        return
    own_states = None if holders[0].kind == "cross" else arguments.get(names[0])
    x = next((arguments[name] for name in KEY_SOURCES if arguments.get(name) is not None), own_states)
    cache = next((arguments[name] for name in CACHES if name in arguments), None)
    if opened is not None:
        x = _past_and_new_states(module, opened, cache, x)
    for holder in holders:
        inputs = {"x": x, "output_attentions": arguments.get("output_attentions")}
        if isinstance(holder, Installed):
            swapped = opened is not None and opened.replacement() is not None
            inputs["memory"] = _bounded_memory(module, holder, cache, swapped=swapped)
        holder.inputs[threading.get_ident()] = inputs


@functools.cache
def argument_names(forward: Callable[..., Any]) -> list[str]:
    """The names of a forward pass's arguments, the module itself left out."""
    return list(inspect.signature(forward).parameters)[1:]


def _past_and_new_states(module: nn.Module, opened: _OpenSite, cache: Any, x: Any) -> Any:
    """The hidden states of all tokens for a swapped mechanism that reads them, those of the new ones for others."""
    frame = opened.replacement()
    if cache is None or frame is None or frame.mechanism is None or "no-x" not in frame.mechanism.cannot():
        return x
    if opened.kind == "cross" or opened.evicts or not isinstance(x, Tensor):
        return x
    from attnlab.adapters.states_cache import with_past_states

    return with_past_states(x, cache, getattr(module, "layer_idx", None), opened.site.kind, opened.site.name)


def _bounded_memory(module: nn.Module, installed: Installed, cache: Any, *, swapped: bool) -> Any:
    """The bounded memory that this module has in the model's cache; None if it has none."""
    if cache is None or not installed.has_own_cache:
        return None
    from attnlab.adapters.memory_cache import memory_layer

    return memory_layer(cache, getattr(module, "layer_idx", None), installed, swapped=swapped)


@functools.cache
def function_in_place_of(own: str) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """Our attention function in place of ``own``: "sdpa", "eager" or an adopted mechanism's."""

    def attention_function(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        opened = _open_site(module)
        if opened is not None and opened.direct is not None and not getattr(module, "_is_replica", False):
            answer = opened.direct(module, query, key, value, attention_mask, kwargs)
            if answer is not None:
                return answer
        installed = installed_in(module)
        if opened is None and installed is None and adopted_mechanism(own) is None:
            return _own_attention(module, own)(module, query, key, value, attention_mask, **kwargs)
        with _errors_explained(_place(module, opened, installed).name, query):
            return _attend(opened, installed, own, module, query, key, value, attention_mask, kwargs)

    return _uncompiled(attention_function)


def _attend(
    opened: _OpenSite | None,
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
    holders = [holder for holder in (opened, installed) if holder is not None]
    inputs = [holder.inputs.pop(threading.get_ident(), {}) for holder in holders][-1] if holders else {}
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
    frames = [] if opened is None else list(opened.frames)
    notes = any(frame.note or frame.direct for frame in frames)
    refuse_replica(module, place.name, notes=notes, mechanism=mech)
    weights = None
    if by_model:
        out, weights = _own_attention(module, masks_of(own))(module, query, key, value, attention_mask, **kwargs)
        output = out.transpose(1, 2)
    else:
        mech, call, output = _run_mechanism(mech, call, installed, memory)
        weights = mech.weights(call) if inputs.get("output_attentions") else None
    for frame in frames:
        if frame.note is not None:
            assert opened is not None
            frame.note(opened.site, call, mech, output)
    # The model continues from the noted tensor, so that its predictions have a gradient by a recorded output.
    return output.transpose(1, 2).contiguous(), weights


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


def _place(module: nn.Module, opened: _OpenSite | None, installed: Installed | None) -> Site | Installed:
    if installed is not None:
        return installed
    return place_of_adopted(module) if opened is None else opened.site


def _mechanism_of_call(
    opened: _OpenSite | None, installed: Installed | None, adopted: Mechanism | None, place: str, dropped: float
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
