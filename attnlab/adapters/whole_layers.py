"""Converted layers that torch.compile takes whole, their attention included.

A converted module's attention function needs the module's input, which a hook keeps for it; a compiler stops at the
hook and at the function, and each stop costs a layer as much of the host's time as all of its operators. Inside of
``whole_layers`` a module hands its input on as an argument instead, and the function is traced.

A graph with attention inside serves only layers of one mechanism, at one length. A plan may have another mechanism in
every layer: compiling each of them would take longer than what it saves in the training of a quarter of an hour, so
with more than ``FEW`` mechanisms all layers share the graphs of what is around attention.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from attnlab.adapters.module_state import Installed, argument_names, installed_in, keep_inputs, open_site
from attnlab.attention import AttentionCall
from attnlab.registry import spec_of

__all__ = ["HANDED", "traced_attention", "whole_layers"]

# The argument by which a module hands its input on to its attention function.
HANDED = "attnlab_input"
# The most mechanisms in a model whose layers are compiled whole.
FEW = 4


@contextmanager
def whole_layers(model: nn.Module) -> Iterator[None]:
    """Inside, modules whose mechanism can be traced hand their inputs on, where those reach the attention function."""
    chosen = _with_few_mechanisms(module for module in model.modules() if _can_hand(module))
    with ExitStack() as undo:
        for module in chosen:
            module.forward = _handing(module.forward, argument_names(type(module).forward)[0])
            undo.callback(module.__dict__.pop, "forward", None)
        reached = _reached(model, chosen) if chosen else []
        for module in chosen:
            if module not in reached:
                del module.__dict__["forward"]
                continue
            installed = installed_in(module)
            assert installed is not None
            installed.hook.remove()
            undo.callback(keep_inputs, module, installed)
        yield


def _with_few_mechanisms(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """The modules, or none where they attend by more than ``FEW`` mechanisms."""
    found = [(module, installed) for module in modules if (installed := installed_in(module)) is not None]
    specs = {spec_of(installed.mechanism) for _, installed in found}
    return [module for module, _ in found] if len(specs) <= FEW else []


def _can_hand(module: nn.Module) -> bool:
    """Whether a module is converted to what can be traced, outside of contexts, and takes any named argument."""
    installed = installed_in(module)
    if installed is None or not installed.mechanism.traces or installed.kind != "decoder" or open_site(module):
        return False
    # Others are made causal by a mask.
    if getattr(module, "is_causal", False) is not True:
        return False
    kinds = [argument.kind for argument in inspect.signature(type(module).forward).parameters.values()]
    return inspect.Parameter.VAR_KEYWORD in kinds and "forward" not in module.__dict__


def _handing(forward: Callable[..., Any], first: str) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs, **{HANDED: args[0] if args else kwargs[first]})

    return run


def _reached(model: nn.Module, modules: list[nn.Module]) -> set[nn.Module]:
    """The modules whose attention function gets what they hand on, which a run on two tokens tells."""
    found = [(module, installed) for module in modules if (installed := installed_in(module)) is not None]
    for _, installed in found:
        installed.handed_input = False
    training = [(module, module.training) for module in model.modules()]
    try:
        with torch.no_grad():
            model.eval()(input_ids=torch.tensor([[0, 1]], device=next(model.parameters()).device))
    except (TypeError, ValueError, RuntimeError):
        # A model that takes something else runs as it did before.
        return set()
    finally:
        for module, before in training:
            module.training = before
    return {module for module, installed in found if installed.handed_input}


def traced_attention(
    installed: Installed, query: Tensor, key: Tensor, value: Tensor, x: Tensor, scale: float | None
) -> tuple[Tensor, None]:
    """What the attention function does of texts without padding, for a compiler to trace."""
    kind = query.device.type
    if torch.is_autocast_enabled(kind):
        # Rotary positions come out wider than the rest; SDPA would cast here too.
        query, key, value = (t.to(torch.get_autocast_dtype(kind)) for t in (query, key, value))
    call = AttentionCall(query, key, value, x=x.to(query.dtype), causal=True, scale=scale)
    return installed.mechanism(call).transpose(1, 2).contiguous(), None
