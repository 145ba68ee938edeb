"""Text that a language model writes itself, for its conversion to learn from where none of its own kind is at hand."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attnlab.adapters import LoadedModel
from attnlab.adapters.cache_bytes import cache_bytes
from attnlab.adapters.generate import sample_rows
from attnlab.adapters.load import max_length
from attnlab.adapters.model_files import check_ids
from attnlab.data.beginnings import tokens_around
from attnlab.data.readers import texts
from attnlab.data.text_folders import text_files
from attnlab.fields import check_fields
from attnlab.progress import each
from attnlab.provenance import write_json
from attnlab.sizes import check_bytes, memory_bytes
from attnlab.training.runs import lock_folder

__all__ = ["OwnText", "repeated_share", "write_own_text"]

TEXTS, STATE = "texts.jsonl", "sampling.json"
# A text of fewer new tokens is dropped: a quarter of the length, and at most so many.
LEAST = 32
# Tokens in a row that make a repetition, and the share of repetitions above which a text is a loop.
RUN, MOST_REPEATED = 4, 0.4
# Batches in a row without a text that is kept, after which the model is taken to have none.
PATIENCE = 20
# Tokens of a batch, where none is asked for: rows are as many as this has room for.
BATCH = {"cpu": 1 << 14, "cuda": 1 << 18}
# The model's own probabilities, whatever its folder says of sampling.
AS_IT_IS: dict[str, Any] = {"top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0, "no_repeat_ngram_size": 0}
# Arrays of one number for each word that drawing a token holds.
DRAWING = 4
# Every seed has as many batches for itself.
MOST_SEEDS = 1_000_003
# The most beginnings that are read; they are used again after the last.
BEGINNINGS = 1 << 16


@dataclass(frozen=True)
class OwnText:
    """How much a model writes, and how.

    Batches take the ``temperatures`` in turn. Every text begins as the tokenizer begins one, or with the first
    ``begin_tokens`` tokens of a paragraph of the files in ``begin``.
    """

    tokens: int = 1_000_000
    temperatures: tuple[float, ...] = (0.7, 1.0)
    # Tokens of a text at most; None: 512, or the model's positions.
    length: int | None = None
    begin: tuple[str, ...] = ()
    begin_tokens: int = 8
    # Tokens of a batch; None: those the folder was begun with, or as many as suit the device.
    batch: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_fields(self)
        if self.tokens < 1:
            raise ValueError(f"tokens must be at least 1, got {self.tokens}")
        if not self.temperatures or not all(0 < one < 100 for one in self.temperatures):
            raise ValueError(f"temperatures must be numbers above 0, got {list(self.temperatures)}")
        if self.length is not None and self.length < 2:
            raise ValueError(f"length must be at least 2, got {self.length}")
        if self.begin_tokens < 1:
            raise ValueError(f"begin_tokens must be at least 1, got {self.begin_tokens}")
        if self.batch is not None and self.batch < (self.length or 1):
            raise ValueError(
                f"a batch of {self.batch} tokens has no room for one text; give at least {self.length or 1}"
            )
        if not 0 <= self.seed < MOST_SEEDS:
            raise ValueError(f"seed must lie between 0 and {MOST_SEEDS - 1}, got {self.seed}")


def write_own_text(loaded: LoadedModel, out: Path, settings: OwnText, *, model: str) -> dict[str, Any]:
    """Let a causal model write texts into ``out/texts.jsonl``; returns what ``out/sampling.json`` holds.

    Texts that are loops or that end at once are dropped. The same call goes on after a kill, and the file is the same
    as without it: every batch has a seed of its own. ``model`` is the name that the folder remembers.
    """
    if loaded.task != "causal":
        raise ValueError(f"{type(loaded.model).__name__} is no causal language model, so it writes no text")
    settings = _fitted(settings, loaded, out)
    assert settings.length is not None
    assert settings.batch is not None
    device = next(loaded.model.parameters()).device
    rows = max(1, settings.batch // settings.length)
    first = _first_rows(loaded.tokenizer, settings)
    check_ids(loaded.model, torch.tensor(first))
    # As JSON has them, to be compared with those of the folder.
    asked = {"model": model, "dtype": str(next(loaded.model.parameters()).dtype), **asdict(settings)}
    asked |= {"temperatures": list(settings.temperatures), "begin": list(settings.begin)}
    with lock_folder(out):
        state = _state(out, asked)
        with open(out / TEXTS, "ab") as file:
            # What a kill left of a batch that was not counted yet.
            file.truncate(state["bytes"])
            for _ in _steps(state, settings.tokens):
                number = state["batches"]
                begin = torch.tensor([first[(number * rows + i) % len(first)] for i in range(rows)], device=device)
                temperature = settings.temperatures[number % len(settings.temperatures)]
                records = list(_batch(loaded, begin, settings, temperature, seed=settings.seed * MOST_SEEDS + number))
                kept = [record for record in records if isinstance(record, dict)]
                file.writelines((json.dumps(record, ensure_ascii=False) + "\n").encode() for record in kept)
                file.flush()
                _count(state, kept, [record for record in records if isinstance(record, str)], file.tell())
                write_json(out / STATE, {"settings": asked, **state})
    return {"settings": asked, **state}


def repeated_share(tokens: Sequence[int], run: int = RUN) -> float:
    """The share of the runs of ``run`` tokens that stood in the text before; 0 where it is shorter.

    >>> repeated_share([1, 2, 3, 1, 2], run=2)
    0.25
    """
    runs = [tuple(tokens[i : i + run]) for i in range(len(tokens) - run + 1)]
    return 1 - len(set(runs)) / len(runs) if runs else 0.0


def _fitted(settings: OwnText, loaded: LoadedModel, out: Path) -> OwnText:
    """The settings with a length that the model has positions for, and a batch that the device has room for."""
    limit, device = max_length(loaded.model), next(loaded.model.parameters()).device
    length = settings.length or min(512, limit or 512)
    if limit is not None and length > limit:
        raise ValueError(
            f"texts of {length} tokens are longer than the model's {limit} positions; give a shorter length"
        )
    if settings.begin and settings.begin_tokens >= length:
        raise ValueError(f"texts that begin with {settings.begin_tokens} given tokens must be longer, got {length}")
    # A text holds its keys and values, and while a token is drawn some numbers for each word.
    row = cache_bytes(loaded.model, length) + DRAWING * 4 * len(loaded.tokenizer)
    batch = settings.batch or _begun_batch(out)
    if batch is None:
        rows = max(1, min(BATCH.get(device.type, BATCH["cpu"]) // length, memory_bytes(str(device)) // (4 * row)))
        batch = rows * length
    check_bytes(
        f"a batch of {batch // length} texts", row * (batch // length), instead="make it smaller", device=device
    )
    return replace(settings, length=length, batch=batch)


def _begun_batch(out: Path) -> int | None:
    """The batch that a folder was begun with, so that another machine goes on with the same texts."""
    try:
        batch = json.loads((out / STATE).read_text())["settings"]["batch"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return batch if isinstance(batch, int) and batch > 0 else None


def _first_rows(tokenizer: Any, settings: OwnText) -> list[list[int]]:
    """The tokens that texts begin with."""
    before = tokens_around(tokenizer)[0]
    if not settings.begin:
        for token in (tokenizer.bos_token_id, tokenizer.cls_token_id, tokenizer.eos_token_id):
            if not before and token is not None:
                before = [token]
        if not before:
            raise ValueError("the tokenizer has no token that begins a text: name a file whose beginnings to continue")
        return [before]
    rows = list(islice(_paragraph_beginnings(tokenizer, settings), BEGINNINGS))
    if not rows:
        raise ValueError(
            f"{settings.begin[0]} has no paragraph of {settings.begin_tokens} tokens or more to begin a text with"
        )
    return [[*before, *row] for row in rows]


def _paragraph_beginnings(tokenizer: Any, settings: OwnText) -> Iterator[list[int]]:
    for file in text_files(settings.begin):
        for paragraph in texts(file, unit="paragraph"):
            # A token is seldom longer than 16 characters.
            ids = tokenizer(paragraph[: 16 * settings.begin_tokens], add_special_tokens=False)["input_ids"]
            if len(ids) >= settings.begin_tokens:
                yield ids[: settings.begin_tokens]


def _state(out: Path, asked: dict[str, Any]) -> dict[str, Any]:
    """What the folder holds already; a folder of another kind or of other settings is a ValueError."""
    file = out / STATE
    if not file.exists():
        # A kill before the first batch was counted leaves a file of texts that nothing speaks of.
        other = sorted(path.name for path in out.iterdir() if path.name not in (TEXTS, ".lock"))
        if other:
            raise ValueError(f"{out} holds something else than sampled text ({other[0]}); choose another folder")
        return {"batches": 0, "texts": 0, "tokens": 0, "bytes": 0, "dropped": {}, "in_vain": 0}
    try:
        state = json.loads(file.read_text())
        before = state.pop("settings")
    except (ValueError, KeyError, AttributeError):
        raise ValueError(f"{file} is damaged; choose another folder") from None
    # More tokens go on with the same texts.
    changed = [name for name in asked if name != "tokens" and asked[name] != before.get(name)]
    if changed:
        name = changed[0]
        raise ValueError(
            f"{out} was begun with {name} {before.get(name)}, not {asked[name]}; use the same or another folder"
        )
    if not (out / TEXTS).is_file() or (out / TEXTS).stat().st_size < state["bytes"]:
        raise ValueError(f"{out / TEXTS} is shorter than when it was written; choose another folder")
    return dict(state)


def _steps(state: dict[str, Any], tokens: int) -> Iterator[None]:
    """One step for each batch until there are enough tokens, shown as tenths of what is missing."""
    tenths = range(1, 11)
    start = state["tokens"]
    for tenth in each(tenths, lambda tenth: f"{(start + (tokens - start) * (tenth - 1) // 10):,} tokens"):
        while state["tokens"] < start + (tokens - start) * tenth / 10:
            yield
            if state["in_vain"] >= PATIENCE:
                reasons = ", ".join(f"{count:,} were {reason}" for reason, count in state["dropped"].items())
                raise ValueError(
                    f"of the last {PATIENCE} batches no text was kept ({reasons}); let it continue beginnings of a text"
                )


def _batch(
    loaded: LoadedModel, begin: Tensor, settings: OwnText, temperature: float, *, seed: int
) -> Iterator[dict[str, Any] | str]:
    """The texts of a batch; of one that is dropped the reason."""
    assert settings.length is not None
    tokenizer, given = loaded.tokenizer, begin.shape[1]
    new = settings.length - given
    written = sample_rows(loaded, begin, max_new_tokens=new, temperature=temperature, seed=seed, **AS_IT_IS)
    ends = {tokenizer.eos_token_id, tokenizer.sep_token_id, tokenizer.pad_token_id} - {None}
    for row in written.tolist():
        end = next((i for i in range(given, len(row)) if row[i] in ends), len(row))
        if end - given < min(LEAST, new // 4):
            yield "short"
        elif repeated_share(row[:end]) > MOST_REPEATED:
            yield "loops"
        else:
            text = tokenizer.decode(row[:end], skip_special_tokens=True).strip()
            yield {"text": text, "temperature": temperature, "tokens": end} if text else "short"


def _count(state: dict[str, Any], kept: Sequence[dict[str, Any]], dropped: Sequence[str], size: int) -> None:
    state["batches"] += 1
    state["texts"] += len(kept)
    state["tokens"] += sum(record["tokens"] for record in kept)
    state["bytes"] = size
    state["in_vain"] = 0 if kept else state["in_vain"] + 1
    state["dropped"] = dict(sorted((Counter(state["dropped"]) + Counter(dropped)).items()))
