"""Sources of batches: ``batch(step)`` is a pure function of (seed, step) and returns the global batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attnlab.data.batching import Order, generator
from attnlab.data.masking import BERT, IGNORED, Masking, mask_tokens
from attnlab.data.packing import Blocks

__all__ = ["CausalSource", "MlmSource"]


class _BlockSource:
    """What sources over ``blocks`` share: the order of their rows, and batches made of them."""

    @property
    def steps_per_epoch(self: Any) -> int:
        """Steps after which every row has been seen."""
        return _order(self).steps_per_epoch

    def batch(self: Any, step: int) -> dict[str, Tensor]:
        """The global batch of a step, a pure function of (seed, step)."""
        tokens, documents = self.blocks.rows(_order(self).indices(step))
        inputs, labels = self._examples(tokens, documents, step)
        batch = {"input_ids": torch.from_numpy(inputs), "labels": torch.from_numpy(labels)}
        if self.blocks.form == "separate":
            batch["attention_mask"] = torch.from_numpy((documents >= 0).astype(np.int64))
        if self.documents:
            batch["documents"] = torch.from_numpy(documents)
        return batch


@dataclass(frozen=True)
class MlmSource(_BlockSource):
    """Rows of ``blocks`` with tokens masked; every epoch in a new order and with new masks.

    With ``shuffle=False`` it is an evaluation: ``steps_per_epoch`` batches, always the same, the last one short.
    """

    blocks: Blocks
    batch_size: int
    vocab_size: int
    seed: int = 0
    masking: Masking = BERT
    shuffle: bool = True
    documents: bool = False

    def _examples(self, tokens: np.ndarray, documents: np.ndarray, step: int) -> tuple[np.ndarray, np.ndarray]:
        return mask_tokens(
            tokens,
            specials=self.blocks.specials,
            vocab_size=self.vocab_size,
            rng=generator(self.seed, step, 1),
            masking=self.masking,
        )


@dataclass(frozen=True)
class CausalSource(_BlockSource):
    """Rows of ``blocks`` to be predicted from left to right; labels equal the inputs, as the model shifts them."""

    blocks: Blocks
    batch_size: int
    seed: int = 0
    shuffle: bool = True
    documents: bool = False

    def _examples(self, tokens: np.ndarray, documents: np.ndarray, step: int) -> tuple[np.ndarray, np.ndarray]:
        return tokens, np.where(documents < 0, IGNORED, tokens)


def _order(source: MlmSource | CausalSource) -> Order:
    return Order(n=len(source.blocks), batch_size=source.batch_size, seed=source.seed, shuffle=source.shuffle)
