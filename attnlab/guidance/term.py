"""Guidance as a loss term of the training loop, fed by recording the model while it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from attnlab.guidance.loss import cells, guidance_loss
from attnlab.guidance.settings import Guidance
from attnlab.hf import record
from attnlab.loss import Loss
from attnlab.patterns import SpecialTokens
from attnlab.trace import Trace

__all__ = ["GuidanceTerm", "guide"]

Batch = Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class GuidanceTerm:
    """L_AG of the forward pass that ``trace`` saw last; its weight is alpha(t)."""

    guidance: Guidance
    trace: Trace
    tokens: SpecialTokens | None = None
    name: str = "guidance"

    def __call__(self, model: nn.Module, output: Any, batch: Batch, step: int) -> Loss:
        return guidance_loss(self.trace, self.guidance, **self._texts(batch), tokens=self.tokens)

    def weight(self, step: int) -> float:
        """alpha(t)."""
        return self.guidance.weight(step)

    def count(self, batch: Batch, step: int) -> Tensor:
        """What the term is averaged over, before the model has run."""
        texts = {"queries": None, "query_mask": None, **self._texts(batch)}
        return cells(self.guidance, **texts)

    def _texts(self, batch: Batch) -> dict[str, Any]:
        """The ids and masks of keys and queries, from the batch's entries for this kind of attention."""
        prefix = "decoder_" if self.guidance.kind == "decoder" and "decoder_input_ids" in batch else ""
        texts = {
            "input_ids": batch[f"{prefix}input_ids"],
            "attention_mask": batch.get(f"{prefix}attention_mask"),
        }
        if self.guidance.kind == "cross":
            texts |= {"queries": batch["decoder_input_ids"], "query_mask": batch.get("decoder_attention_mask")}
        return texts


@contextmanager
def guide(
    model: nn.Module,
    guidance: Guidance,
    *,
    tokens: SpecialTokens | None = None,
    recorder: Callable[[nn.Module], AbstractContextManager[Trace]] = record,
) -> Iterator[GuidanceTerm]:
    """Inside the context, a loss term for ``attnlab.training.train(..., terms=[..., term])``; after it, a plain model.

    ``recorder`` is ``attnlab.models.record_model`` for models of this package.
    """
    with recorder(model) as trace:
        yield GuidanceTerm(guidance, trace, tokens)
