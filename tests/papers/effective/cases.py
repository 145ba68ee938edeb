"""What tests of the reproduction of Effective share: tagged sentences, and a batch of the tiny GLUE."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from papers.effective.glue import TASKS, encode, read_glue

__all__ = ["GOLD", "first_batch"]

GOLD = [[("the", "DET"), ("cat", "NOUN"), ("sees", "VERB"), ("her", "PRON"), (".", "PUNCT")]] * 3


def first_batch(glue: Path, tokenizer: Any, n: int, length: int) -> dict[str, Tensor]:
    """The first n dev examples of RTE."""
    examples = encode(read_glue(glue, TASKS["RTE"], "dev"), tokenizer, length=length)
    return examples.batch(range(n), length=length, segments=True, classes=2)
