"""What a module of a Hugging Face model carries inside contexts, or once converted, and keeps of its inputs."""

from __future__ import annotations

import copy
import functools
import inspect
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from attnlab.adapters.adopted import PREFIX, adopted_by
from attnlab.adapters.outside_interface import lead_through_interface, restore_class
from attnlab.adapters.protocol import CachedKeys, Conversion, Direct, Frame, Site
from attnlab.attention import Mechanism
from attnlab.mechanisms.softmax import Softmax
from attnlab.models.open_contexts import OpenContexts
from attnlab.summaries import short_repr

__all__ = [
    "CACHES",
    "Installed",
    "OpenSite",
    "add_frame",
    "argument_names",
    "cache_layer",
    "current_mechanism",
    "evicts",
    "forward_of",
    "install",
    "installed_in",
    "keep_inputs",
    "open_site",
    "remove_frame",
    "uncompiled",
    "uninstall",
]

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
    # Whether the attention function has had the input as an argument (``whole_layers``).
    handed_input: bool = False

    __repr__ = short_repr

    @property
    def has_own_cache(self) -> bool:
        """Whether the mechanism keeps a memory of its own in place of every key."""
        return self.mechanism.make_cache(1, 0) is not None


@dataclass(eq=False)
class OpenSite:
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

    def __deepcopy__(self, memo: dict[int, Any]) -> OpenSite:
        return OpenSite(self.site, copy.deepcopy(self.frames, memo))

    def __reduce__(self) -> tuple[type, tuple[()]]:
        # A model that is saved as a pickle has no open contexts.
        return type(None), ()

    def settle(self) -> None:
        """Look again at the frames: one that attends directly needs no hook while it is alone."""
        alone = len(self.frames) == 1 and installed_in(self.site.module) is None
        self.direct = next(iter(self.frames)).direct if alone else None
        # Where keys are evicted, it may decline a step, which then needs the inputs.
        if (self.direct is None or self.evicts) and self.hook is None and self.frames:
            self.hook = self.site.module.register_forward_pre_hook(uncompiled(_keep_inputs), with_kwargs=True)

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


def open_site(module: nn.Module) -> OpenSite | None:
    """What the contexts around a module ask of it; None outside of all."""
    opened = module.__dict__.get(OPEN)
    return opened if opened is not None and opened.frames else None


def add_frame(site: Site, frame: Frame) -> None:
    """Let a site attend as the frame says."""
    with _lock:
        opened = site.module.__dict__.get(OPEN)
        if opened is None:
            opened = site.module.__dict__[OPEN] = OpenSite(site)
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
    opened = open_site(module)
    return opened is not None and opened.evicts


def installed_in(module: nn.Module) -> Installed | None:
    """What ``install`` put into the module."""
    return getattr(module, INSTALLED, None)


def install(module: nn.Module, installed: Installed) -> None:
    """Make a module attend by a mechanism outside of any context."""
    setattr(module, INSTALLED, installed)
    opened = open_site(module)
    if opened is not None:
        opened.settle()
    lead_through_interface(module)
    keep_inputs(module, installed)


def keep_inputs(module: nn.Module, installed: Installed) -> None:
    """Keep what a converted module is given for its attention function."""
    installed.hook = module.register_forward_pre_hook(uncompiled(_keep_inputs), with_kwargs=True)


def uninstall(module: nn.Module) -> None:
    """Undo ``install``."""
    installed = installed_in(module)
    assert installed is not None
    installed.hook.remove()
    delattr(module, INSTALLED)
    if open_site(module) is None:
        restore_class(module)


def current_mechanism(module: nn.Module) -> Mechanism:
    """The mechanism by which a module attends now; softmax where that is its own attention."""
    opened, installed = open_site(module), installed_in(module)
    frame = None if opened is None else opened.replacement()
    if frame is not None and frame.mechanism is not None:
        return frame.mechanism
    if installed is not None:
        return installed.mechanism
    own = getattr(getattr(module, "config", None), "_attn_implementation", None) or ""
    return adopted_by(module, own.removeprefix(PREFIX)) or Softmax()


def forward_of(module: nn.Module) -> Any:
    """The function that a module's class defines as its forward pass."""
    return inspect.unwrap(type(module).forward)


@functools.cache
def uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """torch.compile would take one layer's site for that of all layers; it may compile the code between layers.

    Made when needed: torch's compiler takes long to import.
    """
    return torch.compiler.disable(function)


def _keep_inputs(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Before a module runs: keep the inputs that its attention function will need."""
    opened, installed = open_site(module), installed_in(module)
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


def _past_and_new_states(module: nn.Module, opened: OpenSite, cache: Any, x: Any) -> Any:
    """The hidden states of all tokens for a swapped mechanism that reads them, those of the new ones for others."""
    frame = opened.replacement()
    if cache is None or frame is None or frame.mechanism is None or "no-x" not in frame.mechanism.cannot():
        return x
    if opened.kind == "cross" or opened.evicts or not isinstance(x, Tensor):
        return x
    from attnlab.adapters.states_cache import with_past_states

    return with_past_states(x, cache, cache_layer(module), opened.site.kind, opened.site.name)


def _bounded_memory(module: nn.Module, installed: Installed, cache: Any, *, swapped: bool) -> Any:
    """The bounded memory that this module has in the model's cache; None if it has none."""
    if cache is None or not installed.has_own_cache:
        return None
    from attnlab.adapters.memory_cache import memory_layer

    return memory_layer(cache, cache_layer(module), installed, swapped=swapped)


def cache_layer(module: nn.Module) -> int | None:
    """The number of the layer that a module has in a cache; None where it does not say."""
    # GPT-Neo calls it layer_id.
    return getattr(module, "layer_idx", getattr(module, "layer_id", None))
