"""A causal model beside its twin with a memory of constant size: loss, bytes of the cache and speed at each length."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attnlab.adapters import LoadedModel, convert, generate
from attnlab.adapters.cache_bytes import cache_bytes
from attnlab.adapters.initialise import initialise_control
from attnlab.adapters.load import max_length
from attnlab.adapters.prefill import last_logits
from attnlab.adapters.protocol import adapter_of
from attnlab.data.beginnings import first_tokens, tokens_around
from attnlab.evaluation.quality import Windows, cut_windows, predict
from attnlab.measure import median_seconds, parameter_count
from attnlab.mechanisms.abc_select import AbcSelect
from attnlab.models import Transformer
from attnlab.progress import Progress
from attnlab.registry import spec_of

__all__ = ["LENGTHS", "MemoryConfig", "compare_memories", "make_twin", "memory_work", "refuse_without_cache"]

LENGTHS = (512, 1024, 2048, 4096, 8192)
FULL, BOUNDED = "full", "bounded"
# A model of fewer weights reads so many texts of the longest length, a larger one a single one.
SMALL, TEXTS = 24_000_000, 2
# The most bytes that the full caches of all sequences take which decode at once.
MOST_BYTES = 1 << 30
# The keys of a twin that is made here: this share of the longest length, and at least so many.
SHARE, LEAST_KEYS, SINKS = 16, 64, 4
# Tokens from which a twin's scores start, and tokens that are read at once for losses.
STARTED_FROM, AT_ONCE = 8192, 8192
# About how many characters a token has.
CHARACTERS = 4


@dataclass(frozen=True)
class MemoryConfig:
    """The lengths, and how decoding is timed and a passage continued."""

    lengths: tuple[int, ...] = LENGTHS
    # Sequences that decode at once; fewer where their full caches would take more than a gigabyte.
    batch: int = 16
    # Decoding steps that are timed together, and how often.
    steps: int = 4
    repeats: int = 5
    new_tokens: int = 60
    temperature: float = 0.7
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("batch", "steps", "repeats", "new_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not self.lengths or min(self.lengths) < self.room + 2:
            raise ValueError(f"lengths must be at least {self.room + 2} tokens, got {list(self.lengths)}")

    @property
    def room(self) -> int:
        """The tokens of a length that are decoded while the clock runs, or to warm up."""
        return self.steps * (self.repeats + 1)


def refuse_without_cache(loaded: LoadedModel) -> None:
    """Raise a ValueError for a model whose cache cannot be bounded here."""
    if loaded.task != "causal":
        raise ValueError(
            f"{type(loaded.model).__name__} does not write one token after another, so it has no cache to bound"
        )
    if isinstance(loaded.model, Transformer):
        raise ValueError("decoding is timed with transformers' caches, which models of attnlab.models do not use")


def usable_lengths(loaded: LoadedModel, text: str, config: MemoryConfig) -> tuple[tuple[int, ...], list[str]]:
    """(the lengths that model and text allow, a sentence for each reason that others are left out)."""
    limit, around = max_length(loaded.model), sum(map(len, tokens_around(loaded.tokenizer)))
    lengths = tuple(sorted(set(config.lengths)))
    notes = []
    if limit is not None and lengths[-1] > limit:
        notes.append(f"the model reads at most {limit:,} tokens, so longer texts are left out")
        shorter = tuple(n for n in lengths if n <= limit)
        # A model for short texts is measured at its own lengths.
        lengths = shorter or tuple(n for n in (limit // 4, limit // 2, limit) if n >= config.room + 2)
    tokens = len(_tokens(loaded, text, max(lengths, default=0))) + around
    if lengths and lengths[-1] > tokens:
        notes.append(f"the text has {tokens:,} tokens, so longer ones are left out")
        lengths = tuple(n for n in lengths if n <= tokens)
    if not lengths:
        raise ValueError(f"there is no length to measure: {'; '.join(notes)}")
    return lengths, notes


def make_twin(loaded: LoadedModel, text: str, config: MemoryConfig) -> LoadedModel:
    """A copy of the model with a memory of constant size, whose scores start from its attention over unseen text.

    Nothing is trained. The text is what follows the tokens that ``compare_memories`` measures losses on.
    """
    lengths, _ = usable_lengths(loaded, text, config)
    read = _read_tokens(loaded, lengths)
    ids = _tokens(loaded, text, read + STARTED_FROM)
    if len(ids) < read + STARTED_FROM // 4:
        raise ValueError(
            f"of {len(ids):,} tokens of the text the losses need {read:,}, which leaves too few for the twin's scores "
            "to start from; ask for shorter lengths"
        )
    half = max(LEAST_KEYS, lengths[-1] // SHARE) // 2
    twin = convert(loaded.model, AbcSelect(slots=half - SINKS, window=half, sinks=SINKS), copy=True)
    words = loaded.tokenizer.decode(ids[read:])
    initialise_control(twin, [words], tokenizer=loaded.tokenizer, tokens=STARTED_FROM, length=min(1024, lengths[-1]))
    return loaded._replace(model=twin)


@torch.no_grad()
def compare_memories(
    full: LoadedModel,
    bounded: LoadedModel,
    text: str,
    *,
    config: MemoryConfig,
    progress: Progress,
    on_result: Callable[[dict[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """Both models at each length as JSON, and one passage that both continue; ``on_result`` after each length."""
    refuse_without_cache(full)
    models = {FULL: full, BOUNDED: bounded}
    lengths, notes = usable_lengths(full, text, config)
    batch = max(1, min(config.batch, MOST_BYTES // cache_bytes(full.model, lengths[-1])))
    mech = adapter_of(bounded.model).conversions()[0].mechanism
    result: dict[str, Any] = {
        "complete": False,
        "mechanism": spec_of(mech),
        "keys": {name: getattr(mech, name, None) for name in ("sinks", "window", "slots", "size")},
        "config": asdict(config) | {"lengths": list(lengths), "batch": batch},
        "notes": notes,
        "tokens": _read_tokens(full, lengths),
        "rows": [],
    }
    progress.expect(sum(2 * _work(full, lengths, n) for n in lengths))
    for n in lengths:
        progress.stage(f"{n:,} tokens")
        windows = _windows(full, text, lengths, n)
        losses = _losses(models, windows, _work(full, lengths, n), progress)
        speeds = _speeds(models, windows, batch, config)
        result["rows"].append({"length": n, "windows": len(windows.input_ids), **losses, **speeds})
        progress.finished(f"{n:,} tokens")
        if on_result is not None:
            on_result(result)
    progress.stage("a passage that both continue")
    result |= {"continuation": _continuation(models, text, config, keys=getattr(mech, "size", 0)), "complete": True}
    return result


def _tokens(loaded: LoadedModel, text: str, most: int) -> list[int]:
    tokenizer = loaded.tokenizer
    return first_tokens(text, most, lambda part: tokenizer(part, add_special_tokens=False, verbose=False)["input_ids"])


def _read_tokens(loaded: LoadedModel, lengths: tuple[int, ...]) -> int:
    """The tokens of the text that losses are measured on."""
    return lengths[-1] * (TEXTS if parameter_count(loaded.model) < SMALL else 1)


def _work(loaded: LoadedModel, lengths: tuple[int, ...], length: int) -> int:
    """What a length costs, in thousands of tokens of a short text: attention grows with it."""
    return max(1, int(_read_tokens(loaded, lengths) * (1 + length / 4096) / 1024))


def memory_work(loaded: LoadedModel, config: MemoryConfig) -> int:
    """About how many tokens of a short text cost as much as ``make_twin`` and ``compare_memories`` together."""
    limit = max_length(loaded.model) or max(config.lengths)
    lengths = tuple(n for n in sorted(config.lengths) if n <= limit) or (limit,)
    # Both models read the text for their losses, and half as much before they decode.
    return 3 * 1024 * sum(_work(loaded, lengths, n) for n in lengths) + 2 * STARTED_FROM


def _losses(
    models: Mapping[str, LoadedModel], windows: Windows, work: int, progress: Progress
) -> dict[str, float | None]:
    """Nats a token of both models over the same windows, and the bounded one's above the full one's, paired."""
    found = {}
    for name, loaded in models.items():
        found[name] = predict(loaded, windows, batch=max(1, AT_ONCE // windows.input_ids.shape[1]))
        progress.step(work)
    full, bounded = found[FULL], found[BOUNDED]
    assert full is not None
    assert bounded is not None
    above, low, high = bounded.loss_above(full)
    return {
        "full_loss": full.mean_loss,
        "bounded_loss": bounded.mean_loss,
        "loss_above": above,
        "loss_above_low": low,
        "loss_above_high": high,
    }


def _windows(loaded: LoadedModel, text: str, lengths: tuple[int, ...], length: int) -> Windows:
    """The text in whole windows of this length."""
    room = length - sum(map(len, tokens_around(loaded.tokenizer)))
    known = len(_tokens(loaded, text, _read_tokens(loaded, lengths)))
    return cut_windows(loaded, text, length=length, most_tokens=room * max(1, known // length))


def _speeds(models: Mapping[str, LoadedModel], windows: Windows, batch: int, config: MemoryConfig) -> dict[str, float]:
    """The cache's bytes of one sequence, and tokens a second of ``batch`` sequences, the models taking turns."""
    length = windows.input_ids.shape[1]
    ids = windows.input_ids[:1, : length - config.room]
    jobs = {name: _decoding(loaded, ids, batch, config) for name, loaded in models.items()}
    seconds = median_seconds(jobs, repeats=config.repeats, warmup=1, device=ids.device)
    speeds = {f"{name}_tokens_per_second": batch * config.steps / seconds[name] for name in models}
    return {f"{name}_bytes": cache_bytes(loaded.model, length) for name, loaded in models.items()} | speeds


