"""Guidance for the Hugging Face Trainer, in two lines: ``with guide_trainer(trainer, guidance): trainer.train()``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from attnlab.fields import expect
from attnlab.guidance.settings import Guidance
from attnlab.guidance.term import GuidanceTerm, guide
from attnlab.patterns import SpecialTokens, special_tokens

__all__ = ["guide_trainer"]


@contextmanager
def guide_trainer(trainer: Any, guidance: Guidance, *, tokens: SpecialTokens | None = None) -> Iterator[GuidanceTerm]:
    """Inside the context ``trainer.train()`` minimises L_task + alpha(t) L_AG; afterwards trainer and model are plain.

    Without ``tokens`` full stops and delimiters are those of the trainer's tokenizer (its ``processing_class``).
    Without ``guidance.steps`` alpha falls to 0 at the trainer's last step. L_AG and alpha join the trainer's logs. Each
    process averages L_AG over its own part of a batch, and the processes' gradients are averaged, as the trainer does.
    """
    expect("guidance", guidance, Guidance, "a Guidance, such as Guidance(fraction=0.5)")
    if not hasattr(trainer, "compute_loss") or not hasattr(trainer, "processing_class"):
        raise ValueError(f"trainer must be a transformers.Trainer, got {type(trainer).__name__}")
    if tokens is None and trainer.processing_class is not None:
        tokens = special_tokens(trainer.processing_class)
    own = {name: getattr(trainer, name) for name in ("compute_loss", "log")}
    # Losses and weights since the last line of the log.
    losses: list[Tensor] = []
    alphas: list[float] = []

    with guide(trainer.model, guidance, tokens=tokens) as term:

        def compute_loss(model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
            result = own["compute_loss"](
                model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch
            )
            if not model.training or not torch.is_grad_enabled():
                return result
            loss, rest = (result[0], result[1:]) if return_outputs else (result, ())
            mean = term.total() / term.last_count().clamp(min=1)
            alpha = _alpha(trainer, term)
            losses.append(mean.detach())
            alphas.append(alpha)
            # A task loss that is already a share of the accumulated batch is not divided by the trainer again.
            parts = trainer.current_gradient_accumulation_steps if _scaled(trainer, num_items_in_batch) else 1
            guided = loss + alpha * mean.to(loss.device) / parts
            return (guided, *rest) if return_outputs else guided

        def log(logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
            if losses and "loss" in logs:
                logs = {**logs, "guidance": torch.stack(losses).mean().item(), "alpha": alphas[-1]}
                losses.clear()
                alphas.clear()
            own["log"](logs, *args, **kwargs)

        trainer.compute_loss, trainer.log = compute_loss, log
        try:
            yield term
        finally:
            del trainer.compute_loss, trainer.log


def _alpha(trainer: Any, term: GuidanceTerm) -> float:
    """alpha at the trainer's step, over the run that ``train()`` has planned."""
    return term.guidance.over(trainer.state.max_steps).weight(trainer.state.global_step)


def _scaled(trainer: Any, num_items_in_batch: Any) -> bool:
    """What ``Trainer.training_step`` asks: whether the loss needs no division by the accumulated parts."""
    scaled = getattr(trainer, "loss_is_scaled_for_ga", None)
    if scaled is not None:
        return scaled
    counted = trainer.model_accepts_loss_kwargs and num_items_in_batch is not None
    return counted or trainer.compute_loss_func is not None
