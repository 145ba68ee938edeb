"""How well a model predicts a text, which it reads in windows of tokens with the tokenizer's own special tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from attnlab.adapters.load import LoadedModel, check_length, max_length
from attnlab.adapters.model_files import check_ids, check_reads_text, unknown_tokens
from attnlab.data import IGNORED, TextFile
from attnlab.data.beginnings import first_tokens, tokens_around
from attnlab.data.readers import check_unicode
from attnlab.measure import parameter_count
from attnlab.pages.numbers import with_interval
from attnlab.reading.correlation import bootstrap_interval
from attnlab.summaries import short_repr
from attnlab.training.runs import say

__all__ = [
    "Predictions",
    "Windows",
    "batch_count",
    "batches",
    "cut_windows",
    "default_tokens",
    "model_inputs",
    "predict",
    "quality",
    "quality_label",
    "quality_summary",
    "quality_text",
    "refuse_short_text",
]

# Tokens in a piece of text; the fewest pieces that an interval is made of, and the most.
PIECE, LEAST_PIECES, MOST_PIECES = 64, 5, 512
# The most numbers that the logits of one batch hold: 1 GB in float32.
LOGITS = 1 << 28
# Tokens that are read where no number is given: a forward pass costs about parameters times tokens, and with some ten
# mechanisms this much takes minutes on two cores.
MOST_TOKENS, LEAST_TOKENS, WORK = 8192, 1024, 2e11

# Below this a perplexity or an error is that of a word or two.
SHORTEST_TEXT = 16
# The measures of quality, as a table's header names them.
LABELS = {"mlm_error": "MLM error", "perplexity": "perplexity"}


@dataclass(frozen=True, eq=False)
class Windows:
    """Inputs and labels of every window, padded on the right; ``tokens`` counts those of the text itself.

    Of a part, ``tokens`` counts those that the model sees, special ones too.
    """

    input_ids: Tensor
    attention_mask: Tensor
    labels: Tensor
    tokens: int

    __repr__ = short_repr

    def part(self, rows: slice, *, length: int | None = None) -> Windows:
        """Some of the windows, each cut to its first ``length`` tokens."""
        ids, mask, labels = (t[rows, :length] for t in (self.input_ids, self.attention_mask, self.labels))
        return Windows(ids, mask, labels, int(mask.sum()))

    def to(self, device: torch.device) -> Windows:
        """The same windows on a device."""
        ids, mask, labels = (t.to(device) for t in (self.input_ids, self.attention_mask, self.labels))
        return Windows(ids, mask, labels, self.tokens)


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
    if isinstance(text, str):
        check_unicode(text, what="the text")
    if length is None:
        length = min(256, max_length(loaded.model) or 256)
    check_length(loaded.model, length)
    before, after = tokens_around(tokenizer)
    room = length - len(before) - len(after)
    if room < 1:
        raise ValueError(f"a window of {length} tokens leaves no room beside the {len(before + after)} special ones")
    # The tokenizer warns that the whole text is longer than the model; it is cut here.
    ids = first_tokens(
        text, most_tokens, lambda part: tokenizer(part, add_special_tokens=False, verbose=False)["input_ids"]
    )
    if not ids:
        raise ValueError("the text has no tokens for this model's tokenizer")
    check_reads_text(loaded.model)
    check_ids(loaded.model, torch.tensor(ids))
    if (doubt := unknown_tokens(tokenizer, torch.tensor(ids))) is not None:
        say(f"warning: {doubt}")
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
    return Windows(input_ids, attention_mask, labels, len(ids)).to(next(loaded.model.parameters()).device)


def refuse_short_text(windows: Windows, *, asked: int) -> None:
    """Raise if the text has so few tokens, and fewer than were asked for, that nothing can be measured on it."""
    if windows.tokens < min(SHORTEST_TEXT, asked):
        raise ValueError(
            f"the text has {windows.tokens} token{'s' * (windows.tokens > 1)}, from which nothing can be measured; "
            f"give a text of at least {SHORTEST_TEXT}, better of thousands"
        )


def batches(windows: Windows, *, size: int) -> Iterator[dict[str, Tensor]]:
    """The windows in batches, as a model's ``forward`` takes them, with their labels."""
    for lo in range(0, len(windows.input_ids), size):
        rows = slice(lo, lo + size)
        yield {
            "input_ids": windows.input_ids[rows],
            "attention_mask": windows.attention_mask[rows],
            "labels": windows.labels[rows],
        }


@dataclass(frozen=True, eq=False)
class Predictions:
    """Summed losses, wrong guesses and the number of predicted tokens in every piece of the text.

    A piece is up to 64 neighbouring tokens of a window: what intervals resample, since neighbours are alike.
    """

    task: str
    loss: list[float]
    wrong: list[int]
    count: list[int]

    @property
    def mean_loss(self) -> float:
        return sum(self.loss) / sum(self.count)

    def loss_above(self, other: Predictions) -> tuple[float, float | None, float | None]:
        """(mean, low, high) of the loss above another's on the same tokens, by a paired bootstrap over pieces."""
        return _interval([a - b for a, b in zip(self.loss, other.loss, strict=True)], self.count)


