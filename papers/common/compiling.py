"""A transformer's blocks and its loss, each compiled; layers that are alike share one graph, to compile it once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from attnlab.devices import best_device
from attnlab.models.transformer import Block

__all__ = ["compiled_on_gpu", "compiled_parts"]

# Graphs of one function: one for each attention, shape of batch, and with or without gradients.
MOST = 128


@contextmanager
def compiled_parts(models: Iterable[nn.Module], *, losses: bool = True, backend: str = "inductor") -> Iterator[None]:
    """Inside, the blocks of the models and their losses of tokens run as compiled graphs; the models stay as they are.

    The operations between products are fused: casts, norms, masks, and the passes over logits. The first call of each
    kind of layer takes seconds. Models that are scored meanwhile run better uncompiled (``torch.compiler.set_stance``).
    Code that cannot be compiled runs as it is written, with a warning. Without ``losses`` these are left as they are: a
    masked model's have another number of tokens in every batch, each of which would be a graph of its own.
    """
    from torch._dynamo import config

    models = list(models)
    parts: list[Any] = [m for model in models for m in model.modules() if isinstance(m, Block)]
    heads: list[Any] = [head for model in models if losses and hasattr(head := getattr(model, "head", None), "nll")]
    try:
        with config.patch(recompile_limit=MOST, accumulated_recompile_limit=8 * MOST, suppress_errors=True):
            for part in parts:
                part.compile(backend=backend, dynamic=False)
            for head in heads:
                head.nll = torch.compile(head.nll, backend=backend, dynamic=False)
            yield
    finally:
        for part in parts:
            part._compiled_call_impl = None
        for head in heads:
            # Without the attribute the method of its class is used again.
            vars(head).pop("nll", None)


def compiled_on_gpu(models: Iterable[nn.Module], *, wanted: bool, losses: bool = True) -> AbstractContextManager[None]:
    """``compiled_parts`` on a GPU, where they are ``wanted``; elsewhere nothing is compiled."""
    return compiled_parts(models, losses=losses) if wanted and best_device().type == "cuda" else nullcontext()
