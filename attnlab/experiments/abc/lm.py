"""``attnlab reproduce abc-lm``: Table 2, language models that differ in their attention only."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attnlab.data import IGNORED, Blocks, CausalSource
from attnlab.experiments.abc.dense import dense_attention
from attnlab.experiments.abc.summaries import Rows, means
from attnlab.experiments.parts import Part, best_device
from attnlab.experiments.together import Fitted, fit
from attnlab.experiments.value_aware_common import Corpus
from attnlab.experiments.value_aware_lm import Score, causal_loss, sliding_windows
from attnlab.models import CausalLM, Transformer, named_config
from attnlab.training import Recipe, Schedule

__all__ = ["KEYS", "NAME", "NOTES", "TABLES", "AbcLmConfig", "Variant", "build", "run_table"]

NAME = "abc-lm"
KEYS = {
    "table_2a": ["model", "n", "context", "seed"],
    "table_2b": ["model", "n", "seed"],
    "curves": ["setting", "model", "n", "seed", "step"],
    "training": ["setting", "model", "n", "seed"],
}
NOTES = {
    "table_2a": "Test perplexity per word of WikiText-103, as the paper's; perplexity_per_token is per token of our 8k "
    "vocabulary. Trained on enwik8's text, lower-cased; words that are <unk> in WikiText-103 are context but are not "
    "predicted. With context 0 every token but a segment's first is predicted.",
    "table_2b": "As 2a, with a context of 256, more layers and layer dropout.",
    "training": "All models of a table learn from the same batches, for equally many steps; seconds are of a GPU that "
    "other jobs share. tokens_per_parameter leaves the embeddings out.",
    "curves": "Loss of a token of held-out enwik8 articles, in segments without context.",
}
# Updates between looks at the clock and, at the doublings of it, at the held-out loss.
CURVE = 250


@dataclass(frozen=True)
class Variant:
    """A row of a table: the model's name there, its memory, and its attention."""

    model: str
    n: int | None
    spec: str

    @property
    def key(self) -> str:
        """The row in one word."""
        return f"{self.model}-{self.n}"


@dataclass(frozen=True)
class AbcLmConfig:
    """Table 9's settings, scaled down; the paper's are 16 and 32 layers of width 1,024, 64 segments of 512 a batch."""

    width: int = 256
    # Heads of 128, as the paper's.
    heads: int = 2
    layers: int = 3
    # Of Table 2b, which is twice as deep in the paper.
    deep_layers: int = 4
    layer_dropout: float = 0.2
    length: int = 512
    batch: int = 16
    # A model this small does not see a text often enough to learn it by heart.
    dropout: float = 0.0
    recipe: Recipe = field(default_factory=lambda: Recipe(lr=1.5e-3, betas=(0.9, 0.98)))
    warmup: int = 200
    contexts: tuple[int, ...] = (0, 480)
    deep_context: int = 256
    seeds: tuple[int, ...] = (0,)
    # Rows by their keys, so that processes may share a table; None: all of them.
    models: tuple[str, ...] | None = None
    streams: int = 5
    # With a context that all but fills a segment, every so many windows of the test set are scored.
    eval_every: int = 3
    # Windows of the test set; None: all.
    eval_rows: int | None = None
    eval_batch: int = 64

    def __post_init__(self) -> None:
        if not all(0 <= c < self.length for c in (*self.contexts, self.deep_context)):
            raise ValueError(f"contexts must be shorter than a segment of {self.length}, got {self.contexts}")


TABLES: dict[str, tuple[Variant, ...]] = {
    "table_2a": (
        Variant("BASE", None, "softmax"),
        Variant("Linformer", 64, "abc-linformer:slots=64,length={length}"),
        Variant("ABC_RD", 64, "abc-random:slots=64"),
        Variant("ABC_MLP", 32, "abc-mlp:slots=32"),
        Variant("ABC_MLP", 64, "abc-mlp:slots=64"),
    ),
    # ELU's memory is as wide as a head; RFA's is a sine and a cosine for each of 32 random directions.
    "table_2b": (
        Variant("BASE", None, "softmax"),
        Variant("ELU", 128, "kernel:elu"),
        Variant("RFA", 64, "rfa:features=32"),
        Variant("T2R", 64, "t2r:features=64"),
        Variant("ABC_MLP", 64, "abc-mlp:slots=64"),
    ),
}


