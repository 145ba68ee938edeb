"""What a step of distillation holds in memory, by what a short row of tokens makes a backward pass keep."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from attnlab.adapters.distillation.settings import Distillation
from attnlab.adapters.distillation.student import body_of
from attnlab.adapters.protocol import adapter_of

__all__ = ["saved_bytes", "step_bytes"]

# Tokens of the two rows whose difference is counted: what does not grow with the row is no token's.
SHORT, LONGER = 8, 24
# The weights that change, beside the student's own: gradients and Adam's two means.
BESIDE = 3
# Compiled layers compute some again instead of keeping it: at least so much of the rest is taken to stay.
COMPILED = 0.5


def step_bytes(
    model: nn.Module, settings: Distillation, device: torch.device | None = None, *, processes: int = 1,
    weights: bool = True,
) -> float:  # fmt: skip
    """Bytes of the teacher, the student with its optimiser, and what a step keeps for its backward pass; a lower bound.

    Of one of some ``processes``. ``model`` is the teacher, wherever it lies, and ``weights`` is whether more than the
    new parameters learn. Logits, and what a mechanism keeps besides, are not in it.

    >>> import attnlab as al
    >>> few, many = (step_bytes(al.shipped_model("lm").model, al.Distillation(batch=n, length=64)) for n in (1, 101))
    >>> 0 < (many - few) / (100 * 64) < 1e6
    True
    """
    device = torch.device("cpu") if device is None else device
    half = settings.half_on(device)
    own = 4 * sum(p.numel() for p in model.parameters())
    learn = weights and settings.lora == 0 and settings.train == "all"
    kept = _kept(model, settings.checkpointing, half) * settings.batch * settings.length / processes
    if settings.compile and device.type == "cuda":
        kept *= COMPILED
    # A teacher in half precision is half as large.
    return own * ((0.5 if half else 1) + 1 + BESIDE * learn) + kept


def _kept(model: nn.Module, checkpointing: bool, half: bool) -> float:
    """Bytes of a token that are kept until the backward pass."""
    layers, width = len(adapter_of(model).sites()), int(getattr(getattr(model, "config", None), "hidden_size", 1))
    inputs, body = 4 * layers * width, body_of(model)
    try:
        of_token = (saved_bytes(body, 1, LONGER, half=half) - saved_bytes(body, 1, SHORT, half=half)) / (LONGER - SHORT)
    except (TypeError, ValueError, RuntimeError):
        # A model that takes something else keeps at least the inputs of its layers.
        return inputs if not checkpointing else inputs / max(1, layers)
    # Of layers that are computed again, only their inputs and one layer at a time.
    return inputs + of_token / max(1, layers) if checkpointing else of_token


def saved_bytes(model: nn.Module, rows: int, tokens: int, *, half: bool = False) -> int:
    """Bytes that a backward pass over some rows of tokens would read, without the weights."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved: dict[int, int] = {}

    def note(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage.nbytes()
        return t

    device = next(model.parameters()).device
    ids = torch.zeros(rows, tokens, dtype=torch.long, device=device)
    with (
        torch.enable_grad(),
        torch.autograd.graph.saved_tensors_hooks(note, lambda t: t),
        torch.autocast(device.type, torch.bfloat16, enabled=half),
    ):
        # The output is held, so that no memory is used twice while it is counted.
        output = model(input_ids=ids, use_cache=False)
    del output
    return sum(saved.values())
