"""The inputs of a model's forward passes, seen without changing the model."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

__all__ = ["watch_inputs"]


def watch_inputs(
    model: nn.Module, begin: Callable[[dict[str, Any]], None], end: Callable[[], None] = lambda: None
) -> list[Callable[[], None]]:
    """Call ``begin`` with the model's inputs before each forward pass and ``end`` after it; the list removes the hooks.

    The inputs are the arguments of the outermost module that takes ``input_ids``.
    """
    depth = [0]
    removes = []
    for module in model.modules():
        names = list(inspect.signature(module.forward).parameters)
        if "input_ids" not in names:
            continue

        @torch.compiler.disable
        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], names: list[str] = names) -> None:
            depth[0] += 1
            if depth[0] == 1:
                begin(_with_decoder(module, {**dict(zip(names, args, strict=False)), **kwargs}))

        @torch.compiler.disable
        def after(*_: Any) -> None:
            depth[0] -= 1
            if depth[0] == 0:
                end()

        removes.append(module.register_forward_pre_hook(before, with_kwargs=True).remove)
        removes.append(module.register_forward_hook(after, always_call=True).remove)
    return removes


def _with_decoder(module: nn.Module, inputs: dict[str, Any]) -> dict[str, Any]:
    """The inputs with the decoder's ids, where the model makes them from the labels."""
    shifted = getattr(module, "prepare_decoder_input_ids_from_labels", None)
    if inputs.get("decoder_input_ids") is not None or inputs.get("labels") is None or shifted is None:
        return inputs
    return {**inputs, "decoder_input_ids": shifted(inputs["labels"])}
