"""What a mechanism needs to know of its device: where the model is, autocast, what may be a kernel or compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from attnlab.attention import Mechanism

__all__ = [
    "compiled_part",
    "compiled_parts",
    "host_may_read",
    "kernels_may_run",
    "kernels_take",
    "no_autocast",
    "to_model_device",
    "without_kernels",
]

# Lowered by ``without_kernels``.
_kernels_allowed = True
Function = TypeVar("Function", bound=Callable[..., Any])
# Set by ``compiled_parts``.
_compile: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None


def to_model_device(model: nn.Module, mech: Mechanism) -> Mechanism:
    """The mechanism, with the parameters it has before its first call (Linformer's matrix) on the model's device."""
    device = _running_device(model)
    if isinstance(mech, nn.Module) and device is not None:
        mech.to(device)
    return mech


def _running_device(model: nn.Module) -> torch.device | None:
    """Where the model computes: the device of its parameters, or where accelerate takes offloaded ones."""
    first = next(model.parameters(), None)
    if first is None or not first.is_meta:
        return None if first is None else first.device
    hooks = [hook for module in model.modules() if (hook := getattr(module, "_hf_hook", None)) is not None]
    devices = [device for hook in hooks if (device := getattr(hook, "execution_device", None)) is not None]
    return torch.device(devices[0]) if devices else first.device


def no_autocast(t: Tensor) -> AbstractContextManager[Any]:
    """Inside, autocast does not round to half precision what is computed on the device of ``t``."""
    kind = t.device.type
    # The meta device knows no autocast.
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return nullcontext()
    return torch.autocast(kind, enabled=False)


def host_may_read(t: Tensor) -> bool:
    """Whether a number can be read from the tensor now: not while a graph is compiled or captured, nor on meta."""
    if t.is_meta or torch.compiler.is_compiling():
        return False
    return not (t.is_cuda and torch.cuda.is_current_stream_capturing())


def kernels_may_run() -> bool:
    """Whether Triton is installed and this is not inside ``without_kernels``."""
    from attnlab.kernels import AVAILABLE

    return AVAILABLE and _kernels_allowed


def kernels_take(t: Tensor) -> bool:
    """Whether Triton may run on the tensor's device."""
    return t.is_cuda and kernels_may_run()


@contextmanager
def without_kernels() -> Iterator[None]:
    """Inside, mechanisms compute by torch's own operations, for instance where a transform has no rule for kernels."""
    global _kernels_allowed
    before = _kernels_allowed
    try:
        _kernels_allowed = False
        yield
    finally:
        _kernels_allowed = before


@contextmanager
def compiled_parts(compiler: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Inside, functions that a mechanism passes through ``compiled_part`` are compiled, for calls on a GPU."""
    global _compile
    before = _compile
    try:
        _compile = compiler
        yield
    finally:
        _compile = before


def compiled_part(function: Function, t: Tensor) -> Function:
    """The function, compiled inside ``compiled_parts`` where ``t`` is on a GPU; it must read nothing but arguments."""
    if _compile is None or not t.is_cuda or torch.compiler.is_compiling():
        return function
    return _compile(function)  # type: ignore[return-value]