def build(config: AbcLmConfig, table: str, variant: Variant, *, vocab: int, seed: int) -> Transformer:
    """The untrained model of a row; all rows of a seed start from the same weights."""
    deep = table == "table_2b"
    torch.manual_seed(seed)
    return Transformer(
        replace(
            named_config("abc-lm-16"),
            vocab=vocab,
            # Adaptive embeddings serve a vocabulary of words; ours is of 8k pieces.
            cutoffs=(),
            adaptive_dropout=0.0,
            width=config.width,
            heads=config.heads,
            hidden=4 * config.width,
            layers=config.deep_layers if deep else config.layers,
            layer_dropout=config.layer_dropout if deep else 0.0,
            final_norm=True,
            dropout=config.dropout,
            activation_dropout=0.0,
            max_length=config.length,
            causal_attention=variant.spec.format(length=config.length),
        )
    )


def run_table(
    table: str, config: AbcLmConfig, *, corpus: Path, part: Part, seconds: float, steps: int | None = None
) -> None:
    """Train the models of a table, seed by seed, and score them; ``seconds`` is for all seeds together."""
    stores = Corpus(corpus)
    rows = [v for v in TABLES[table] if config.models is None or v.key in config.models]
    for seed in config.seeds:
        if not all(part.has(table, model=v.model, n=v.n, seed=seed) for v in rows):
            _run_seed(table, config, rows, seed, stores, part, seconds / len(config.seeds), steps)