def _decoding(loaded: LoadedModel, ids: Tensor, batch: int, config: MemoryConfig) -> Callable[[], None]:
    """A job of ``config.steps`` decoding steps of a batch, all of whose rows have read ``ids``."""
    from transformers import DynamicCache

    cache = DynamicCache()
    token = last_logits(loaded.model, ids, cache)[:, -1].argmax(-1, keepdim=True).repeat(batch, 1)
    cache = _for_batch(loaded, cache, batch, ids.shape[1] + config.room)

    def steps(token: Tensor) -> None:
        with torch.no_grad():
            for _ in range(config.steps):
                token = last_logits(loaded.model, token, cache)[:, -1].argmax(-1, keepdim=True)

    return partial(steps, token)


def _for_batch(loaded: LoadedModel, cache: Any, batch: int, capacity: int) -> Any:
    """The cache of one sequence for ``batch`` of them; keys and values of all tokens in buffers that are made once.

    transformers' default copies every key at each step, which would make the full cache slower than it need be.
    """
    from transformers import StaticCache
    from transformers.cache_utils import DynamicLayer

    if any(type(layer) is not DynamicLayer for layer in cache.layers):
        cache.batch_repeat_interleave(batch)
        return cache
    static = StaticCache(config=loaded.model.config, max_cache_len=capacity)
    for i, layer in enumerate(cache.layers):
        static.update(*(t.repeat_interleave(batch, 0) for t in (layer.keys, layer.values)), i)
        layer.keys = layer.values = None
    return static


def _continuation(models: Mapping[str, LoadedModel], text: str, config: MemoryConfig, *, keys: int) -> dict[str, Any]:
    """What both models write after the beginning of the text, which is longer than the bounded memory."""
    full = models[FULL]
    limit = max_length(full.model)
    most = max(1200, 2 * CHARACTERS * keys)
    if limit is not None:
        most = min(most, max(1, (limit - config.new_tokens) * CHARACTERS // 2))
    passage = text[:most]
    passage = passage[: passage.rfind(". ") + 1] or passage
    ids = full.tokenizer(passage)["input_ids"]
    read = full.tokenizer.decode(ids, skip_special_tokens=True)
    settings: dict[str, Any] = {
        "max_new_tokens": config.new_tokens,
        "temperature": config.temperature,
        "seed": config.seed,
    }
    written = {name: generate(loaded, passage, **settings).removeprefix(read) for name, loaded in models.items()}
    return {"passage": passage, "passage_tokens": len(ids), **written}
