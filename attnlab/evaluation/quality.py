"""How well a model predicts a text, which it reads in windows of tokens with the tokenizer's own special tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from attnlab.adapters.load import LoadedModel, check_length, max_length
from attnlab.data import IGNORED, TextFile
from attnlab.data.beginnings import first_tokens
from attnlab.summaries import short_repr

__all__ = ["Windows", "batches", "cut_windows", "model_inputs", "quality", "quality_label", "quality_text"]

# The measures of quality, as a table's header names them.
LABELS = {"mlm_error": "MLM error", "perplexity": "perplexity"}


@dataclass(frozen=True, eq=False)
class Windows:
    """Inputs and labels of every window, padded on the right; ``tokens`` counts those of the text itself."""

    input_ids: Tensor
    attention_mask: Tensor
    labels: Tensor
    tokens: int

    __repr__ = short_repr


def cut_windows(
    loaded: LoadedModel,
    text: str | TextFile,
    *,
    length: int | None = None,
    most_tokens: int | None = None,
    seed: int = 0,
) -> Windows:
    """``text`` cut into windows of ``length`` tokens; an MLM is to predict 15 % of them.

    Of a file only as much is read and tokenised as ``most_tokens`` need.
    """
    tokenizer = loaded.tokenizer
    if length is None:
        length = min(256, max_length(loaded.model) or 256)
    check_length(loaded.model, length)
    before, after = _special_tokens(tokenizer)
    room = length - len(before) - len(after)
    if room < 1:
        raise ValueError(f"a window of {length} tokens leaves no room beside the {len(before + after)} special ones")
    # The tokenizer warns that the whole text is longer than the model; it is cut here.
    ids = first_tokens(
        text, most_tokens, lambda part: tokenizer(part, add_special_tokens=False, verbose=False)["input_ids"]
    )
    if not ids:
        raise ValueError("the text has no tokens for this model's tokenizer")
    rows = [before + ids[i : i + room] + after for i in range(0, len(ids), room)]
    # The model never reads what padding holds, so a tokenizer without a padding token needs none.
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
    longest = max(map(len, rows))
    input_ids = torch.tensor([row + [pad] * (longest - len(row)) for row in rows])
    attention_mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
    of_text = torch.tensor(
        [
            [0] * len(before) + [1] * (len(row) - len(before) - len(after)) + [0] * (longest - len(row) + len(after))
            for row in rows
        ]
    ).bool()
    if loaded.task == "mlm":
        input_ids, labels = _masked(input_ids, of_text, tokenizer, seed)
    else:
        labels = input_ids.masked_fill(~of_text, IGNORED)
    # Masks are drawn on the CPU, so that they are the same wherever the model is.
    device = next(loaded.model.parameters()).device
    return Windows(input_ids.to(device), attention_mask.to(device), labels.to(device), len(ids))


def batches(windows: Windows, *, size: int) -> Iterator[dict[str, Tensor]]:
    """The windows in batches, as a model's ``forward`` takes them, with their labels."""
    for lo in range(0, len(windows.input_ids), size):
        rows = slice(lo, lo + size)
        yield {
            "input_ids": windows.input_ids[rows],
            "attention_mask": windows.attention_mask[rows],
            "labels": windows.labels[rows],
        }


@torch.no_grad()
def quality(loaded: LoadedModel, windows: Windows, *, batch: int) -> dict[str, Any] | None:
    """Perplexity of the next token, or the share of masked tokens predicted wrongly, with the attention that the model
    has at the moment; None for a model that predicts no tokens."""
    if loaded.task not in ("mlm", "causal"):
        return None
    loss, wrong, count = 0.0, 0, 0
    for part in batches(windows, size=batch):
        labels = part["labels"]
        logits = loaded.model(**model_inputs(loaded, part)).logits
        if loaded.task == "causal":
            logits, labels = logits[:, :-1], labels[:, 1:]
        chosen = labels != IGNORED
        logits, labels = logits[chosen].double(), labels[chosen]
        loss += float(cross_entropy(logits, labels, reduction="sum"))
        wrong += int((logits.argmax(-1) != labels).sum())
        count += len(labels)
    if count == 0:
        return None
    mean = loss / count
    if loaded.task == "mlm":
        return {"name": "mlm_error", "value": wrong / count, "loss": mean, "predicted": count}
    return {"name": "perplexity", "value": math.exp(min(mean, 700.0)), "loss": mean, "predicted": count}


def model_inputs(loaded: LoadedModel, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """What the model's ``forward`` takes of a batch of windows."""
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    if loaded.task == "seq2seq":
        # A plain text has no translation, so the decoder reads the same text.
        inputs |= {"decoder_input_ids": batch["input_ids"], "decoder_attention_mask": batch["attention_mask"]}
    return inputs


def quality_label(name: str) -> str:
    """A measure of quality as a table's header names it."""
    return LABELS.get(name, name)


def quality_text(name: str, value: float | None) -> str:
    """A measured quality as a table's cell shows it.

    >>> quality_text("mlm_error", 0.25), quality_text("perplexity", 12.3456), quality_text("perplexity", None)
    ('25.0%', '12.35', '-')
    """
    if value is None:
        return "-"
    return f"{value:.1%}" if name == "mlm_error" else f"{value:.4g}"


def _special_tokens(tokenizer: Any) -> tuple[list[int], list[int]]:
    """What the tokenizer puts before and after a text."""
    body = tokenizer("a", add_special_tokens=False)["input_ids"]
    whole = tokenizer("a")["input_ids"]
    for start in range(len(whole) - len(body) + 1):
        if whole[start : start + len(body)] == body:
            return whole[:start], whole[start + len(body) :]
    return [], []


def _masked(input_ids: Tensor, of_text: Tensor, tokenizer: Any, seed: int) -> tuple[Tensor, Tensor]:
    """15 % of the text's tokens are labels: 80 % of them [MASK], 10 % another token, 10 % unchanged (BERT; OVA, A.1).

    At least one token is a label and becomes [MASK], however short the text is.
    """
    if tokenizer.mask_token_id is None:
        raise ValueError("the model predicts masked tokens, but its tokenizer has no mask token")
    generator = torch.Generator().manual_seed(seed)
    chance = torch.rand(input_ids.shape, generator=generator).masked_fill(~of_text, 2.0)
    least = chance == chance.min()
    chosen = (chance < 0.15) | least
    words = torch.tensor(sorted(set(range(len(tokenizer))) - set(tokenizer.all_special_ids)))
    other = words[torch.randint(len(words), input_ids.shape, generator=generator)]
    # Given that chance < 0.15, chance / 0.15 is uniform again.
    masked, replaced = (chance < 0.8 * 0.15) | least, (chance >= 0.8 * 0.15) & (chance < 0.9 * 0.15)
    inputs = torch.where(masked, tokenizer.mask_token_id, torch.where(replaced, other, input_ids))
    return inputs, input_ids.masked_fill(~chosen, IGNORED)