@torch.no_grad()
def predict(
    loaded: LoadedModel, windows: Windows, *, batch: int, on_batch: Callable[[], None] | None = None
) -> Predictions | None:
    """The model's predictions of the text with the attention that it has at the moment; None if it predicts none."""
    if loaded.task not in ("mlm", "causal"):
        return None
    sums: list[tuple[float, int, int]] = []
    for part in batches(windows, size=_fitting(loaded, windows, batch)):
        labels = part["labels"]
        logits = loaded.model(**model_inputs(loaded, part)).logits
        if loaded.task == "causal":
            logits, labels = logits[:, :-1], labels[:, 1:]
        for row_logits, row in zip(logits, labels, strict=True):
            sums += [_piece(row_logits[i : i + PIECE], row[i : i + PIECE]) for i in range(0, len(row), PIECE)]
        if on_batch is not None:
            on_batch()
    sums = [one for one in sums if one[2]]
    if not sums:
        return None
    loss, wrong, count = zip(*sums, strict=True)
    return Predictions(loaded.task, list(loss), list(wrong), list(count))


def _piece(logits: Tensor, labels: Tensor) -> tuple[float, int, int]:
    """(summed loss, wrong guesses, predicted tokens) of neighbouring tokens."""
    chosen = labels != IGNORED
    logits, labels = logits[chosen].double(), labels[chosen]
    wrong = int((logits.argmax(-1) != labels).sum()) if len(labels) else 0
    return float(cross_entropy(logits, labels, reduction="sum")), wrong, len(labels)


def batch_count(loaded: LoadedModel, windows: Windows, batch: int) -> int:
    """How many batches ``predict`` makes of the windows."""
    return -(-len(windows.input_ids) // _fitting(loaded, windows, batch))


def _fitting(loaded: LoadedModel, windows: Windows, batch: int) -> int:
    """Windows in a batch, at most ``batch``, and fewer where their logits would take more than some GB."""
    config = getattr(loaded.model, "config", None)
    vocabulary = getattr(config, "vocab_size", None) or getattr(config, "vocab", None) or 1
    return max(1, min(batch, LOGITS // max(1, windows.input_ids.shape[1] * vocabulary)))


def quality(loaded: LoadedModel, windows: Windows, *, batch: int) -> dict[str, Any] | None:
    """Perplexity of the next token, or the share of masked tokens predicted wrongly, with the attention that the model
    has at the moment; None for a model that predicts no tokens."""
    predictions = predict(loaded, windows, batch=batch)
    return None if predictions is None else quality_summary(predictions)


def quality_summary(predictions: Predictions) -> dict[str, Any]:
    """The measure of quality with a 95 % interval, and the loss; no interval (None) where there is too little text."""
    mean, count = predictions.mean_loss, sum(predictions.count)
    bounds: tuple[float | None, ...]
    if predictions.task == "mlm":
        name, bounds = "mlm_error", _interval([float(n) for n in predictions.wrong], predictions.count)
    else:
        bounds = _interval(predictions.loss, predictions.count)
        name, bounds = "perplexity", tuple(None if x is None else math.exp(min(x, 700.0)) for x in bounds)
    return {"name": name, **dict(zip(("value", "low", "high"), bounds, strict=True)), "loss": mean, "predicted": count}


def _interval(sums: Sequence[float], counts: Sequence[int]) -> tuple[float, float | None, float | None]:
    """(mean, low, high) of the mean per token, resampling pieces of the text."""
    if len(sums) < LEAST_PIECES or not all(map(math.isfinite, sums)):
        return sum(sums) / sum(counts), None, None
    # Many pieces are joined to some hundred, so that resampling them stays cheap.
    joined = -(-len(sums) // MOST_PIECES)
    tops = [sum(sums[i : i + joined]) for i in range(0, len(sums), joined)]
    below = [sum(counts[i : i + joined]) for i in range(0, len(sums), joined)]
    mean, low, high = bootstrap_interval([t / n for t, n in zip(tops, below, strict=True)], weights=below)
    assert mean is not None
    return mean, low, high


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


def quality_text(quality: Mapping[str, Any] | None) -> str:
    """A measured quality as a table's cell shows it, with its interval.

    >>> quality_text({"name": "mlm_error", "value": 0.253, "low": 0.231, "high": 0.278})
    '25% [23, 28]'
    >>> quality_text({"name": "perplexity", "value": 12.3456}), quality_text(None)
    ('12.3', '-')
    """
    if quality is None or quality["value"] is None:
        return "-"
    share = quality["name"] == "mlm_error"
    bounds = (quality.get("low"), quality.get("high"))
    return with_interval(quality["value"], *bounds, scale=100 if share else 1, unit="%" if share else "")


def default_tokens(loaded: LoadedModel) -> int:
    """How many tokens of a text are read where no number is given: fewer for large models."""
    return int(min(MOST_TOKENS, max(LEAST_TOKENS, WORK / max(1, parameter_count(loaded.model)))))


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