def _run_seed(
    table: str,
    config: AbcLmConfig,
    rows: Sequence[Variant],
    seed: int,
    stores: Corpus,
    part: Part,
    seconds: float,
    steps: int | None,
) -> None:
    device, tokeniser = best_device(), stores.tokeniser()
    vocab = -(-tokeniser.vocab_size // 64) * 64
    models = {v.key: build(config, table, v, vocab=vocab, seed=seed).to(device) for v in rows}
    blocks = Blocks(stores.store("train"), tokeniser.specials, length=config.length, form="stream", seed=seed)
    valid = _windows(stores, "valid", config, device, context=0)[0]

    def look(step: int) -> None:
        # At 250, 500, 1000, ... updates: a loss falls by the logarithm of what was read.
        if step % CURVE == 0 and (step // CURVE).bit_count() == 1:
            for variant in rows:
                _note_loss(table, part, variant, models[variant.key], valid, step, seed)

    with ExitStack() as stack:
        for model in models.values():
            stack.enter_context(dense_attention(model))
        found = fit(
            models,
            CausalSource(blocks, config.batch, seed=seed),
            term=CausalLM(),
            recipe=config.recipe,
            schedule=Schedule("cosine", warmup=config.warmup),
            steps=steps,
            seconds=seconds,
            streams=config.streams,
            every=CURVE,
            then=look,
        )
        for variant in rows:
            _note_size(table, config, part, variant, models[variant.key], found, seed)
            _note_loss(table, part, variant, models[variant.key], valid, found.steps, seed)
            _score(table, config, part, models[variant.key], variant, stores, seed)


def _note_loss(
    table: str, part: Part, variant: Variant, model: Transformer, valid: _Batches, step: int, seed: int
) -> None:
    loss = _loss(model, valid).loss
    part.row("curves", setting=table, model=variant.model, n=variant.n, seed=seed, step=step, loss=loss)


def _loss(model: Transformer, windows: _Batches) -> Score:
    training = model.training
    with torch.autocast(windows.device.type, torch.bfloat16, enabled=windows.device.type == "cuda"):
        found = causal_loss(model.eval(), windows)  # type: ignore[arg-type]
    model.train(training)
    return found


def _note_size(
    table: str, config: AbcLmConfig, part: Part, variant: Variant, model: Transformer, found: Fitted, seed: int
) -> None:
    tokens = found.steps * config.batch * config.length
    parameters = sum(p.numel() for p in model.parameters())
    inner = parameters - model.tokens.weight.numel()  # type: ignore[operator]
    part.row(
        "training", setting=table, model=variant.model, n=variant.n, seed=seed, steps=found.steps, tokens=tokens,
        seconds=round(found.seconds, 1), parameters=parameters, without_embeddings=inner,
        tokens_per_parameter=tokens / inner,
    )  # fmt: skip


def _score(
    table: str, config: AbcLmConfig, part: Part, model: Transformer, variant: Variant, stores: Corpus, seed: int
) -> None:
    for context in config.contexts if table == "table_2a" else (config.deep_context,):
        device = next(model.parameters()).device
        windows, tokens_per_word = _windows(stores, "wikitext103-test", config, device, context=context)
        found = _loss(model, windows)
        own = {"context": context} if table == "table_2a" else {}
        part.row(
            table,
            model=variant.model,
            n=variant.n,
            **own,
            seed=seed,
            perplexity=math.exp(found.loss * tokens_per_word),
            perplexity_per_token=found.perplexity(),
            loss=found.loss,
            predicted=found.tokens,
        )


def _windows(
    stores: Corpus, name: str, config: AbcLmConfig, device: torch.device, *, context: int
) -> tuple[_Batches, float]:
    """(the windows, tokens per word of the whole store); unknown words count on neither side."""
    specials, store = stores.tokeniser().specials, stores.store(name)
    assert specials.eos is not None
    tokens, labels = sliding_windows(
        store, specials.eos, length=config.length, context=max(1, context), unknown=specials.unk
    )
    words = store.meta["words"] - store.meta["unknown_words"] if "words" in store.meta else None
    ratio = 1.0 if words is None else int((labels[:, 1:] != IGNORED).sum()) / words
    every = config.eval_every if context > config.length // 2 else 1
    chosen = slice(None, None if config.eval_rows is None else every * config.eval_rows, every)
    return _Batches(tokens[chosen], labels[chosen], config.eval_batch, device), ratio


def untestable(tables: Mapping[str, list[dict[str, Any]]]) -> dict[str, str]:
    """Claims about a longer context need a model that has learned to use one."""
    found: dict[int, list[float]] = {}
    for row in tables.get("table_2a", []):
        if row["model"] == "BASE":
            found.setdefault(row["context"], []).append(row["perplexity"])
    if 0 not in found or 480 not in found:
        return {}
    gain = 1 - (sum(found[480]) / len(found[480])) / (sum(found[0]) / len(found[0]))
    if gain > 0.02:
        return {}
    why = f"BASE itself gains {100 * gain:.1f} % of perplexity from a context of 480: too little training to use one"
    return {"abc-gap-grows-with-context": why, "abc-linformer-worsens-with-context": why}


def derived(tables: dict[str, Rows]) -> dict[str, Rows]:
    """The tables with their seeds averaged, and beside each model what its perplexity is times BASE's."""
    found = {}
    for table, keys in (("table_2a", ["model", "n", "context"]), ("table_2b", ["model", "n"])):
        rows = means(tables.get(table, []), keys, "perplexity")
        base = {row.get("context"): row["perplexity"] for row in rows if row["model"] == "BASE"}
        for row in rows:
            if row.get("context") in base:
                row["times_base"] = row["perplexity"] / base[row.get("context")]
        if rows:
            found[f"{table}_means"] = rows
    return found


@dataclass(frozen=True, eq=False)
class _Batches:
    tokens: np.ndarray
    labels: np.ndarray
    size: int
    device: torch.device

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for lo in range(0, len(self.tokens), self.size):
            rows = slice(lo, lo + self.size)
            yield {
                "input_ids": torch.from_numpy(self.tokens[rows]).to(self.device),
                "labels": torch.from_numpy(self.labels[rows]).to(self.device),
            }
